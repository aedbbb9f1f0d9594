"""`muster trace -o FILE.png`: draws and prints the last step of each rank, from a trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from muster import _C, _step_plot
from muster._step import StepReport, report_from

_SHOWN = 16  # ranks in one picture


def reports_of(trace: dict[str, Any]) -> dict[str, StepReport]:
    """Returns, by rank, the last complete step that all ranks have; in a mix of jobs, the last one of each rank."""
    names: dict[int, str] = {}  # by process
    steps: dict[int, dict[int, list[dict[str, Any]]]] = {}  # by process, its events by step
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
            step = sorted(common or numbers)[-2:][0]  # the very last one may be incomplete
            found[f"{names[process]}, "] = _report(step, steps[process][step])
    return found


def _has_backward(events: list[dict[str, Any]]) -> bool:
    return any(event["name"] == "backward" for event in events)


def _report(step: int, events: list[dict[str, Any]]) -> StepReport:
    """Reports the last model, if a process trains several."""
    slices = {event["name"]: event for event in events if "bucket" not in event["args"]}
    forward, backward, waiting = slices.get("forward"), slices["backward"], slices.get("waiting for reductions")
    begin, end = backward["ts"], _end(waiting or backward)
    parts: dict[int, dict[str, Any]] = {}
    for event in events:
        if "bucket" in event["args"] and begin <= event["ts"] <= end:
            parts.setdefault(event["args"]["bucket"], {})[event["name"]] = event
    buckets = [of for _, of in sorted(parts.items()) if "reduction" in of]
    names = [name for of in buckets for name in of["reduction"]["args"].get("parameters", [])]
    numbers = {name: number for number, name in enumerate(names)}
    times = {
        "iteration": step,
        "forward": _nanoseconds(forward["ts"]) if forward else 0,
        "backward": _nanoseconds(begin),
        "last_gradient": _nanoseconds(_end(backward)),
        "ended": _nanoseconds(end),
        "buckets": [_bucket(of, numbers) for of in buckets],
    }
    plan = [[numbers[name] for name in of["reduction"]["args"].get("parameters", [])] for of in buckets]
    return report_from(
        _C.step_report_from_times(times, names, plan, [of["reduction"]["args"]["bytes"] for of in buckets])
    )


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _nanoseconds(microseconds: float) -> int:
    """Returns the time since one second before the trace, because zero means never."""
    return 1_000_000_000 + round(1000 * microseconds)


def _bucket(parts: dict[str, Any], numbers: dict[str, int]) -> dict[str, int]:
    """Fills in the parts that took no time, because the trace lacks them."""
    reduction = parts["reduction"]
    full = parts.get("queued", reduction)["ts"]
    return {
        "first_ready": _nanoseconds(parts["gradients"]["ts"] if "gradients" in parts else full),
        "ready": _nanoseconds(full),
        "begun": _nanoseconds(reduction["ts"]),
        "ended": _nanoseconds(_end(reduction)),
        "last_parameter": numbers.get(reduction["args"].get("filled by", ""), len(numbers)),
    }


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
    for rank, report in reports.items():
        print(f"{rank}{report}")
    print(f"{picture}: {len(reports)} ranks")


if __name__ == "__main__":
    main()
