"""Runs at each rank of `muster bench graph`: the time to compile one model with several compilers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from muster.bench.graph_steps import prepare, step_of
from muster.bench.groups import Groups
from muster.bench.timing import in_rounds, time_calls


def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """{"compile": seconds of the first step of each variant, without those of a second one}."""
    prepare()

    def time_compiling(variant: str) -> float:
        torch._dynamo.reset()
        step = step_of(variant, groups, options)
        return time_calls(step, 1) - time_calls(step, 1)

    # Only C++ kernels come from a cache: those of the first round, which is not counted.
    with torch._inductor.config.patch(force_disable_caches=True):
        for variant in options["variants"]:
            time_compiling(variant)
        times = in_rounds({name: partial(time_compiling, name) for name in options["variants"]}, options["rounds"])
    yield {"compile": {name: statistics.median(column) for name, column in times.items()}}
