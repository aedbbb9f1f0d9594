"""The example of TorchAir's manual for collectives in a graph, with muster's names and on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

from graph_forms import FORMS
from launching import free_port

PROGRAM = """
import os
import torch
import muster
# patch collectives of other packages
muster.graph.patch()


class AllReduceSingeGroup(torch.nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, y):
        x = x + y
        torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.SUM)
        return x


def example(rank, world_size):
    torch.distributed.init_process_group("muster", rank=rank, world_size=world_size)
    x = torch.ones([2, 2], dtype=torch.int32)
    y = torch.ones([2, 2], dtype=torch.int32)

    config = muster.graph.Config()
    muster_backend = muster.graph.backend(config)
    model = torch.compile(AllReduceSingeGroup(), backend=muster_backend, fullgraph=True, dynamic=False)
    out = torch.ones([2, 2], dtype=torch.int32) * 2 * world_size
    ret = model(x, y)
    assert out.equal(ret)
    print("rank", rank, "is done", flush=True)
    torch.distributed.destroy_process_group()


def mp():
    world_size = 2
    torch.multiprocessing.spawn(example, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29506"
    mp()
"""
# Of the table of calls in that manual. It has no graphs for the last three.
TABLE = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
    "all_gather_into_tensor_uneven",
    "reduce_scatter_tensor_uneven",
)


def test_the_example_runs(tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(PROGRAM.replace("29506", str(free_port())))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" is done") == 2  # the ranks write parts of lines at the same time


def test_all_calls_of_the_table_are_captured() -> None:
    assert set(TABLE) <= set(FORMS)  # test_graph_capture.py runs these
