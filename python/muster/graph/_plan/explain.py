"""`muster explain graph`: the steps of a compiled graph before and after the plan, as text, picture or trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.graph._plan.measured import measured
from muster.graph._plan.saved import SavedPlan
from muster.graph._plan.schedule import Kind, Timeline, lower_bound, most_bytes, timeline

_COLUMNS = 90
_SHOWN = 40  # collectives


def timelines(plan: SavedPlan, trace: Path | None = None) -> dict[str, Timeline]:
    """By name. With a trace, also the measured step."""
    result = {
        "Inductor's order": timeline(plan.tasks, range(len(plan.tasks))),
        "planned": timeline(plan.tasks, plan.order),
    }
    if trace is not None:
        result["measured"] = measured(plan, trace)
    return result


def text(plan: SavedPlan, steps: Mapping[str, Timeline], shown: int = _SHOWN) -> str:
    kinds = [task.kind for task in plan.tasks]
    starts = [index for index in plan.order if kinds[index] is Kind.START]
    lines = [
        f"{len(starts)} collectives, {kinds.count(Kind.COMPUTE)} kernels, rank {plan.rank}",
        "",
        f"{'':18}{'step':>12}{'waits':>12}{'memory':>12}",
    ]
    for name, step in steps.items():
        order = plan.order if name != "Inductor's order" else range(len(plan.tasks))
        memory = _mebibytes(most_bytes(plan.tasks, order))
        lines.append(f"{name:18}{_milliseconds(step.total):>12}{_milliseconds(step.exposed):>12}{memory:>12}")
    lines += [f"{'bound':18}{_milliseconds(lower_bound(plan.tasks)):>12}   no order takes less", ""]
    longest = max(step.total for step in steps.values()) or 1.0
    for name, step in steps.items():
        rank, wire = _bars(plan, step, longest)
        lines += [f"{name:18}{rank}", f"{'':18}{wire}"]
    lines += ["", f"{'':18}# computing   . waiting   = a message is on the way", ""]
    return "\n".join([*lines, *_table(plan, steps, starts, shown)])


def _bars(plan: SavedPlan, step: Timeline, longest: float) -> list[str]:
    """Computing and waiting; messages below."""
    rank, wire = [" "] * _COLUMNS, [" "] * _COLUMNS
    for index, task in enumerate(plan.tasks):
        bars = [(rank, "#", *step.computing[index])]
        if task.kind is not Kind.COMPUTE:
            row, mark = (rank, ".") if task.kind is Kind.WAIT else (wire, "=")
            bars.append((row, mark, step.begin[index], step.end[index]))
        for row, mark, begin, end in bars:
            first, last = round(begin / longest * _COLUMNS), round(end / longest * _COLUMNS)
            row[first:last] = mark * (last - first)
    return ["".join(rank).rstrip(), "".join(wire).rstrip()]


def _table(plan: SavedPlan, steps: Mapping[str, Timeline], starts: list[int], shown: int) -> list[str]:
    waits = {task.start: index for index, task in enumerate(plan.tasks) if task.kind is Kind.WAIT}
    names = [name for name in steps if name != "Inductor's order"]
    width = max([10, *(len(plan.labels[index].name) for index in starts[:shown])])
    begins = "".join(f"{name + ': begins':>20}{'waits':>12}" for name in names)
    lines = [f"{'collective':{width}}  {'line':20}{'result':>12}{begins}"]
    for index in starts[:shown]:
        label = plan.labels[index]
        line = f"{label.name:{width}}  {label.source:20}{_mebibytes(plan.tasks[index].bytes):>12}"
        for name in names:
            step, wait = steps[name], waits.get(index)
            waited = step.end[wait] - step.begin[wait] if wait is not None else 0.0
            line += f"{_milliseconds(step.begin[index]):>20}{_milliseconds(waited):>12}"
        lines.append(line)
    if len(starts) > shown:
        lines.append(f"and {len(starts) - shown} more: --all")
    return lines


def trace(plan: SavedPlan, steps: Mapping[str, Timeline]) -> dict[str, Any]:
    """For https://ui.perfetto.dev: a process for each step, with a row for the rank and one for messages."""
    events: list[dict[str, Any]] = []
    for process, (name, step) in enumerate(steps.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for thread, row in enumerate(("rank", "messages")):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": row}})
        for index, (task, label) in enumerate(zip(plan.tasks, plan.labels, strict=True)):
            bars = [(label.name, Kind.COMPUTE, *step.computing[index])] if task.rank_seconds else []
            if task.kind is Kind.START:
                bars.append((label.name, Kind.START, step.begin[index], step.end[index]))
            elif task.kind is Kind.WAIT:
                waits_for = f"wait for {plan.labels[task.start].name}"
                bars.append((waits_for, Kind.WAIT, step.begin[index], step.end[index]))
            events += [
                {
                    "ph": "X",
                    "name": name,
                    "cat": kind.value,
                    "pid": process,
                    "tid": 1 if kind is Kind.START else 0,
                    "ts": 1e6 * begin,
                    "dur": 1e6 * (end - begin),
                    "args": {"line": label.source, "bytes": task.bytes},
                }
                for name, kind, begin, end in bars
            ]
    return {"traceEvents": events}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="muster explain graph",
        description="Shows the step of a compiled graph before and after its plan. A program writes the plans with "
        "MUSTER_GRAPH_PLANS=FOLDER.",
    )
    parser.add_argument("plan", metavar="PLAN", type=Path, help="a file that the program has written")
    parser.add_argument("--measured", metavar="TRACE", type=Path, help="a trace of torch.profiler of that rank")
    parser.add_argument("--all", action="store_true", help=f"show all collectives, not {_SHOWN}")
    parser.add_argument("-o", metavar="FILE", type=Path, help="a picture (.png, .svg), or a trace for Perfetto (.json)")
    options = parser.parse_args(arguments)
    try:
        if options.o is not None and options.o.suffix not in (".png", ".svg", ".json"):
            raise ValueError(f"-o takes a .png, a .svg or a .json, not {options.o}")
        plan = SavedPlan.load(options.plan)
        steps = timelines(plan, options.measured)
        print(text(plan, steps, len(plan.tasks) if options.all else _SHOWN))
        if options.o is not None and options.o.suffix == ".json":
            options.o.write_text(json.dumps(trace(plan, steps)))
        elif options.o is not None:
            from muster.graph._plan.picture import draw

            draw(plan, steps, options.o)
    except (OSError, ValueError, ImportError) as error:
        print(f"muster explain graph: {error}", file=sys.stderr)
        return 2
    return 0


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


if __name__ == "__main__":
    sys.exit(main())
