"""Measures several variants in turn, so that a change in the machine's load affects all of them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_MAX_REPEATS = 20_000
_MAX_CALLS = 1_000  # calls whose times are kept, in a round of single calls


def in_rounds(calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Calls A B C, B A C, ...: a new order in each round, equal at all ranks, because what runs before a call changes
    the caches that it finds. Returns the results of each.
    """
    results: dict[str, list[T]] = {name: [] for name in calls}
    orders = random.Random(4)
    for _ in range(rounds):
        for name in orders.sample(list(calls), len(calls)):
            results[name].append(calls[name]())
    return results


def interleave(variants: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, float]:
    """Returns the seconds that one call of each variant takes: the median over `rounds`.

    All ranks call this with the same variants. A round repeats a variant for about `seconds`; its time is that of the
    slowest rank.
    """
    repeats = {name: _repeats(variant, seconds) for name, variant in variants.items()}
    times = in_rounds({name: partial(time_calls, variant, repeats[name]) for name, variant in variants.items()}, rounds)
    return {name: statistics.median(values) / repeats[name] for name, values in times.items()}


def interleave_calls(
    variants: dict[str, Callable[[], None]], rounds: int, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Like interleave(), but for single calls: the median and the 95th percentile of the slowest rank's times."""
    repeats = {name: min(_MAX_CALLS, _repeats(variant, seconds)) for name, variant in variants.items()}
    timed = {name: partial(_time_each_call, variant, repeats[name]) for name, variant in variants.items()}
    times = {name: [taken for calls in lists for taken in calls] for name, lists in in_rounds(timed, rounds).items()}
    late = {name: sorted(values)[len(values) * 95 // 100] for name, values in times.items()}
    return {name: statistics.median(values) for name, values in times.items()}, late


def find_repeats(timed: Callable[[int], float], seconds: float, most: int) -> int:
    """Returns how many calls take `seconds`, at most `most`. timed(n): the seconds of n calls; it also warms up."""
    repeats = 1
    while (taken := timed(repeats)) < seconds / 4 and repeats < most:
        repeats *= 4
    return max(1, min(most, round(repeats * seconds / max(taken, 1e-9))))


def _repeats(variant: Callable[[], None], seconds: float) -> int:
    return find_repeats(partial(time_calls, variant), seconds, _MAX_REPEATS)


def _time_each_call(variant: Callable[[], None], count: int) -> list[float]:
    dist.barrier()
    return _of_slowest_rank([_time(variant) for _ in range(count)])


def time_calls(variant: Callable[[], None], count: int = 1) -> float:
    """Returns the seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        variant()
    return _of_slowest_rank([time.perf_counter() - begin])[0]


def _time(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _of_slowest_rank(seconds: list[float]) -> list[float]:
    taken = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.tolist()
