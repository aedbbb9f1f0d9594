"""The part of `muster bench ddp` that runs in each rank: trains a model in several variants, in turn."""

from __future__ import annotations

import contextlib
import importlib
import statistics
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from muster.bench.ddp_models import MODELS, Case
from muster.bench.groups import Groups
from muster.bench.memory import copying
from muster.bench.operations import Tensors
from muster.bench.timing import in_rounds, time_calls

# The first steps rebuild buckets and touch memory for the first time.
_WARM_UP = 3
FLOAT32 = "float32"  # uncompressed gradients
# The learning rate, the same at all ranks. They use it whether their gradients were averaged or not.
_RATE = 1e-4
_MODELS_ALONE = 4  # models of each variant, when a single rank trains
_SAMPLE_EVERY = 0.002  # seconds between two samples of the resident memory


class Trainer:
    """A model in one variant, with its optimizer and batch. The variant `bare` is not wrapped."""

    def __init__(self, case: Case, variant: str, hook: str, groups: Groups, batches: int = 1) -> None:
        torch.manual_seed(1)
        model = case.make()
        self.wrapped = _wrap(model, variant, groups)
        if hook != FLOAT32:
            _register(self.wrapped, variant, hook, groups)
        self._batch = [torch.cat([part] * batches) for part in case.batch()]
        self._optimizer = torch.optim.SGD(model.parameters(), _RATE)
        self._loss = nn.CrossEntropyLoss()
        self.gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def step(self) -> None:
        inputs, targets = self._batch
        self._loss(self.wrapped(inputs), targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step_alone(self) -> None:
        """step() without averaging gradients."""
        with self.wrapped.no_sync():
            self.step()


def _wrap(model: nn.Module, variant: str, groups: Groups) -> Any:
    """bare: no DDP; gloo and stock: torch's DDP over Gloo and over muster's backend; muster: muster's DDP.

    DP and torch DP: DataParallel of muster, with a replica for each thread, and of torch, which has one on the CPU.
    """
    if variant == "bare":
        return model
    if variant == "torch DP":
        return nn.DataParallel(model)
    if variant in ("muster", "DP"):
        from muster.nn import DataParallel, DistributedDataParallel

        if variant == "DP":
            return DataParallel(model, torch.get_num_threads())
        return DistributedDataParallel(model, process_group=groups["muster"])
    group = groups["gloo" if variant == "gloo" else "muster"]
    return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def _register(model: Any, variant: str, hook: str, groups: Groups) -> None:
    if variant == "muster":
        hooks = importlib.import_module("muster.hooks")
        model.register_comm_hook(None, getattr(hooks, hook)())
    elif hook == "fp16":  # torch has no bf16 hook over Gloo
        model.register_comm_hook(groups[variant], default_hooks.fp16_compress_hook)
    else:
        raise ValueError(f"torch has no hook {hook}")


def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one result for the model. `part` selects its kind."""
    torch.set_num_threads(1)
    case = MODELS[options["model"]]
    parts = {"steps": _steps, "alone": _alone, "memory": _memory, "hooks": _hooks, "replicas": _replicas}
    part = parts[options["part"]]
    yield part(case, groups, options)


def _steps(case: Case, groups: Groups, options: dict[str, Any]) -> dict[str, Any]:
    """Returns step times of each variant with and without communication. The difference is exposed communication."""
    trainers = {variant: Trainer(case, variant, FLOAT32, groups) for variant in (*options["variants"], "bare")}
    calls: dict[str, Callable[[], None]] = {}
    for variant, trainer in trainers.items():
        calls[variant] = trainer.step
        if variant != "bare":
            calls[f"{variant} alone"] = trainer.step_alone
    size = trainers["bare"].gradient_bytes
    calls["copy"] = copying(Tensors(0, 1, *(torch.ones(size, dtype=torch.uint8) for _ in range(2))))
    times = interleave_steps(calls, options["rounds"])
    return {
        "bytes": size,
        "step": {variant: statistics.median(times[variant]) for variant in trainers},
        "exposed": {variant: _difference(times[variant], times[f"{variant} alone"]) for variant in options["variants"]},
        "copy": statistics.median(times["copy"]),
    }


def _replicas(case: Case, groups: Groups, options: dict[str, Any]) -> dict[str, Any]:
    """Step times of DataParallel in one process, with the threads and the batch of as many ranks together."""
    replicas = options["replicas"]
    torch.set_num_threads(replicas)
    calls = {variant: Trainer(case, variant, FLOAT32, groups, replicas).step for variant in options["variants"]}
    times = interleave_steps(calls, options["rounds"])
    return {"step": {variant: statistics.median(column) for variant, column in times.items()}}


def _alone(case: Case, groups: Groups, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the share of hooks and buckets in the step of a single rank."""
    # Equal models may differ by 2 %, depending on their memory and on the models that ran before. Therefore there
    # are several models of each variant, in both orders.
    variants = [*options["variants"], "bare"]
    order = (variants + variants[::-1]) * (_MODELS_ALONE // 2)
    steps = {f"{variant} {i}": Trainer(case, variant, FLOAT32, groups).step for i, variant in enumerate(order)}
    times = interleave_steps(steps, options["rounds"])

    def means(variant: str) -> list[float]:
        """Returns the mean of each round."""
        columns = [column for name, column in times.items() if name.split()[0] == variant]
        return [statistics.fmean(line) for line in zip(*columns, strict=True)]

    bare = means("bare")
    overhead = {variant: _difference(means(variant), bare) / statistics.median(bare) for variant in options["variants"]}
    return {"bare": statistics.median(bare), "overhead": overhead}


def _hooks(case: Case, groups: Groups, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the step times by "variant hook", and those of the bare model."""
    trainers = {f"{variant} {hook}": Trainer(case, variant, hook, groups) for variant, hook in options["hooks"]}
    trainers["bare"] = Trainer(case, "bare", FLOAT32, groups)
    times = interleave_steps({name: trainer.step for name, trainer in trainers.items()}, options["rounds"])
    size = next(iter(trainers.values())).gradient_bytes
    return {"bytes": size, "step": {name: statistics.median(values) for name, values in times.items()}}


def interleave_steps(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call at the slowest rank, in rounds A B C, A B C, ... All ranks must call this."""
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    return in_rounds({name: partial(time_calls, call) for name, call in calls.items()}, rounds)


def _difference(longer: list[float], shorter: list[float]) -> float:
    """Returns the median difference of neighbors in time, so that a change in the machine's speed matters little."""
    return statistics.median(a - b for a, b in zip(longer, shorter, strict=True))


def _memory(case: Case, groups: Groups, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the peak resident memory of a rank while it trains. Shared pages count proportionally."""
    before = _proportional()
    (variant,) = options["variants"]
    trainer = Trainer(case, variant, FLOAT32, groups)
    with _peak() as peak:
        for _ in range(options["rounds"]):
            trainer.step()
    most = torch.tensor([max(peak), before], dtype=torch.float64)
    dist.all_reduce(most)
    peak_bytes, base = (most / dist.get_world_size()).tolist()
    return {"peak": peak_bytes, "base": base, "bytes": trainer.gradient_bytes}


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """Samples the resident memory in bytes while the block runs."""
    samples = [_proportional()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_EVERY):
            samples.append(_proportional())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        ended.set()
        watcher.join()


def _proportional() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
