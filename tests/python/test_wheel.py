"""Tests that the wheel of `make wheel` installs in a clean virtual environment and trains there."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(root: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy that builds in the same relative folder with the same flags as the tree: the compiler cache has the
    # objects.
    tree = folder / "muster"
    shutil.copytree(root, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", "out", "__pycache__"))
    (tree / ".venv").symlink_to(sys.prefix)
    pip = [tree / ".venv/bin/python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    settings = ["-Cbuild-dir=build/release", f"-Ccmake.define.MUSTER_WERROR={os.environ.get('WERROR', 'OFF')}"]
    # The compiler name that CMake itself would choose, because the compiler cache treats other names as other
    # compilers.
    run([*pip, *settings, "--wheel-dir", folder, tree], timeout=1800, env={"CXX": os.environ.get("CXX", "c++")})
    (built,) = folder.glob("torch_muster-*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel. It uses torch and its dependencies from this environment."""
    folder = tmp_path_factory.mktemp("clean")
    run([sys.executable, "-m", "venv", folder])
    (site,) = folder.glob("lib/python3.*/site-packages")
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if "muster" not in entry.name:
            (borrowed / entry.name).symlink_to(entry)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel])
    return folder


def test_the_wheel_contains_all_parts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "muster = muster._autoload:load" in archive.read(entry_points).decode()
    assert "muster/__init__.py" in names
    assert "muster/py.typed" in names
    assert sum(name.startswith("muster/_C") and name.endswith(".so") for name in names) == 1
    assert any(name.endswith(".data/scripts/muster") for name in names)
    assert any("LICENSE" in name for name in names)
    assert not any(name.endswith((".a", ".h", ".cpp", ".csv.gz")) for name in names)


def requirements(metadata: bytes) -> list[str]:
    return [line for line in email.message_from_bytes(metadata).get_all("Requires-Dist", []) if "extra ==" not in line]


def test_the_wheel_pins_its_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        (release,) = re.findall(r'TORCH = "(.*)"', archive.read("muster/_build.py").decode())
        assert requirements(archive.read(metadata)) == [f"torch=={release}", "numpy"]
    assert torch.__version__.split("+")[0] == release


def backend(call: str, folder: Path, root: Path, lines: str = "") -> subprocess.CompletedProcess[str]:
    """Calls a function of the build backend in pyproject.toml, in the environment of the tests, after `lines`."""
    code = f"{lines}\nimport sys\nfrom scikit_build_core import build\nbuild.{call}(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", code, folder], cwd=root, capture_output=True, text=True, timeout=300)


HIDE_TORCH = """
import importlib.metadata
def hide(name, found=importlib.metadata.version):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = hide
"""


def test_wheel_metadata_pins_the_installed_torch(root: Path, tmp_path: Path) -> None:
    done = backend("prepare_metadata_for_build_wheel", tmp_path, root)
    assert done.returncode == 0, done.stdout + done.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert requirements(metadata.read_bytes()) == [f"torch=={torch.__version__.split('+')[0]}", "numpy"]


def test_the_source_package_does_not_pin_torch(root: Path, tmp_path: Path) -> None:
    """The machine that makes a source package need not have torch."""
    done = backend("build_sdist", tmp_path, root, HIDE_TORCH)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("torch_muster-*.tar.gz")
    with tarfile.open(archive) as sources:
        top = archive.name.removesuffix(".tar.gz")
        assert f"{top}/tools/wheel_metadata.py" in sources.getnames(), "which the build of a wheel calls"
        file = sources.extractfile(f"{top}/PKG-INFO")
        assert file is not None
        metadata = file.read()
    assert requirements(metadata) == ["torch>=2.11", "numpy"]
    assert email.message_from_bytes(metadata).get_all("Dynamic") == ["Requires-Dist"]


def test_building_a_wheel_without_torch_fails(root: Path, tmp_path: Path) -> None:
    done = backend("prepare_metadata_for_build_wheel", tmp_path, root, HIDE_TORCH)
    assert done.returncode != 0
    assert "install torch" in done.stderr


def test_digits_train_in_a_clean_environment(clean: Path, root: Path, run: Run, tmp_path: Path) -> None:
    script = tmp_path / "digits.py"
    script.write_text((root / "examples/python/digits.py").read_text())
    data = root / "examples/data/digits.csv.gz"
    command = [clean / "bin/muster", "run", "--nproc-per-node", "2", script, "--data", data]
    clean_path = {"PATH": f"{clean}/bin:/usr/bin:/bin", "PYTHONPATH": "", "MUSTER_PYTHON": ""}
    output = run([*command, "--plot", tmp_path / "curve.png"], env=clean_path, cwd=tmp_path)
    accuracies = [float(number) for number in re.findall(r"epoch .*held-out accuracy +([\d.]+)%", output)]
    assert accuracies[-1] >= 97, output


def test_the_environment_imports_the_wheel(clean: Path, root: Path, tmp_path: Path) -> None:
    code = "import muster; print(muster.__file__)"
    done = subprocess.run([clean / "bin/python", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(clean)
    assert not Path(done.stdout.strip()).is_relative_to(root)
