"""Which changes of a graph to make: each that shortens the planned step, together with those chosen before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Change = TypeVar("Change")
_LEAST_GAIN = 0.01  # of a step


def choose(changes: Iterable[Change], planned_seconds: Callable[[list[Change]], float]) -> list[Change]:
    """planned_seconds: of the step with these changes. A pure function."""
    chosen: list[Change] = []
    shortest = planned_seconds(chosen)
    for change in changes:
        seconds = planned_seconds([*chosen, change])
        if seconds < (1 - _LEAST_GAIN) * shortest:
            chosen, shortest = [*chosen, change], seconds
    return chosen
