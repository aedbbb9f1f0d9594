"""Measures several ways of doing the same in turn, so that the machine's moods fall on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

# Rounds stop being repeated when a case has taken this many times longer than planned.
_MOST_REPEATS = 20_000
# Single calls of a round whose times are kept.
_MOST_CALLS = 1_000


def interleave(ways: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, float]:
    """Seconds that one call of each way takes: the median over `rounds` of A B C, A B C, ... rounds.

    Every rank calls this with the same ways. A round repeats a way for about `seconds`; its time is that of the
    slowest rank.
    """
    repeats = {name: _repeats(way, seconds) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(_slowest(_time(way, repeats[name])) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def interleave_calls(
    ways: dict[str, Callable[[], None]], rounds: int, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """As interleave(), but of single calls: median and 95th percentile. A call's time is the slowest rank's."""
    repeats = {name: min(_MOST_CALLS, _repeats(way, seconds)) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            taken = torch.tensor([_once(way) for _ in range(repeats[name])], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[name] += taken.tolist()
    late = {name: sorted(values)[len(values) * 95 // 100] for name, values in times.items()}
    return {name: statistics.median(values) for name, values in times.items()}, late


def _once(way: Callable[[], None]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def _repeats(way: Callable[[], None], seconds: float) -> int:
    """How many calls fill `seconds`: found by doubling, agreed by all ranks; this also warms up."""
    repeats = 1
    while True:
        taken = _slowest(_time(way, repeats))
        if taken >= seconds / 4 or repeats >= _MOST_REPEATS:
            return max(1, min(_MOST_REPEATS, round(repeats * seconds / max(taken, 1e-9))))
        repeats *= 4


def _time(way: Callable[[], None], repeats: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        way()
    return time.perf_counter() - begin


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())
