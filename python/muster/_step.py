"""Reports of training steps of muster.nn.DistributedDataParallel: what a step waited for, and for which rank."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster import _C, _recorder
from muster._deprecated import renamed_attribute

if TYPE_CHECKING:
    import torch.distributed as dist

    from muster.nn import DistributedDataParallel


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together. Times are in seconds since the first gradient of the step's backward."""

    parameters: list[str]
    bytes: int
    last: str  # the parameter whose gradient completed the bucket
    first: float  # when its first gradient arrived
    full: float  # when its last gradient arrived
    started: float  # when its reduction started: it was full, and the buckets before it had ended
    ended: float


@dataclass(frozen=True)
class StepReport:
    """The last step that averaged gradients, as this rank saw it. str() formats it. Durations are in seconds.

    A reduction includes waiting for the other ranks. straggler_report() names the rank that they wait for.
    """

    step: int  # numbered from 1
    forward: float
    backward: float  # from the first gradient to the last, including layers outside the model that run after it
    waiting: float  # from the last gradient until all gradients were reduced
    communication: float  # the time during which at least one bucket was being reduced
    exposed: float  # the part of `communication` after the last gradient
    overlap_ratio: float  # 1 - exposed / communication; 1 without communication
    plan: list[Bucket]  # in the order of reduction
    advice: list[str]
    _text: str = field(repr=False)
    _begin: int = field(repr=False)  # monotonic clock, in nanoseconds

    hidden = renamed_attribute("hidden", "overlap_ratio")

    def __str__(self) -> str:
        return self._text.rstrip("\n")

    def save(self, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
        """Draws the step to a .png (needs matplotlib), or writes a trace for https://ui.perfetto.dev to a .json.

        The trace also contains the operations that were recorded during the step. With `group`, all its ranks must
        call this, and its rank 0 writes one trace of all of them.
        """
        if Path(path).suffix not in (".png", ".json"):
            raise ValueError(f"a step is drawn to a .png or written to a .json, not to {os.fspath(path)!r}")
        if Path(path).suffix == ".png":
            from muster import _step_plot

            _step_plot.draw({"": self}, Path(path))
            return
        _recorder.write(self._cut(json.loads(_C.trace())), path, group)

    def _cut(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Keeps the events of this step."""
        since = (self._begin - trace["otherData"]["begin_monotonic_ns"]) / 1000
        until = since + 1e6 * (self.forward + self.backward + self.waiting)
        events = [
            event
            for event in trace["traceEvents"]
            if "ts" not in event or (event["ts"] <= until and event["ts"] + event["dur"] >= since)
        ]
        return {**trace, "traceEvents": events}


@dataclass(frozen=True)
class StragglerReport:
    """The rank that the others wait for. All ranks get the same report. str() formats it. Durations are in seconds."""

    steps: int  # the number of compared steps
    rank: int | None  # the rank that was last most often; None without steps, or with a single rank
    share: float  # the share of the steps in which this rank was last
    lag: float  # the seconds after the second to last rank, on average over these steps
    is_significant: bool  # False: the ranks take turns, or the lag is too small to matter
    # By rank: steps in which it was "last", its "lag", and the excess of its step's parts.
    ranks: list[dict[str, float]]
    _text: str = field(repr=False)

    behind = renamed_attribute("behind", "lag")
    stands_out = renamed_attribute("stands_out", "is_significant")

    def __str__(self) -> str:
        return self._text


def _reducer_of(model: DistributedDataParallel) -> _C.Reducer:
    reducer = getattr(model, "reducer", None)
    if not isinstance(reducer, _C.Reducer):
        raise TypeError(
            f"reports are of a muster.nn.DistributedDataParallel, not of a {type(model).__module__}."
            f"{type(model).__qualname__}"
        )
    return reducer


def step_report(model: DistributedDataParallel) -> StepReport:
    """Reports the last backward of `model` that averaged gradients. Must be called before the next backward starts."""
    raw = _C.step_report(_reducer_of(model))
    if raw["step"] == 0:
        raise ValueError(
            "the model has not averaged gradients yet: ask for a report after a backward outside no_sync()"
        )
    return report_from(raw)


def report_from(raw: dict[str, Any]) -> StepReport:
    """`raw`: the result of _C.step_report()."""
    return StepReport(**{**raw, "plan": [Bucket(**bucket) for bucket in raw["plan"]]})


def straggler_report(model: DistributedDataParallel, steps: int = 200) -> StragglerReport:
    """Compares the last `steps` (at most 1024) of all ranks, which must all call this after the same step.

    Costs one all_gather of 16 bytes per step. Between reports a step reads the clock a few times and sends nothing.
    """
    return StragglerReport(**_C.find_stragglers(_reducer_of(model), steps))
