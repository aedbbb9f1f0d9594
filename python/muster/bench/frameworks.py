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
from dataclasses import dataclass
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


@dataclass
class Program:
    code: str
    package: str
    preload: str = ""  # empty: the framework starts its processes itself
    step: str = "step"


PROGRAMS = {
    "accelerate": Program(
        """
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
        package="accelerate",
        preload="accelerate",
    ),
    "transformers": Program(
        """
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
        package="transformers",
        preload="transformers.trainer",  # transformers imports its parts when they are used
    ),
    "lightning": Program(
        """
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
        package="lightning",
        preload="lightning",
    ),
    "deepspeed": Program(
        """
import deepspeed
settings = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
deepspeed.init_distributed(dist_backend="gloo")
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for batch, expected in zip(inputs.split(8)[:steps], targets.split(8)):
    engine.backward(cross_entropy(engine(batch), expected))
    engine.step()
    step_ended()
write(torch.distributed.get_rank())
""",
        package="deepspeed",
        preload="deepspeed",
    ),
    "fsdp2": Program(
        """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
for layer in (model[0], model[2], model[4], model):
    fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for batch, expected in zip(inputs.split(8)[:steps], targets.split(8)):
    optimizer.zero_grad()
    cross_entropy(model(batch), expected).backward()
    optimizer.step()
    step_ended()
write(dist.get_rank())
""",
        package="torch",
        preload="torch.distributed.fsdp",
    ),
    "ray": Program(
        """
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
import torch.distributed as dist
def train():
    data = torch.ones(1 << 20)
    for _ in range(10 * steps):
        dist.all_reduce(data)
        step_ended()
        data.fill_(1)
    write(dist.get_rank())
TorchTrainer(train, torch_config=TorchConfig(backend="gloo"), scaling_config=ScalingConfig(num_workers=2)).fit()
""",
        package="ray",
        step="all_reduce of 4 MiB",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frameworks", help=f"some of: {', '.join(PROGRAMS)} (default: those that are installed)")
    parser.add_argument("--repeats", type=int, help="of each, in turn; the median counts (default: 5, --quick: 1)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields rows for each framework: the start, also with a warm zygote, and a step."""
    if arguments.repeats is not None and arguments.repeats < 1:
        raise ValueError(f"--repeats takes a number from 1 on; not {arguments.repeats}")
    installed = [name for name, program in PROGRAMS.items() if importlib.util.find_spec(program.package)]
    names = parse_names("--frameworks", arguments.frameworks, tuple(PROGRAMS)) if arguments.frameworks else installed
    if missing := sorted({*names} - {*installed}):
        raise ValueError(f"not installed in {sys.prefix}: {', '.join(missing)} (pip install {' '.join(missing)})")
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        for name in names:
            yield from _measure(name, Path(folder), arguments)


def _measure(name: str, folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    program = PROGRAMS[name]
    script = folder / f"train_{name}.py"
    script.write_text(COMMON + program.code + END)
    muster = find_program("muster")
    own = [muster, "run", "--nproc-per-node=2", "--replace=gloo", f"--preload={program.preload}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # A short path, because sockets are below it. Without the user's own warm zygote.
    with tempfile.TemporaryDirectory(prefix="muster-bench-", dir="/tmp") as runtime:
        environment = {"XDG_RUNTIME_DIR": runtime, "MUSTER_PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"}
        job = partial(_job, script=script, env={**os.environ, **environment}, timeout=arguments.timeout)
        repeats = arguments.repeats or (1 if arguments.quick else 5)
        if not program.preload:
            replaced = {**os.environ, **environment, "MUSTER_REPLACE": "gloo"}
            jobs = {"peer": partial(job, [sys.executable]), "cold": partial(job, [sys.executable], env=replaced)}
            results = in_rounds(jobs, repeats)
        else:
            _call([muster, "warm", "--preload", program.preload], environment)
            try:
                jobs = {
                    "peer": partial(job, torchrun),
                    "cold": partial(job, [*own, "--no-warm"]),
                    "warm": partial(job, own),
                }
                results = in_rounds(jobs, repeats)
            finally:
                _call([muster, "warm", "stop"], environment)
    first = {variant: statistics.median(start for start, _ in runs) for variant, runs in results.items()}
    step = {variant: 1e3 * statistics.median(step for _, step in runs) for variant, runs in results.items()}
    row = partial(Row, "frameworks", peer_name="torchrun" if program.preload else "gloo", ranks=2)
    row = partial(row, bytes=4 * _PARAMETERS if program.preload else 4 << 20)
    case = f"{name}: command to first {program.step}"
    yield row(case, metric="time", unit="s", muster=first["cold"], peer=first["peer"])
    if "warm" in first:
        yield row(f"{case}, muster warm", metric="time", unit="s", muster=first["warm"], peer=first["peer"])
    yield row(f"{name}: {program.step}", metric="time", unit="ms", muster=step["cold"], peer=step["peer"])


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
