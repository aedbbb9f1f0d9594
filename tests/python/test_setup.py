"""Tests tools/setup.py on machines that lack something: it installs what it may, or says what to do."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """tools/setup.py as a module, on a machine whose only programs are those that a test puts into tmp_path/bin."""
    spec = importlib.util.spec_from_file_location("muster_setup", ROOT / "tools/setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    yield module


def program(tmp_path: Path, name: str, script: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def installed(tmp_path: Path, *packages: str) -> None:
    lines = "\n".join(f"echo '{package} install ok installed'" for package in packages)
    program(tmp_path, "dpkg-query", lines or ":")


def all_but(setup: ModuleType, *missing: str) -> list[str]:
    return [
        package for package in setup.PACKAGES + setup.TEST_PACKAGES + setup.PYTHON_PACKAGES if package not in missing
    ]


def test_nothing_missing_runs_no_apt(setup: ModuleType, tmp_path: Path) -> None:
    installed(tmp_path, *all_but(setup))
    setup.install_packages(tests=True)  # this machine has no apt-get


def test_programs_of_the_tests_are_installed_for_tests_only(setup: ModuleType, tmp_path: Path) -> None:
    installed(tmp_path, *all_but(setup, "slurm-wlm"))
    assert setup.missing_packages(tests=False) == []
    assert setup.missing_packages(tests=True) == ["slurm-wlm"]


def test_a_normal_user_gets_the_exact_command(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, *all_but(setup, "ninja-build", "libssl-dev"))
    program(tmp_path, "sudo", "exit 1")  # needs a password
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(setup.SetupError, match=r"sudo apt-get install libssl-dev ninja-build\n"):
        setup.install_packages(tests=True)


@pytest.mark.parametrize(("uid", "prefix"), [(0, ""), (1000, "sudo -n ")])
def test_root_and_sudo_install_missing_packages(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, prefix: str
) -> None:
    installed(tmp_path, *all_but(setup, "ccache"))
    program(tmp_path, "sudo", 'shift; [ "$1" = true ] || exec "$@"')
    program(tmp_path, "true", "")
    program(tmp_path, "env", 'shift; exec "$@"')
    program(tmp_path, "apt-get", f'echo "$@" >> "{tmp_path}/apt"')
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    commands: list[str] = []
    original = setup.run

    def run(command: list[str], doing: str) -> None:
        commands.append(" ".join(command))
        original(command, doing)

    monkeypatch.setattr(setup, "run", run)
    setup.install_packages(tests=True)
    assert all(command.startswith(f"{prefix}env DEBIAN_FRONTEND=noninteractive") for command in commands)
    assert (tmp_path / "apt").read_text().splitlines() == [
        "-q -y update",
        "-q -y install --no-install-recommends ccache",
    ]


def test_a_failing_command_is_shown_with_its_output(setup: ModuleType, tmp_path: Path) -> None:
    program(tmp_path, "apt-get", "echo 'E: no network'; exit 100")
    with pytest.raises(setup.SetupError, match=r"(?s)E: no network.*`apt-get update` failed with status 100"):
        setup.run(["apt-get", "update"], "apt-get update")


def test_packages_match_the_python_version(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tmp_path / "python3"
    monkeypatch.setattr(setup, "DEFAULT_PYTHON", default)
    own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    default.symlink_to(tmp_path / own)
    assert setup.python_packages() == ["python3-dev", "python3-venv"]
    default.unlink()
    default.symlink_to(tmp_path / "python3.1")
    assert setup.python_packages() == [f"{own}-dev", f"{own}-venv"]


@pytest.mark.parametrize(
    ("banner", "version", "new_enough"),
    [
        ("c++ (Ubuntu) 11.4.0", "11", False),
        ("c++ (Debian) 12.2.0", "12", True),
        ("Debian clang version 13.0.1", "13.0.1", False),
        ("Debian clang version 14.0.6", "14.0.6", True),
    ],
)
def test_old_and_new_compilers_are_distinguished(
    setup: ModuleType, tmp_path: Path, banner: str, version: str, new_enough: bool
) -> None:
    compiler(tmp_path, "c++", banner, version)
    assert setup.compiler_version("c++")[1:] == (version, new_enough)


def compiler(tmp_path: Path, name: str, banner: str, version: str) -> None:
    program(tmp_path, name, f'[ "$1" = --version ] && echo "{banner}" || echo "{version}"')


@pytest.fixture
def old_compiler(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose c++ is g++ 11, and an empty .venv."""
    compiler(tmp_path, "c++", "c++ (Ubuntu) 11.4.0", "11")
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    return tmp_path


def test_a_newer_compiler_is_preferred(setup: ModuleType, old_compiler: Path) -> None:
    compiler(old_compiler, "g++-13", "g++-13 (Ubuntu) 13.1.0", "13")
    setup.check_compiler()
    setup.check_compiler()  # a second time changes nothing
    assert (old_compiler / ".venv/bin/c++").resolve() == old_compiler / "bin/g++-13"


def test_root_installs_a_newer_compiler(setup: ModuleType, old_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def apt_install(packages: list[str]) -> None:
        asked.append(packages)
        compiler(old_compiler, packages[0], "g++-12 (Ubuntu) 12.3.0", "12")

    monkeypatch.setattr(setup, "apt_install", apt_install)
    setup.check_compiler()
    assert asked == [["g++-12"]]
    assert (old_compiler / ".venv/bin/c++").resolve() == old_compiler / "bin/g++-12"


def test_a_user_with_an_old_compiler_gets_the_command(
    setup: ModuleType, old_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(setup.SetupError, match=r"sudo apt-get install g\+\+-12\n"):
        setup.check_compiler()


def test_an_old_configured_compiler_is_refused(
    setup: ModuleType, old_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(old_compiler, "g++-10", "g++-10 (Ubuntu) 10.5.0", "10")
    monkeypatch.setenv("CXX", "g++-10")
    with pytest.raises(setup.SetupError, match=r"CXX=g\+\+-10 is g\+\+ 10 and muster needs g\+\+ 12"):
        setup.check_compiler()


@pytest.mark.parametrize("works", [False, True])
def test_an_incomplete_environment_is_recreated(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin/python"
    python.write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")  # pip's status
    python.chmod(0o755)
    monkeypatch.setattr(setup, "VENV", venv)
    monkeypatch.setattr(setup, "STAMP", venv / "stamp")
    ran: list[list[str]] = []
    monkeypatch.setattr(setup, "run", lambda command, doing: ran.append(command))
    setup.make_venv()
    assert ran == ([] if works else [[sys.executable, "-m", "venv", str(venv)]])
    assert venv.exists() == works


def test_a_missing_compiler_is_reported(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupError, match="no C\\+\\+ compiler"):
        setup.check_compiler()


def test_the_development_install_is_found_as_a_distribution(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / ".venv"
    site = venv / f"lib/python3.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    monkeypatch.setattr(setup, "VENV", venv)
    setup.install_for_development()
    setup.install_for_development()  # a second time changes nothing
    (info,) = site.glob("torch_muster-*.dist-info")
    found = importlib.metadata.PathDistribution(info)
    assert found.metadata["Name"] == "torch-muster"
    assert [(point.group, point.value) for point in found.entry_points] == [
        ("torch.backends", "muster._autoload:load"),
        ("torch.distributed.backends", "muster._autoload:load"),
        ("torch_dynamo_backends", "muster.graph:compile_graph"),
        ("pytest11", "muster_pytest"),
    ]
    assert (site / "torch_muster.pth").read_text().strip() == str(ROOT / "python")
    assert os.access(venv / "bin/muster", os.X_OK)


@pytest.mark.parametrize(("there", "asked"), [(None, True), ("2.12.1", True), ("2.13.0", False), ("2.13.0+cpu", False)])
def test_another_torch_version_is_replaced(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str | None, asked: bool
) -> None:
    site = tmp_path / ".venv/lib/python3.11/site-packages"
    (site / "torch").mkdir(parents=True)
    for name in setup.MPIS:
        (tmp_path / ".venv" / name).mkdir()
    if there:
        info = site / f"torch-{there}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {there}\n")
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "STAMP", tmp_path / ".venv/stamp")
    messages: list[str] = []
    monkeypatch.setattr(setup, "run", lambda command, doing: messages.append(doing))
    setup.install_python_packages("2.13.0", tests=True)
    assert ("pip install torch==2.13.0" in messages) == asked
