"""Tests muster.step_report() and muster.straggler_report()."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import find_muster
from muster._trace_plot import reports_of
from ranks import run_ranks
from torch import nn

import muster
from muster import _step_plot

STEPS = 5


def make(**options: Any) -> Any:
    from muster.nn import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    return DistributedDataParallel(net, bucket_cap_mb=0.1, **options)


def train(model: Any, steps: int, work: int = 0) -> None:
    """`work` is the number of matrix products that this rank computes in each forward besides the model's."""
    burden = torch.full((256, 256), 1 / 256)
    for _ in range(steps):
        for _ in range(work):
            burden = burden @ burden
        model(torch.randn(8, 64)).sum().backward()


def report_and_save(rank: int, folder: str) -> muster.StepReport:
    model = make()
    with pytest.raises(ValueError, match="has not averaged gradients yet"):
        muster.step_report(model)
    with pytest.raises(TypeError, match="not of a torch"):
        muster.step_report(nn.Linear(1, 1))  # type: ignore[arg-type]
    train(model, STEPS)
    with model.no_sync():
        train(model, 1)
    report = muster.step_report(model)
    with pytest.raises(ValueError, match=r"drawn to a .png or written to a .json, not to 'step.svg'"):
        report.save("step.svg")
    report.save(f"{folder}/step{rank}.json")
    report.save(f"{folder}/all.json", dist.group.WORLD)
    with contextlib.suppress(ImportError):
        report.save(f"{folder}/step{rank}.png")
    return report


def test_a_step_report_has_a_plan_and_a_plot(tmp_path: Path) -> None:
    reports = run_ranks(2, report_and_save, str(tmp_path))
    for rank, report in enumerate(reports):
        assert report.step == STEPS
        names = [name for bucket in report.plan for name in bucket.parameters]
        assert sorted(names) == [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("bias", "weight")]
        assert len(report.plan) > 1
        for bucket in report.plan:
            assert bucket.last in bucket.parameters
            assert 0 <= bucket.first <= bucket.full <= bucket.started <= bucket.ended
            assert bucket.first <= report.backward
        assert report.plan[-1].ended <= report.backward + report.waiting + 1e-9
        assert 0 <= report.overlap_ratio <= 1
        assert str(report).startswith(f"step {STEPS}: forward ")
        assert len(str(report).splitlines()) == 2 + len(report.plan) + len(report.advice)

        events = json.loads((tmp_path / f"step{rank}.json").read_text())["traceEvents"]
        slices = [event["name"] for event in events if event["ph"] == "X"]
        assert {"forward", "backward", "reduction", "muster:all_reduce"} <= set(slices)
        assert slices.count("reduction") == slices.count("muster:all_reduce") == len(report.plan)
    everyone = json.loads((tmp_path / "all.json").read_text())
    assert len([event for event in everyone["traceEvents"] if event["name"] == "backward"]) == 2
    found = reports_of(everyone)
    for rank, (name, seen) in enumerate(found.items()):
        assert name.startswith(f"rank {rank} (")
        assert (seen.step, len(seen.plan)) == (STEPS, len(reports[rank].plan))
        for ours, other in zip(seen.plan, reports[rank].plan, strict=True):
            assert (ours.bytes, ours.parameters, ours.last) == (other.bytes, other.parameters, other.last)
            assert (ours.full, ours.ended) == pytest.approx((other.full, other.ended), abs=1e-5)
    assert len(found) == 2
    first, second = (report._begin / 1e9 + report.forward for report in reports)
    slow_backward = [max(0, first - second), max(0, second - first)]
    assert _step_plot.delays(found) == pytest.approx(slow_backward, abs=1e-5), "ranks of one host share a clock"
    assert _step_plot.delays({"": found[next(iter(found))]}) == [0]
    pytest.importorskip("matplotlib")
    _step_plot.draw(found, tmp_path / "trace.png")
    for name in ("step0", "step1", "trace"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


class SlowBackward(torch.autograd.Function):
    """The backward of a layer outside the model, which runs after the model's. Records when it began and ended."""

    began = ended = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        SlowBackward.began = time.monotonic_ns()
        burden = torch.full((256, 256), 1 / 256)
        for _ in range(50):
            burden = burden @ burden
        SlowBackward.ended = time.monotonic_ns()
        return gradient


slow_backward: Any = SlowBackward.apply


def train_with_outside_layers(rank: int) -> list[tuple[int, int, muster.StepReport]]:
    model = make()
    steps = []
    for _ in range(STEPS):
        model(slow_backward(torch.randn(8, 64, requires_grad=True))).sum().backward()
        steps.append((SlowBackward.began, SlowBackward.ended, muster.step_report(model)))
    return steps


def test_layers_outside_the_model_count_as_backward() -> None:
    for steps in run_ranks(2, train_with_outside_layers):
        counted = 0
        for began, ended, report in steps:
            waited_from = report._begin + 1e9 * (report.forward + report.backward)
            assert waited_from + 1e9 * report.waiting >= ended
            counted += waited_from > (began + ended) / 2
        # The reducer's own time after the last gradient counts as waiting too. It is long if the thread lost its core
        # there.
        assert counted > 0, "backward waited for nothing while these ran"


TRAINING = """
import os, sys
import torch.distributed as dist
sys.path.insert(0, os.environ["HERE"])
from test_step import make, train
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("muster", store=dist.FileStore(store, 2), rank=rank, world_size=2)
model = make()
train(model, 5)
print("trained", flush=True)
sys.stdin.read()  # until the test ends it
dist.destroy_process_group()
"""


def test_trace_plots_a_step_of_a_running_job(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = find_muster()
    assert command is not None
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    env = {**os.environ, "HERE": str(Path(__file__).parent), "MUSTER_PYTHON": sys.executable}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    try:
        for each in ranks:
            assert each.stdout is not None and each.stdout.readline() == "trained\n"
        words: list[str | Path] = [command, "trace", "-o", tmp_path / "step.png", *(str(each.pid) for each in ranks)]
        output = subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=120).stdout
        for each in ranks:
            each.communicate(timeout=60)  # closes its standard input
            assert each.returncode == 0
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    for rank in range(2):
        assert re.search(
            rf"^rank {rank} \(.*, pid {ranks[rank].pid}\), step 4: forward .* of it overlapped$", output, re.M
        ), output
    assert len(re.findall(r"^ +0 .* ms  4.bias ... 2.weight \(4\) \(2.weight\)$", output, re.M)) == 2, output


def test_advice_from_a_trace_matches_the_program() -> None:
    def event(name: str, begin: float, end: float, **arguments: Any) -> dict[str, Any]:
        return {
            "name": name,
            "cat": "step",
            "pid": 1,
            "ts": begin,
            "dur": end - begin,
            "args": {"step": 7, **arguments},
        }

    head = {"bucket": 0, "bytes": 25 << 20, "parameters": ["head.bias", "head.weight"], "filled by": "head.weight"}
    events = [
        {"name": "process_name", "pid": 1, "args": {"name": "rank 0"}},
        event("forward", 0, 40e3),
        event("backward", 40e3, 90e3),
        event("waiting for reductions", 90e3, 110e3),
        event("gradients", 40e3, 90e3, **head),
        event("reduction", 90e3, 110e3, **head),
    ]
    ((name, report),) = reports_of({"traceEvents": events}).items()
    assert name == "rank 0, "
    assert (report.step, report.forward, report.backward, report.waiting) == (7, 0.04, 0.05, 0.02)
    assert (report.communication, report.overlap_ratio) == (0.02, 0)
    assert report.plan[0].parameters == ["head.bias", "head.weight"]
    (advice,) = report.advice
    assert advice.endswith(
        "is for the last bucket (25.0 MiB), which fills when backward ends: lower bucket_cap_mb to 10"
    )


def train_with_straggler(rank: int) -> muster.StragglerReport:
    model = make()
    train(model, 40, 40 if rank == 2 else 0)
    return muster.straggler_report(model, 30)


def test_all_ranks_find_the_straggler() -> None:
    reports = run_ranks(3, train_with_straggler)
    for report in reports:
        assert (report.steps, report.rank) == (30, 2), str(report)
        assert report.share > 0.5 and report.lag > 0
        assert report.ranks[2]["last"] == round(30 * report.share)
        assert str(report) == str(reports[0])
        assert "rank 2 was last in " in str(report)


def report_of_one_rank(rank: int) -> tuple[str, int | None, float]:
    model = make()
    train(model, 2)
    report = muster.straggler_report(model)
    return str(report), report.rank, muster.step_report(model).communication


def test_a_single_rank_has_no_straggler() -> None:
    assert run_ranks(1, report_of_one_rank) == [("there is a single rank: no rank waits", None, 0)]
