"""Tests the example that `make demo` runs: stock DDP over muster, on real data."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import shown_on_a_terminal


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_digits_reach_97_percent_and_draw_a_plot(
    ranks: int, root: Path, release_build: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    picture = tmp_path / "curve/digits.png"
    binary = release_build / "src/muster/cli/muster"
    script = root / "examples/python/digits.py"
    one_thread = {"OMP_NUM_THREADS": "1"}  # also for a single rank, because other tests run at the same time
    output = run([binary, "run", "--nproc-per-node", str(ranks), script, "--plot", picture], env=one_thread)
    accuracies = [float(number) for number in re.findall(r"epoch .*held-out accuracy +([\d.]+)%", output)]
    assert len(accuracies) == 12, output
    assert accuracies[-1] >= 97, output
    assert f"with {ranks} ranks" in output
    assert str(picture) in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not re.search("[█·\r]", output), output  # only a terminal gets a progress bar


def test_digits_draw_a_bar_on_a_terminal(root: Path, release_build: Path, tmp_path: Path) -> None:
    run: list[str | Path] = [release_build / "src/muster/cli/muster", "run", "--nproc-per-node=2"]
    one_epoch = [*run, root / "examples/python/digits.py", "--epochs=1", "--plot", tmp_path / "digits.png"]
    output = shown_on_a_terminal(one_epoch, {**os.environ, "MUSTER_PYTHON": sys.executable}).decode()
    assert re.search("epoch  1/1 █+·+ loss ", output), output  # a bar that is not complete
    assert re.search("epoch  1/1 █{30} loss .*held-out accuracy ", output), output


def test_digits_in_python_never_import_muster(root: Path) -> None:
    text = (root / "examples/python/digits.py").read_text()
    assert not re.search(r"^\s*(import|from) +muster", text, re.MULTILINE)
