"""What a step of muster.nn.DistributedDataParallel waited for, and which rank the others wait for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster import _C, _recorder

if TYPE_CHECKING:
    import torch.distributed as dist

    from muster.nn import DistributedDataParallel


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together. Times are in seconds from the first gradient of the step's backward on."""

    parameters: list[str]
    bytes: int
    last: str  # the parameter whose gradient filled it
    first: float  # its first gradient had come
    full: float  # its last one had
    started: float  # its reduction: it was full, and those before it had ended
    ended: float


@dataclass(frozen=True)
class StepReport:
    """The last step that averaged gradients, as this rank saw it; str() is for people. Durations are in seconds.

    A reduction includes waiting for the other ranks: straggler_report() says for which.
    """

    step: int  # from 1
    forward: float
    backward: float  # from the first gradient to the last, with layers outside the model that follow
    waiting: float  # after that until all were reduced
    communication: float  # during which at least one bucket was being reduced
    exposed: float  # of that, after the last gradient
    hidden: float  # 1 - exposed / communication; 1 where there was none
    plan: list[Bucket]  # in the order of reduction
    advice: list[str]
    _text: str = field(repr=False)
    _begin: int = field(repr=False)  # monotonic clock, in nanoseconds

    def __str__(self) -> str:
        return self._text.rstrip("\n")

    def save(self, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
        """Draws the step to a .png (needs matplotlib), or writes a trace for https://ui.perfetto.dev to a .json.

        The trace has the recorded operations of this time too. With `group` all its ranks must call this, and its
        rank 0 writes one trace of all of them.
        """
        if Path(path).suffix not in (".png", ".json"):
            raise ValueError(f"a step is drawn to a .png or written to a .json, not to {os.fspath(path)!r}")
        if Path(path).suffix == ".png":
            from muster import _step_plot

            _step_plot.draw({"": self}, Path(path))
            return
        _recorder.write(self._cut(json.loads(_C.trace())), path, group)

    def _cut(self, trace: dict[str, Any]) -> dict[str, Any]:
        """What happened in this step."""
        since = (self._begin - trace["otherData"]["begin_monotonic_ns"]) / 1000
        until = since + 1e6 * (self.forward + self.backward + self.waiting)
        events = []
        for event in trace["traceEvents"]:
            if "ts" in event and (event["ts"] > until or event["ts"] + event["dur"] < since):
                continue
            events.append(event)
        return {**trace, "traceEvents": events}


@dataclass(frozen=True)
class StragglerReport:
    """Which rank the others wait for; str() is for people. The same at all ranks. Durations are in seconds."""

    steps: int  # that were compared
    rank: int | None  # the one that was last most often; None without steps, or where there is one rank
    share: float  # of the steps
    behind: float  # after the last but one, on average over these steps
    stands_out: bool  # False: ranks take turns, or it is too little to matter
    ranks: list[dict[str, float]]  # by rank: "last", "behind", and by how much its parts of a step are longer
    _text: str = field(repr=False)

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
    """Of the last backward of `model` that averaged gradients; to be called before the next one begins."""
    raw = _C.step_report(_reducer_of(model))
    if raw["step"] == 0:
        raise ValueError(
            "the model has not averaged gradients yet: ask for a report after a backward outside no_sync()"
        )

    return report_of(raw)


def report_of(raw: dict[str, Any]) -> StepReport:
    """Of what _C.step_report() gives."""

    def seconds(later: int, sooner: int) -> float:
        return (later - sooner) / 1e9 if sooner else 0.0

    times = ("first", "full", "started", "ended")
    plan = [
        Bucket(
            bucket["parameters"],
            bucket["bytes"],
            bucket["last"],
            *(seconds(bucket[name], raw["backward"]) for name in times),
        )
        for bucket in raw["buckets"]
    ]
    return StepReport(
        raw["step"],
        seconds(raw["backward"], raw["forward"]),
        seconds(raw["waited"], raw["backward"]),
        seconds(raw["ended"], raw["waited"]),
        raw["communication"] / 1e9,
        raw["exposed"] / 1e9,
        raw["hidden"],
        plan,
        raw["advice"],
        raw["text"],
        raw["forward"] or raw["backward"],
    )


def straggler_report(model: DistributedDataParallel, steps: int = 200) -> StragglerReport:
    """Compares the last `steps` (at most 1024) of all ranks, which must all call this after the same step.

    One all_gather of 16 bytes a step. Between reports a step costs a few readings of the clock and no message.
    """
    raw = _C.find_stragglers(_reducer_of(model), steps)
    late = raw["ranks"][raw["rank"]] if raw["rank"] >= 0 else None
    return StragglerReport(
        raw["steps"],
        raw["rank"] if late else None,
        late["last"] / raw["steps"] if late else 0.0,
        late["behind"] if late else 0.0,
        raw["stands_out"],
        raw["ranks"],
        raw["text"],
    )
