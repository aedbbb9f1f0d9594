"""A measured step of a planned graph, from a trace of torch.profiler."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from muster.graph._plan import BLOCKING, NAMESPACES
from muster.graph._plan.saved import SavedPlan
from muster.graph._plan.schedule import Kind, Timeline

Event = dict[str, Any]
_OPERATORS = tuple(f"{namespace}::" for namespace in NAMESPACES)
_WIRE = "muster:"  # a span from the call of a collective to its end
_GRAPH = "## Call CompiledFxGraph"


def measured(plan: SavedPlan, path: Path) -> Timeline:
    """The last step in the trace that has the plan's collectives. Raises ValueError if it has none.

    Kernels between two calls share the time between them, in proportion to what the plan expects of each.
    """
    try:
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
        events.sort(key=lambda event: float(event["ts"]))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a trace of torch.profiler (export_chrome_trace)") from None
    part_of_call = {wait for start, wait in itertools.pairwise(plan.order) if _is_one_call(plan, start, wait)}
    wanted = [index for index in plan.order if plan.tasks[index].kind is not Kind.COMPUTE and index not in part_of_call]
    found = _last_step(events, [plan.labels[index].name for index in wanted])
    if not found:
        raise ValueError(
            f"{path} has no step of this plan: no thread calls its {len(wanted)} collectives and waits in this order; "
            f"profile a step of rank {plan.rank}"
        )
    return _timeline(plan, dict(zip(wanted, found, strict=True)), events)


def _is_one_call(plan: SavedPlan, start: int, wait: int) -> bool:
    """True if compiled code starts a collective and waits for it in one call. The second task follows the first one."""
    task = plan.tasks[wait]
    return plan.labels[start].name == BLOCKING and task.kind is Kind.WAIT and task.start == start


def _last_step(events: list[Event], names: list[str]) -> list[Event]:
    """The calls with these names, one after the other on one thread."""
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if event["name"].startswith(_OPERATORS):
            threads.setdefault(event["tid"], []).append(event)
    steps = []
    for calls in threads.values():
        called = [event["name"].rpartition("::")[2] for event in calls]
        begins = [each for each in range(len(called) - len(names) + 1) if called[each : each + len(names)] == names]
        steps += [calls[begin : begin + len(names)] for begin in begins[-1:]]
    return max(steps, key=lambda step: step[0]["ts"] if step else 0, default=[])


def _timeline(plan: SavedPlan, calls: dict[int, Event], events: list[Event]) -> Timeline:
    first, last = (calls[min(calls, key=lambda each: sign * calls[each]["ts"])] for sign in (1, -1))
    begin, end = first["ts"], _end(last)
    for event in events:
        if event["name"].startswith(_GRAPH) and event["ts"] <= first["ts"] and _end(event) >= _end(last):
            begin, end = event["ts"], _end(event)
    result = Timeline.of(len(plan.tasks))
    result.total = _seconds(end - begin)
    now = begin
    kernels: list[int] = []
    for index in plan.order:
        task = plan.tasks[index]
        if task.kind is Kind.COMPUTE:
            kernels.append(index)
            continue
        event = calls.get(index) or calls[task.start]
        _share(plan, result, kernels, _seconds(now - begin), _seconds(event["ts"] - begin))
        kernels = []
        now = _end(event)
        ended = _seconds(now - begin)
        result.begin[index] = _seconds(event["ts"] - begin)
        # A call that computes by chunks first waits for what its computing leaves of the call.
        result.end[index] = max(ended - task.computing, result.begin[index])
        result.computing[index] = result.end[index] if task.computing else ended, ended
        if task.kind is Kind.WAIT:
            result.exposed += result.end[index] - result.begin[index]
            result.end[task.start] = result.end[index]
    _share(plan, result, kernels, _seconds(now - begin), result.total)
    _add_wire(plan, result, [event for event in events if event["name"].startswith(_WIRE)], begin, end)
    return result


def _share(plan: SavedPlan, result: Timeline, kernels: list[int], begin: float, end: float) -> None:
    expected = sum(plan.tasks[index].seconds for index in kernels)
    for index in kernels:
        result.begin[index] = begin
        begin += (end - begin) * plan.tasks[index].seconds / expected if expected else 0.0
        expected -= plan.tasks[index].seconds
        result.end[index] = begin
        result.computing[index] = result.begin[index], begin


def _add_wire(plan: SavedPlan, result: Timeline, spans: list[Event], begin: float, end: float) -> None:
    """When each message ended. Without such spans it is the end of the wait."""
    starts = [index for index in plan.order if plan.tasks[index].kind is Kind.START]
    spans = [span for span in spans if span["name"][len(_WIRE) :].isidentifier() and begin <= span["ts"] <= end]
    if len(spans) == len(starts):
        for index, span in zip(starts, spans, strict=True):
            result.begin[index], result.end[index] = _seconds(span["ts"] - begin), _seconds(_end(span) - begin)


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _seconds(microseconds: float) -> float:
    return microseconds / 1e6
