"""Runs examples/python/pipeline, and checks its schedules against their formulas."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

NAMES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@pytest.fixture
def part(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the example."""
    monkeypatch.syspath_prepend(str(root / "examples/python/pipeline"))
    return importlib.import_module


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_waits_as_long_as_its_formula_says(part: Callable[[str], ModuleType], name: str, ranks: int) -> None:
    schedules = part("schedules")
    for microbatches in (ranks, 2 * ranks, 7 * ranks):
        schedule = schedules.make(name, ranks, microbatches)
        assert schedules.bubble_of(schedule.simulate()) == pytest.approx(schedule.expected_bubble())
        kinds = "FBW" if name == "zero-bubble" else "FB"
        actions = [action for order in schedule.orders for action in order]
        assert len(set(actions)) == len(actions) == len(kinds) * schedule.stages * microbatches
        assert all(action.stage % ranks == rank for rank, order in enumerate(schedule.orders) for action in order)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_a_schedule_needs_no_number_of_microbatches(part: Callable[[str], ModuleType], name: str) -> None:
    for microbatches in (1, 2, 5):
        assert len(part("schedules").make(name, 4, microbatches).simulate()) == 4


def test_schedules_differ_in_the_activations_that_they_keep(part: Callable[[str], ModuleType]) -> None:
    schedules = part("schedules")

    def most_alive(name: str, ends: str) -> list[int]:
        """The most passes of one rank that have begun with F and not ended with `ends`, for each rank."""
        most = []
        for order in schedules.make(name, 4, 16).orders:
            alive = [0]
            for action in order:
                alive.append(alive[-1] + (action.kind == "F") - (action.kind == ends))
            most.append(max(alive))
        return most

    assert most_alive("gpipe", "B") == [16, 16, 16, 16]
    assert most_alive("1f1b", "B") == [4, 3, 2, 1]
    assert most_alive("zero-bubble", "B") == [4, 3, 2, 1]
    assert max(most_alive("zero-bubble", "W")) == 4


def test_a_schedule_that_would_hang_is_an_error(part: Callable[[str], ModuleType]) -> None:
    schedules = part("schedules")
    orders = [
        [schedules.Action("B", 0, 0), schedules.Action("F", 0, 0)],
        [schedules.Action("F", 1, 0), schedules.Action("B", 1, 0)],
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        schedules.Schedule("wrong", 2, 1, orders).simulate()
    with pytest.raises(ValueError, match="multiple of 2 ranks"):
        schedules.make("interleaved", 2, 3)


def train_alone(model: ModuleType, steps: int, pieces: int) -> list[float]:
    """The losses of the model on one rank, without a pipeline."""
    alphabet, text = model.load_text()
    whole = model.make_stage(0, 1, alphabet)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        rows = model.batch(text, step, pieces)
        optimizer.zero_grad()
        loss = model.loss_of(whole(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("ranks", "names", "engines", "microbatches"),
    [
        (2, NAMES, ["p2p", "rpc", "torch"], 6),
        (3, ["interleaved"], ["p2p", "rpc"], 6),
        (4, NAMES, ["p2p", "rpc", "torch"], 8),
    ],
)
def test_pipelines_train_the_same_model(
    part: Callable[[str], ModuleType],
    root: Path,
    muster: str,
    run: Callable[..., str],
    tmp_path: Path,
    ranks: int,
    names: list[str],
    engines: list[str],
    microbatches: int,
) -> None:
    command = [muster, "run", "--nproc-per-node", str(ranks), root / "examples/python/pipeline/train.py"]
    cases = ["--schedules", ",".join(names), "--engines", ",".join(engines)]
    output = run([*command, *cases, "--steps=2", f"--microbatches={microbatches}", "--plot", tmp_path / "plot.png"])
    rows = re.findall(r"(\S+) +(p2p|rpc|torch) +(\d\.\d{4})  (\d\.\d{4}) +[\d.]+ ms(.*)", output)
    expected = train_alone(part("model"), 2, 4 * microbatches)
    assert [row[:2] for row in rows] == [(name, engine) for name in names for engine in engines], output
    for _, engine, first, last, bubble in rows:
        assert float(first) == pytest.approx(expected[0], abs=1e-3), output
        assert float(last) == pytest.approx(expected[1], abs=1e-3), output
        assert bool(re.fullmatch(r" +\d+\.\d% +\d+\.\d%", bubble)) == (engine != "torch"), output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
