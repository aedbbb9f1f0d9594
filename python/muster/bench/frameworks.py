"""Training programs of frameworks, unmodified: from the command to the first step, and the time of a step."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from muster._programs import find_program
from muster.bench.report import BenchFailedError, Row, parse_names
from muster.bench.timing import in_rounds

SUMMARY = "programs of frameworks over muster in Gloo's place, against torchrun and Gloo"
PEERS: tuple[str, ...] = ("torchrun",)
STEPS = 30
_PARAMETERS = 5_269_514

# All programs train this model. Rank 0 writes when its steps ended (CLOCK_MONOTONIC).
COMMON = """
import json, os, sys, time
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
steps, path = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
                            torch.nn.Linear(2048, 10))
inputs, targets = torch.randn(16 * steps, 512), torch.randint(10, (16 * steps,))
ended = []
def step_ended(*_, **__):
    ended.append(time.monotonic())
def write(rank):
    if rank == 0:
        with open(path, "w") as file:
            json.dump(ended, file)
"""
# Gloo aborts a process whose Python ends while Gloo's thread still holds a tensor.
END = "os._exit(0)\n"
# transformers imports its parts when they are used.
PRELOAD = {"accelerate": "accelerate", "transformers": "transformers.trainer", "lightning": "lightning"}
PROGRAMS = {
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
batches = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2), batches)
for batch, expected in batches:
    optimizer.zero_grad()
    accelerator.backward(cross_entropy(model(batch), expected))
    optimizer.step()
    step_ended()
write(accelerator.process_index)
accelerator.end_training()
""",
    "transformers": """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = model
    def forward(self, inputs, labels):
        scores = self.network(inputs)
        return {"loss": cross_entropy(scores, labels), "logits": scores}
class Times(TrainerCallback):
    on_step_end = step_ended
arguments = TrainingArguments(path + ".trainer", use_cpu=True, per_device_train_batch_size=8, max_steps=steps,
    optim="sgd", save_strategy="no", logging_steps=10**6, report_to="none", disable_tqdm=True,
    ddp_find_unused_parameters=False)
rows = [{"inputs": row, "labels": target} for row, target in zip(inputs, targets)]
Trainer(Network(), arguments, train_dataset=rows, callbacks=[Times()]).train()
write(arguments.process_index)
""",
    "lightning": """
import lightning
class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = model
    def training_step(self, batch, number):
        return cross_entropy(self.network(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)
    on_train_batch_end = step_ended
trainer = lightning.Trainer(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False)
trainer.fit(Network(), DataLoader(TensorDataset(inputs, targets), batch_size=8))
write(trainer.global_rank)
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frameworks", help=f"some of: {', '.join(PROGRAMS)} (default: those that are installed)")
    parser.add_argument("--repeats", type=int, help="of each, in turn; the median counts (default: 5, --quick: 1)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields two rows for each framework: the start, and a step."""
    if arguments.repeats is not None and arguments.repeats < 1:
        raise ValueError(f"--repeats takes a number from 1 on; not {arguments.repeats}")
    installed = [name for name in PROGRAMS if importlib.util.find_spec(name)]
    names = parse_names("--frameworks", arguments.frameworks, tuple(PROGRAMS)) if arguments.frameworks else installed
    if missing := sorted({*names} - {*installed}) or ([] if names else list(PROGRAMS)):
        raise ValueError(f"not installed in {sys.prefix}: {', '.join(missing)} (pip install {' '.join(missing)})")
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        for name in names:
            yield from _measure(name, Path(folder), arguments)


def _measure(name: str, folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    script = folder / f"train_{name}.py"
    script.write_text(COMMON + PROGRAMS[name] + END)
    muster = find_program("muster")
    own = [muster, "run", "--nproc-per-node=2", "--replace=gloo", f"--preload={PRELOAD[name]}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # A short path, because sockets are below it. Without the user's own warm zygote.
    with tempfile.TemporaryDirectory(prefix="muster-bench-", dir="/tmp") as runtime:
        environment = {"XDG_RUNTIME_DIR": runtime, "MUSTER_PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"}
        job = partial(_job, script=script, env={**os.environ, **environment}, timeout=arguments.timeout)
        _call([muster, "warm", "--preload", PRELOAD[name]], environment)
        try:
            jobs = {
                "torchrun": partial(job, torchrun),
                "cold": partial(job, [*own, "--no-warm"]),
                "warm": partial(job, own),
            }
            results = in_rounds(jobs, arguments.repeats or (1 if arguments.quick else 5))
        finally:
            _call([muster, "warm", "stop"], environment)
    first = {variant: statistics.median(start for start, _ in runs) for variant, runs in results.items()}
    step = {variant: 1e3 * statistics.median(step for _, step in runs) for variant, runs in results.items()}
    size = 4 * _PARAMETERS
    row = partial(Row, "frameworks", bytes=size, peer_name="torchrun", ranks=2)
    yield row(f"{name}: command to first step", metric="time", unit="s", muster=first["cold"], peer=first["torchrun"])
    case = f"{name}: command to first step, muster warm"
    yield row(case, metric="time", unit="s", muster=first["warm"], peer=first["torchrun"])
    yield row(f"{name}: step", metric="time", unit="ms", muster=step["cold"], peer=step["torchrun"])


def _job(command: list[str], script: Path, env: dict[str, str], timeout: float) -> tuple[float, float]:
    """Runs the program. Returns the seconds from the command to the end of the first step, and those of a step."""
    result = script.with_suffix(".json")
    result.unlink(missing_ok=True)
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, str(script), str(STEPS), str(result)],
        env=env,
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # both launchers end their workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        raise BenchFailedError(f"{command} did not end in time") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0 or not result.exists():
        raise BenchFailedError(f"{command} ended with {process.returncode}:\n" + "\n".join(output.splitlines()[-25:]))
    ended = json.loads(result.read_text())
    steps = [after - before for before, after in itertools.pairwise(ended[5:])]
    return ended[0] - begin, statistics.median(steps)


def _call(words: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise BenchFailedError(f"{words} failed:\n{done.stderr}")
