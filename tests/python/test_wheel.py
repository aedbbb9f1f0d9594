"""Tests that the wheel of `make wheel` installs in a clean virtual environment and trains there."""

import configparser
import email
import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

Run = Callable[..., str]

RELEASE = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def wheel(root: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source package, as pip does it for a user."""
    folder = tmp_path_factory.mktemp("wheel")
    done = backend("build_sdist", folder, root)
    assert done.returncode == 0, done.stdout + done.stderr
    (sources,) = folder.glob("torch_muster-*.tar.gz")
    with tarfile.open(sources) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # CPython 3.11.2 has none, and ignores it
        archive.extractall(folder)
    # It builds in the same relative folder with the same flags as the tree: the compiler cache has the objects.
    tree = folder / sources.name.removesuffix(".tar.gz")
    (tree / ".venv").symlink_to(sys.prefix)
    pip = [tree / ".venv/bin/python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    settings = [
        "--config-settings=build-dir=build/release",
        f"--config-settings=cmake.define.MUSTER_WERROR={os.environ.get('WERROR', 'OFF')}",
    ]
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
        text = archive.read(entry_points).decode()
    found = configparser.ConfigParser()
    found.read_string(text)
    assert {group: found[group]["muster"] for group in found.sections()} == {
        "torch.backends": "muster._autoload:load",
        "torch.distributed.backends": "muster._autoload:load",
        "torch_dynamo_backends": "muster.graph:compile_graph",
        "pytest11": "muster_pytest",
    }
    assert "muster/__init__.py" in names
    assert "muster/py.typed" in names
    assert "muster_pytest/__init__.py" in names
    assert sum(name.startswith(f"muster/torch-{RELEASE}/_C") and name.endswith(".so") for name in names) == 1
    assert any(name.endswith(".data/scripts/muster") for name in names)
    assert any("LICENSE" in name for name in names)
    assert not any(name.endswith((".a", ".h", ".cpp", ".csv.gz")) for name in names)
    assert wheel.stat().st_size < 15e6


def requirements(metadata: bytes) -> list[str]:
    return [line for line in email.message_from_bytes(metadata).get_all("Requires-Dist", []) if "extra ==" not in line]


@pytest.fixture
def wheel_tool(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "tools")
    return importlib.import_module("build_wheel")


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return requirements(archive.read(metadata))


def test_the_wheel_needs_its_release_of_torch(wheel: Path) -> None:
    assert requirements_of(wheel) == [f"torch=={RELEASE}.*", "numpy"]


def for_another_release(wheel: Path, release: str, folder: Path) -> Path:
    """Writes a copy of the wheel whose native module is in the folder of another release of torch."""
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(target, "w") as copy:
        for info in archive.infolist():
            name = info.filename.replace(f"torch-{RELEASE}/", f"torch-{release}/")
            copy.writestr(name, archive.read(info).replace(f"torch-{RELEASE}/".encode(), f"torch-{release}/".encode()))
    return target


def test_one_wheel_serves_several_releases_of_torch(
    wheel: Path, run: Run, tmp_path: Path, wheel_tool: ModuleType
) -> None:
    merge = wheel_tool.merge
    other = for_another_release(wheel, "2.99", tmp_path)
    merged = tmp_path / "merged" / wheel.name
    merge([wheel, other], merged)
    assert requirements_of(merged)[1:] == ["numpy"]
    lowest, below, *gaps = requirements_of(merged)[0].split(",")
    assert (lowest, below) == (f"torch>={RELEASE}", "<2.100")
    assert gaps[-1] == "!=2.98.*"
    site = tmp_path / "site"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, merged])
    assert {path.name for path in (site / "muster").glob("torch-*")} == {f"torch-{RELEASE}", "torch-2.99"}
    assert os.access(site / "bin/muster", os.X_OK)
    code = "import muster; from muster import _C; print(_C.__file__)"
    done = run([sys.executable, "-c", code], env={"PYTHONPATH": str(site)})
    assert done.strip().startswith(f"{site}/muster/torch-{RELEASE}/")


def test_other_systems_get_the_python_code_alone(wheel: Path, run: Run, tmp_path: Path, wheel_tool: ModuleType) -> None:
    pure = tmp_path / "torch_muster-0.1.0-py3-none-any.whl"
    wheel_tool.merge([wheel], pure, native=False)
    site = tmp_path / "site"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, pure])
    assert not list(site.rglob("*.so"))
    # urllib asks for modules that only macOS has.
    code = """
import sys, urllib.request
sys.platform = "darwin"
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
data = torch.ones(2)
dist.all_reduce(data)
print(data.tolist(), dist.group.WORLD._get_backend(data.device).name())
dist.destroy_process_group()
import muster
"""
    environment = {"PYTHONPATH": str(site), "MUSTER_REPLACE": "gloo", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.stdout == "[1.0, 1.0] gloo\n", done.stderr
    sentence = "muster runs on Linux, and this is darwin"
    assert f"muster: a process group uses Gloo despite MUSTER_REPLACE: rank 0: {sentence}\n" in done.stderr
    assert f"ImportError: {sentence}" in done.stderr


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
    assert requirements(metadata.read_bytes()) == [f"torch=={RELEASE}.*", "numpy"]


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
