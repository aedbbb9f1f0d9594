"""The examples in Python beside digits.py, which test_demo.py runs."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def example(root: Path, muster: str, run: Callable[..., str]) -> Callable[..., str]:
    """Runs one of examples/python on so many ranks, and gives what it said."""

    def start(ranks: int, name: str, *arguments: str | Path) -> str:
        return run([muster, "run", "--nproc-per-node", str(ranks), root / "examples/python" / name, *arguments])

    return start


def test_chars_learn_to_write_and_go_on_from_a_checkpoint_on_fewer_ranks(
    example: Callable[..., str], tmp_path: Path
) -> None:
    checkpoint = ["--checkpoint", tmp_path / "chars.pt"]
    first = example(2, "chars.py", "--steps", "50", *checkpoint)
    second = example(1, "chars.py", "--steps", "60", *checkpoint)
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", first + second)]
    assert re.findall(r"step +(\d+)/", first) == ["50"], first
    assert re.findall(r"step +(\d+)/", second) == ["60"], second
    # Even odds over the 70 characters of the alphabet are 4.2, their frequencies alone 3.2.
    assert losses[1] < losses[0] < 3, first + second
    assert len(second[second.index("60/60") :]) > 300, "it wrote no lines"


def test_every_rank_of_many_has_text_to_train_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chars = runpy.run_path(str(root / "examples/python/chars.py"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 40)
    for rank in (0, 39):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert chars["training_batch"](torch.arange(1000), 1).shape == (1, chars["CONTEXT"] + 1)


@pytest.mark.parametrize("options", ["--hook all_reduce", "--hook int8", "--outer diloco --hook int8"])
def test_digits_reach_97_percent_over_slow_links(example: Callable[..., str], options: str) -> None:
    said = example(2, "slow_links.py", *options.split())
    accuracies = [float(number) for number in re.findall(r"held-out accuracy +([\d.]+)%", said)]
    assert len(accuracies) == 12, said
    assert max(accuracies) >= 97, said
