"""Runs at each rank of `muster bench graph`: the step times of one model under several compilers."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import muster.graph  # noqa: F401  graphs of Gloo's groups hold all calls, too
from muster.bench.groups import Groups
from muster.bench.timing import in_rounds, time_calls

Step = Callable[[], Any]
_WARM_UP = 2
_FLOORS = ("bare", "overlapped", "whole", "alone muster")  # variants with other results
# Of Inductor. passes: torch's own passes begin collectives earlier and wait for them later.
OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "passes": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
            "reorder_communication_preserving_peak_memory",
        ],
    },
}


class TrainingStep:
    """A forward and a backward of `model`. loss() runs the forward, compiled or not."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> None:
        self._model, self._loss = model, loss

    def __call__(self) -> list[torch.Tensor]:
        return self.backward(self.forward())

    def forward(self) -> torch.Tensor:
        self._model.zero_grad()
        return self._loss()

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Returns the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    prepare()
    steps = {variant: step_of(variant, groups, options) for variant in options["variants"]}
    if sent := options.get("sent"):
        steps["overlapped"] = overlapped(steps["bare"], sent, groups["muster"])
    yield medians(steps, "eager muster", options["rounds"], 1)


def step_of(variant: str, groups: Groups, options: dict[str, Any]) -> Step:
    make = {"gather": _gathering, "small": _reducing, "blocks": _splitting}[options["model"]]
    return make(variant, groups, options)


def prepare() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one function is compiled for each variant


def overlapped(compute: Callable[..., Any], sent: int, group: Any, before: Step | None = None) -> Step:
    """Perfect overlap: the rank computes while it sends `sent` bytes that nothing depends on. What it sends is not
    there until `before` has run, whose result compute() takes.
    """
    mine = torch.ones(max(1, sent // 4 // (group.size() - 1)))
    gathered = mine.new_empty(group.size() * len(mine))

    def step() -> Any:
        arguments = () if before is None else (before(),)
        work = dist.all_gather_into_tensor(gathered, mine, group=group, async_op=True)
        result = compute(*arguments)
        work.wait()  # type: ignore[union-attr]
        return result

    return step


def medians(steps: dict[str, Step], reference: str, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """{"step": seconds of a step of each variant}. All must have the reference's result, except for floors.

    With torch's passes, Inductor may write into what a pending collective still sends. Variants whose results are wrong
    for this reason are left out.
    """
    expected = steps[reference]()
    for variant, step in list(steps.items()):
        if variant not in _FLOORS and not _is_right(variant, step(), expected):
            del steps[variant]
            continue
        for _ in range(_WARM_UP):
            step()
    times = in_rounds({name: partial(time_calls, step, calls) for name, step in steps.items()}, rounds)
    return {"step": {name: statistics.median(column) / calls for name, column in times.items()}}


def _is_right(variant: str, result: Any, expected: Any) -> bool:
    """The same at all ranks. Raises AssertionError for a wrong result of a variant that is not of torch's passes."""
    wrong = torch.zeros(())
    try:
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    except AssertionError as error:
        if not variant.startswith("passes"):
            raise AssertionError(f"{variant}: {error}") from error
        wrong += 1
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    if wrong and dist.get_rank() == 0:
        print(f"muster bench graph: {variant} gives a wrong result", file=sys.stderr)
    return not wrong


def _gathering(variant: str, groups: Groups, options: dict[str, Any]) -> Step:
    """`variant`: a compiler and a backend of torch.distributed, or "bare", the same model without collectives."""
    side, batch, layers = options["side"], options["batch"], options["layers"]
    torch.manual_seed(dist.get_rank())
    x = torch.ones(batch, side)
    shards = [torch.randn(side // dist.get_world_size(), side) / side for _ in range(layers)]
    if variant == "bare":
        weights = [torch.randn(side, side) / side for _ in range(layers)]
        return partial(torch.compile(_multiplied, fullgraph=True), x, weights)
    compiler, backend = variant.split()
    group = groups[backend]

    def gathered(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
        for shard in shards:
            weights = shard.new_empty(side, side)
            dist.all_gather_into_tensor(weights, shard, group=group)
            x = torch.relu(x @ weights)
        return x

    return compiled(gathered, compiler, x, shards)


def _reducing(variant: str, groups: Groups, options: dict[str, Any]) -> Step:
    tensors = [torch.ones(options["side"]) * index for index in range(options["layers"])]
    if variant == "bare":
        return partial(torch.compile(_doubled, fullgraph=True), tensors)
    compiler, backend = variant.split()
    group = groups[backend]

    def reduced(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results = []
        for tensor in tensors:
            result = tensor * 2
            dist.all_reduce(result, group=group)
            results.append(result + 1)
        return results

    return compiled(reduced, compiler, tensors)


def _splitting(variant: str, groups: Groups, options: dict[str, Any]) -> Step:
    """Tensor parallelism: each rank has a part of each block's weights, and of the rows between blocks."""
    side, batch, layers, ranks = options["side"], options["batch"], options["layers"], dist.get_world_size()
    torch.manual_seed(0)
    x = torch.ones(batch // ranks, side)
    weights = [
        (torch.randn(side, side // ranks) / side, torch.randn(side // ranks, side) / side) for _ in range(layers)
    ]
    if variant == "bare":

        def multiplied(x: torch.Tensor) -> torch.Tensor:
            for up, down in weights:
                x = (torch.relu(x.repeat(ranks, 1) @ up) @ down)[: batch // ranks]
            return x

        return partial(torch.compile(multiplied, fullgraph=True), x)
    compiler, backend = variant.split()
    group = groups[backend]

    def split(x: torch.Tensor) -> torch.Tensor:
        for up, down in weights:
            rows = x.new_empty(batch, side)
            dist.all_gather_into_tensor(rows, x, group=group)
            partial_sums = torch.relu(rows @ up) @ down
            x = torch.empty_like(x)
            dist.reduce_scatter_tensor(x, partial_sums, group=group)
        return x

    return compiled(split, compiler, x)


def compiled(function: Callable[..., Any], compiler: str, *inputs: Any) -> Step:
    return partial(compile_for(function, compiler), *inputs)


def compile_for(function: Any, compiler: str, fullgraph: bool = True) -> Any:
    if compiler == "eager":
        return function
    if compiler == "muster":
        return torch.compile(function, fullgraph=fullgraph, backend="muster")
    # Dynamo would share the code of both compilers if they did not differ in their options.
    return torch.compile(function, fullgraph=fullgraph, options=OPTIONS[compiler])


def _doubled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor * 2 + 1 for tensor in tensors]


def _multiplied(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for each in weights:
        x = torch.relu(x @ each)
    return x
