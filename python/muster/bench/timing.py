"""Measures several variants in turn, so that a change in the machine's load affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_MAX_REPEATS = 20_000
_MAX_CALLS = 1_000  # calls whose times are kept, in a round of single calls


def interleave(variants: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, float]:
    """Returns the seconds that one call of each variant takes: the median over `rounds` of A B C, A B C, ...

    All ranks call this with the same variants. A round repeats a variant for about `seconds`; its time is that of the
    slowest rank.
    """
    repeats = {name: _repeats(variant, seconds) for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            times[name].append(_time(variant, repeats[name]) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def interleave_calls(
    variants: dict[str, Callable[[], None]], rounds: int, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Like interleave(), but for single calls: the median and the 95th percentile of the slowest rank's times."""
    repeats = {name: min(_MAX_CALLS, _repeats(variant, seconds)) for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            dist.barrier()
            taken = torch.tensor([_call(variant) for _ in range(repeats[name])], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[name] += taken.tolist()
    late = {name: sorted(values)[len(values) * 95 // 100] for name, values in times.items()}
    return {name: statistics.median(values) for name, values in times.items()}, late


def find_repeats(timed: Callable[[int], float], seconds: float, most: int) -> int:
    """Returns how many calls take `seconds`, at most `most`. timed(n): the seconds of n calls; it also warms up."""
    repeats = 1
    while (taken := timed(repeats)) < seconds / 4 and repeats < most:
        repeats *= 4
    return max(1, min(most, round(repeats * seconds / max(taken, 1e-9))))


def _repeats(variant: Callable[[], None], seconds: float) -> int:
    return find_repeats(lambda repeats: _time(variant, repeats), seconds, _MAX_REPEATS)


def _call(variant: Callable[[], None]) -> float:
    begin = time.perf_counter()
    variant()
    return time.perf_counter() - begin


def _time(variant: Callable[[], None], repeats: int) -> float:
    """Returns the seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        variant()
    value = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())
