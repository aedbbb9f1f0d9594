"""`muster trace -o FILE.png`: the last step of each rank, drawn from a trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from muster import _step_plot
from muster._step import Bucket, StepReport

_SHOWN = 16  # ranks in one picture


def reports_of(trace: dict[str, Any]) -> dict[str, StepReport]:
    """By rank, the last step that all of them have whole, or where jobs are mixed each one's; nothing without steps."""
    names: dict[int, str] = {}  # by process
    steps: dict[int, dict[int, list[dict[str, Any]]]] = {}  # its events by step
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event.get("cat") == "step":
            steps.setdefault(event["pid"], {}).setdefault(event["args"]["step"], []).append(event)
    whole = {process: {n for n in of if _has_backward(of[n])} for process, of in list(steps.items())[:_SHOWN]}
    common = set.intersection(*whole.values()) if whole else set()
    found = {}
    for process, numbers in whole.items():
        if numbers:
            step = sorted(common or numbers)[-2:][0]  # the very last one may be about to be written down
            found[f"{names[process]}, "] = _report(step, steps[process][step])
    return found


def _has_backward(events: list[dict[str, Any]]) -> bool:
    return any(event["name"] == "backward" for event in events)


def _report(step: int, events: list[dict[str, Any]]) -> StepReport:
    """Of the last model's step, where a process trains several."""
    slices = {event["name"]: event for event in events if "bucket" not in event["args"]}
    forward, backward, waiting = slices.get("forward"), slices["backward"], slices.get("waiting for reductions")
    zero, filled = backward["ts"], backward["ts"] + backward["dur"]
    end = waiting["ts"] + waiting["dur"] if waiting else filled
    parts: dict[int, dict[str, Any]] = {}
    for event in events:
        if "bucket" in event["args"] and zero <= event["ts"] <= end:
            parts.setdefault(event["args"]["bucket"], {})[event["name"]] = event
    plan = [_bucket(of, zero) for _, of in sorted(parts.items()) if "reduction" in of]
    communication = sum(bucket.ended - bucket.started for bucket in plan)  # one after the other
    exposed = sum(max(0.0, bucket.ended - max(bucket.started, (filled - zero) / 1e6)) for bucket in plan)
    return StepReport(
        step,
        forward["dur"] / 1e6 if forward else 0.0,
        backward["dur"] / 1e6,
        (end - filled) / 1e6,
        communication,
        exposed,
        1 - exposed / communication if communication else 1.0,
        plan,
        [],
        "",
        round(1e3 * (forward or backward)["ts"]),
    )


def _bucket(parts: dict[str, Any], zero: float) -> Bucket:
    """A part that took no time is not in the trace."""
    reduction = parts["reduction"]
    started = reduction["ts"]
    full = parts["queued"]["ts"] if "queued" in parts else started
    first = parts["gradients"]["ts"] if "gradients" in parts else full
    times = (first, full, started, started + reduction["dur"])
    return Bucket([], reduction["args"]["bytes"], "", *((time - zero) / 1e6 for time in times))


def main() -> None:
    trace, picture = sys.argv[1:]
    reports = reports_of(json.loads(Path(trace).read_text()))
    if not reports:
        sys.exit(
            "muster: trace: no rank has averaged gradients with muster.nn.DistributedDataParallel yet; "
            "-o FILE.json writes what else it does"
        )
    try:
        _step_plot.draw(reports, Path(picture))
    except (ImportError, OSError) as error:
        sys.exit(f"muster: trace: {error}")
    print(f"{picture}: {len(reports)} ranks")
