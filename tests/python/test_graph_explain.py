"""`muster explain graph` on plans and traces that are made here. test_graph_backend.py has those of a real graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from muster.graph._plan.explain import main, timelines, trace
from muster.graph._plan.saved import Label, SavedPlan, source_of
from muster.graph._plan.schedule import Kind, Task

# A gather of 3 s whose result the last kernel needs, and a kernel of 2 s that needs nothing.
TASKS = [
    Task(Kind.START, 3.0, bytes=1 << 20),
    Task(Kind.WAIT, 0.0, frozenset({0}), start=0),
    Task(Kind.COMPUTE, 2.0),
    Task(Kind.COMPUTE, 1.0, frozenset({1, 2})),
]
LABELS = [Label("all_gather_into_tensor", "train.py:7"), Label("wait_tensor"), Label("mm"), Label("add")]
PLAN = SavedPlan(0, TASKS, LABELS, [0, 2, 1, 3])


def span(name: str, begin: float, seconds: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": 1e6 * begin, "dur": 1e6 * seconds, "tid": thread}


def profile(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_text_compares_both_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(PLAN.save(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 collectives, 2 kernels, rank 0"
    assert lines[3].split() == ["Inductor's", "order", "6000.00", "ms", "3000.00", "ms", "1.0", "MiB"]
    assert lines[4].split() == ["planned", "4000.00", "ms", "1000.00", "ms", "1.0", "MiB"]
    assert lines[5].split()[:3] == ["bound", "4000.00", "ms"]
    assert lines[9:11] == ["planned" + 11 * " " + 30 * "#" + 15 * "." + 15 * "#", 18 * " " + 45 * "="]
    assert lines[-1].split() == ["all_gather_into_tensor", "train.py:7", "1.0", "MiB", "0.00", "ms", "1000.00", "ms"]


def test_a_measured_step_stands_beside_the_plan(tmp_path: Path) -> None:
    step = [
        span("## Call CompiledFxGraph f ##", 10, 7),
        span("_c10d_functional::all_gather_into_tensor", 11, 0.5),
        span("muster:all_gather_into_tensor", 11.25, 3.75),
        span("_c10d_functional::wait_tensor", 14, 1),
    ]
    other_thread = [span("_c10d_functional::all_reduce", 30, 1, thread=2)]
    measured = timelines(PLAN, profile(tmp_path, [*step, *other_thread]))["measured"]
    assert measured.total == 7
    assert measured.exposed == 1
    assert (measured.begin[0], measured.end[0]) == (1.25, 5)  # on the wire
    assert (measured.begin[2], measured.end[2]) == (1.5, 4)  # the kernel between the two calls
    assert (measured.begin[3], measured.end[3]) == (5, 7)


def test_a_blocking_call_is_a_collective_and_its_wait(tmp_path: Path) -> None:
    labels = [Label("all_reduce_", "train.py:7"), Label("wait_tensor"), Label("mm"), Label("add")]
    plan = SavedPlan(0, TASKS, labels, [2, 0, 1, 3])
    step = [span("## Call CompiledFxGraph f ##", 10, 7), span("muster::all_reduce_", 12, 4)]
    measured = timelines(plan, profile(tmp_path, step))["measured"]
    assert measured.exposed == 4
    assert (measured.begin[0], measured.end[0]) == (measured.begin[1], measured.end[1]) == (2, 6)
    assert (measured.begin[2], measured.end[2]) == (0, 2)
    assert (measured.begin[3], measured.end[3]) == (6, 7)


def test_the_trace_has_both_orders(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main([str(PLAN.save(tmp_path)), "-o", str(path)]) == 0
    assert json.loads(path.read_text()) == trace(PLAN, timelines(PLAN))
    spans = {(each["pid"], each["name"]): each for each in json.loads(path.read_text())["traceEvents"]}
    assert spans[1, "wait for all_gather_into_tensor"]["ts"] == 2e6
    assert spans[1, "wait for all_gather_into_tensor"]["dur"] == 1e6
    assert spans[1, "all_gather_into_tensor"]["tid"] == 1


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(PLAN.save(tmp_path)), "-o", str(tmp_path / "plan.svg")]) == 0
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_a_saved_plan_is_read_again(tmp_path: Path) -> None:
    assert SavedPlan.load(PLAN.save(tmp_path)) == PLAN


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"plan": 1}, "its format is 1, and this muster reads format 2"),
        ({"tasks": None}, "NoneType"),
        ({"order": [0, 0, 1, 2]}, "its order does not name each task once"),
        ({"order": [1, 0, 2, 3]}, "task 1 runs before a task that it needs"),
        ({"order": ["a"]}, "invalid literal"),
    ],
)
def test_what_is_no_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], complaint: str
) -> None:
    path = PLAN.save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"muster explain graph: {path} is not a plan of a compiled graph: ")
    assert complaint in error


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(PLAN.save(tmp_path))
    assert main([str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
    assert main([plan, "--measured", str(profile(tmp_path, [span("aten::mm", 0, 1)]))]) == 2
    assert "has no step of this plan" in capsys.readouterr().err
    assert main([plan, "--measured", plan]) == 2
    assert "is not a trace of torch.profiler" in capsys.readouterr().err
    assert main([plan, "-o", "plan.pdf"]) == 2
    assert "-o takes a .png, a .svg or a .json, not plan.pdf" in capsys.readouterr().err


def test_the_line_of_a_task_is_the_programs() -> None:
    inside = str(Path(__import__("muster.graph").graph.__file__).parent / "_capture/calls.py")
    frames = f'  File "models/train.py", line 7, in step\n    f(x)\n  File "{inside}", line 226, in call\n    g(x)\n'
    assert source_of(frames) == "train.py:7"
    assert source_of(None) == ""
