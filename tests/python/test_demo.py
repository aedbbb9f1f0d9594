"""The example that `make demo` runs: stock DDP over muster, on real data."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_digits_reach_97_percent_and_leave_a_picture(
    ranks: int, root: Path, release_build: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    picture = tmp_path / "curve/digits.png"
    binary = release_build / "src/muster/launch/muster"
    script = root / "examples/python/digits.py"
    said = run([binary, "run", "--nproc-per-node", str(ranks), script, "--plot", picture])
    accuracies = [float(number) for number in re.findall(r"epoch .*held-out accuracy +([\d.]+)%", said)]
    assert len(accuracies) == 12, said
    assert accuracies[-1] >= 97, said
    assert f"with {ranks} ranks" in said
    assert str(picture) in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_digits_in_python_never_import_muster(root: Path) -> None:
    text = (root / "examples/python/digits.py").read_text()
    assert not re.search(r"^\s*(import|from) +muster", text, re.MULTILINE)
