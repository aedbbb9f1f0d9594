"""What muster.step_report() and muster.straggler_report() say of training."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    """`work`: multiplications that this rank does in each forward beside the model's."""
    burden = torch.full((256, 256), 1 / 256)
    for _ in range(steps):
        for _ in range(work):
            burden = burden @ burden
        model(torch.randn(8, 64)).sum().backward()


def reported(rank: int, folder: str) -> muster.StepReport:
    model = make()
    with pytest.raises(ValueError, match="has not averaged gradients yet"):
        muster.step_report(model)
    with pytest.raises(TypeError, match="not of a torch"):
        muster.step_report(nn.Linear(1, 1))  # type: ignore[arg-type]
    train(model, STEPS)
    with model.no_sync():
        train(model, 1)
    report = muster.step_report(model)
    report.save(f"{folder}/step{rank}.json")
    report.save(f"{folder}/all.json", dist.group.WORLD)
    with contextlib.suppress(ImportError):
        report.save(f"{folder}/step{rank}.png")
    return report


def test_a_step_is_reported_with_its_plan_and_drawn(tmp_path: Path) -> None:
    reports = run_ranks(2, reported, str(tmp_path))
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
        assert 0 <= report.hidden <= 1
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
        for ours, told in zip(seen.plan, reports[rank].plan, strict=True):
            assert ours.bytes == told.bytes
            assert (ours.full, ours.ended) == pytest.approx((told.full, told.ended), abs=1e-5)
    assert len(found) == 2
    first, second = (report._begin / 1e9 + report.forward for report in reports)
    later = [max(0, first - second), max(0, second - first)]
    assert _step_plot.delays(found) == pytest.approx(later, abs=1e-5), "ranks of one host share a clock"
    assert _step_plot.delays({"": found[next(iter(found))]}) == [0]
    pytest.importorskip("matplotlib")
    _step_plot.draw(found, tmp_path / "trace.png")
    for name in ("step0", "step1", "trace"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def straggling(rank: int) -> muster.StragglerReport:
    model = make()
    train(model, 40, 40 if rank == 2 else 0)
    return muster.straggler_report(model, 30)


def test_the_rank_with_more_to_do_is_found_by_all() -> None:
    reports = run_ranks(3, straggling)
    for report in reports:
        assert (report.steps, report.rank) == (30, 2), str(report)
        assert report.share > 0.5 and report.behind > 0
        assert report.ranks[2]["last"] == round(30 * report.share)
        assert str(report) == str(reports[0])
        assert "rank 2 was last in " in str(report)


def alone(rank: int) -> tuple[str, int | None, float]:
    model = make()
    train(model, 2)
    report = muster.straggler_report(model)
    return str(report), report.rank, muster.step_report(model).communication


def test_one_rank_has_nobody_to_wait_for() -> None:
    assert run_ranks(1, alone) == [("there is one rank: nobody waits", None, 0)]
