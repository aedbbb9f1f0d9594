"""Graphs hold the calls of deepspeed.comm after muster.graph.patch()."""

import subprocess
import sys
from pathlib import Path

from sections import needs

pytestmark = needs("deepspeed")

PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("muster")
import deepspeed.comm as comm
import muster

comm.init_distributed("muster", verbose=False)
muster.graph.patch()
rank = dist.get_rank()


def step(x):
    y, reduced = x.clone(), x * 2
    comm.broadcast(y, 0)
    comm.all_reduce(reduced)
    parts = [torch.empty_like(x) for _ in range(2)]
    comm.all_gather(parts, x)
    exchanged = torch.empty_like(x)
    comm.all_to_all_single(exchanged, x)
    return y, reduced, torch.cat(parts), exchanged


x = torch.arange(4.0) + 10 * rank
expected = step(x)
for actual, wanted in zip(torch.compile(step, backend="aot_eager", fullgraph=True)(x), expected):
    assert torch.equal(actual, wanted), (actual, wanted)
print("captured", rank, flush=True)
dist.destroy_process_group()
"""


def test_its_calls_are_captured(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    muster = Path(sys.executable).with_name("muster")
    words: list[str | Path] = [muster, "run", "--nproc-per-node", "2", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)  # DeepSpeed compiles its operator
    assert done.returncode == 0, done.stderr
    assert {f"[rank {rank}] captured {rank}" for rank in range(2)} <= set(done.stdout.splitlines()), done.stdout
