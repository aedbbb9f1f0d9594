"""How long the tasks of a graph take: measured rates of this machine, and of the links of a group."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_SIDE, _SMALL_SIDE = 512, 128  # of the matrices that are multiplied
_COPIED = 32 << 20  # bytes
_SIZES = 4 << 10, 4 << 20  # bytes of the reductions
_TIMES = 5
_LATENCIES_IN_BUCKET = 8
KERNEL_SECONDS = 2e-6  # of calling a kernel


@dataclass(frozen=True)
class LinkCosts:
    """Of one group."""

    latency: float  # seconds of a small collective
    bytes_per_second: float  # that a rank sends
    ranks: int
    overlap: float = 1.0  # how much of a message's time a rank can compute in: little if it copies the bytes itself


@dataclass(frozen=True)
class Costs:
    flops_per_second: float = 2e10
    bytes_per_second: float = 8e9
    links: dict[str, LinkCosts] = field(default_factory=dict)  # by the name of the group

    def compute_seconds(self, flops: float, bytes_moved: float) -> float:
        """Small products take the time of reading their weights, in addition."""
        return KERNEL_SECONDS + flops / self.flops_per_second + bytes_moved / self.bytes_per_second

    def copy_seconds(self, size: float) -> float:
        """Of reading and writing so many bytes."""
        return 2 * size / self.bytes_per_second

    def bucket_bytes(self, group_name: str) -> float:
        """With more bytes, a collective gains little from being merged: its latency is a small part of its time."""
        link = self.links[group_name]
        return _LATENCIES_IN_BUCKET * link.latency * link.bytes_per_second

    def wire_seconds(self, group_name: str, operator: str, input_bytes: int, output_bytes: int) -> float:
        link = self.links[group_name]
        return link.latency + bytes_sent(operator, link.ranks, input_bytes, output_bytes) / link.bytes_per_second

    def chunks_wire_seconds(
        self, chunks: int, group_name: str, operator: str, input_bytes: int, output_bytes: int
    ) -> float:
        """Of a collective that is cut: each chunk has its latency."""
        return chunks * self.wire_seconds(group_name, operator, input_bytes // chunks, output_bytes // chunks)

    def chunks_compute_seconds(self, chunks: int, whole: float, weight_bytes: float, copied_bytes: float) -> float:
        """Of products that take `whole` seconds in one piece. Each chunk reads all weights. Some bytes are copied."""
        if chunks == 1:
            return whole
        weights = KERNEL_SECONDS + weight_bytes / self.bytes_per_second
        return whole + (chunks - 1) * weights + self.copy_seconds(copied_bytes)


def bytes_sent(operator: str, size: int, input_bytes: int, output_bytes: int) -> float:
    """What a rank sends, or receives if that is more."""
    others = (size - 1) / size
    if "all_reduce" in operator:
        return 2 * others * input_bytes
    return others * max(input_bytes, output_bytes)


# By the first group and the names of all: a new group may have the name of one that was destroyed, and other links.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Costs]] = weakref.WeakKeyDictionary()


def costs_of(groups: list[Any]) -> Costs:
    """The costs of graphs with these groups, equal at all ranks. Measured at the first call, which takes as long as
    some 15 reductions of 4 MiB for each group. All ranks must make it at the same time, with groups in the same places,
    which compare() makes sure of.
    """
    names = tuple(group.group_name for group in groups)
    known = _known.setdefault(groups[0], {})
    if names not in known:
        rates = [rate for group in groups for rate in _measure_links(group)] + list(_measure_machine())
        tensor = torch.tensor(rates, dtype=torch.float64)
        for group in groups:  # in a mesh, what rank 0 has measured comes to all ranks in this way
            dist.broadcast(tensor, group=group, group_src=0)
        *links, flops, copied = tensor.tolist()
        known[names] = Costs(
            flops,
            copied,
            {
                group.group_name: LinkCosts(latency, rate, group.size(), overlap)
                for group, latency, rate, overlap in zip(groups, links[::3], links[1::3], links[2::3], strict=True)
            },
        )
    return known[names]


def unknown_costs(groups: list[Any]) -> Costs:
    """For ranks whose graphs differ: they cannot measure together. The order of collectives is kept there."""
    return Costs(links={group.group_name: LinkCosts(1e-4, 1e9, group.size()) for group in groups})


def _rounded(rate: float) -> float:
    """Rates that differ a little give the same plan, and the same key of Inductor's cache."""
    return 2.0 ** round(math.log2(rate))


def _measure_machine() -> tuple[float, float]:
    """Floating-point operations and bytes per second."""
    matrix = torch.ones(_SIDE, _SIDE)
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    return (
        _rounded(2 * _SIDE**3 / _seconds(lambda: torch.mm(matrix, matrix))),
        _rounded(2 * _COPIED / _seconds(lambda: target.copy_(source))),
    )


def _measure_links(group: Any) -> tuple[float, float, float]:
    """latency, bytes_per_second and overlap of LinkCosts."""
    if group.size() == 1:
        return 1e-9, 1e18, 1.0
    small, large = (_seconds(functools.partial(dist.all_reduce, torch.ones(size // 4), group=group)) for size in _SIZES)
    rate = bytes_sent("all_reduce", group.size(), _SIZES[1] - _SIZES[0], 0) / max(large - small, 1e-9)
    return _rounded(small), _rounded(rate), _measure_overlap(group, large)


def _measure_overlap(group: Any, seconds: float) -> float:
    """seconds: of the larger reduction alone. Products that take as long run beside it."""
    message, matrix = torch.ones(_SIZES[1] // 4), torch.ones(_SMALL_SIDE, _SMALL_SIDE)
    times = math.ceil(seconds / _seconds(lambda: torch.mm(matrix, matrix)))

    def compute() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def both() -> None:
        work = dist.all_reduce(message, group=group, async_op=True)
        compute()
        work.wait()

    alone = _seconds(compute)
    hidden = (seconds + alone - _seconds(both)) / min(seconds, alone)
    return min(max(round(2 * hidden) / 2, 0.0), 1.0)


def _seconds(function: Callable[[], Any]) -> float:
    """The shortest of several times."""
    best = math.inf
    for _ in range(_TIMES):
        begin = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begin)
    return best
