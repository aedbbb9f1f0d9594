"""Runs at each rank of `muster bench graph`: steps of data-parallel training, with gradients in the compiled graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import muster.nn
from muster.bench.graph_steps import TrainingStep, compile_for, medians, overlapped, prepare
from muster.bench.groups import Groups


def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A variant is a compiler and a backend of torch.distributed: muster's DistributedDataParallel over muster, torch's
    over Gloo. "bare" has no DistributedDataParallel, and is compiled as muster compiles.
    """
    prepare()
    side = options["side"]
    torch.manual_seed(0)
    layers = [each for _ in range(options["layers"]) for each in (nn.Linear(side, side), nn.ReLU())]
    model = nn.Sequential(*layers)
    torch.manual_seed(dist.get_rank() + 1)
    x, target = torch.randn(options["batch"], side), torch.randn(options["batch"], side)
    steps: dict[str, TrainingStep] = {}
    for variant in options["variants"]:
        compiler, _, backend = variant.partition(" ")
        own: nn.Module = copy.deepcopy(model)
        if backend == "muster":
            own = muster.nn.DistributedDataParallel(own, process_group=groups[backend])
        elif backend:
            own = nn.parallel.DistributedDataParallel(own, process_group=groups[backend])
        whole = not isinstance(own, nn.parallel.DistributedDataParallel)  # which splits the graph itself
        compiled = compile_for(own, compiler if backend else "muster", whole)
        steps[variant] = TrainingStep(own, partial(_loss, compiled, x, target))
    bare = steps["bare"]
    floor = overlapped(bare.backward, options["sent"], groups["muster"], before=bare.forward)
    yield medians({**steps, "overlapped": floor}, "eager muster", options["rounds"], 1)


def _loss(compiled: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(compiled(x), target)
