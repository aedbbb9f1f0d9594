"""tools/setup.py on machines that lack something: it installs what it may, and otherwise says what to do."""

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
    """The module, on a machine whose only programs are those that a test puts into tmp_path/bin."""
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
    return [package for package in setup.PACKAGES + setup.PYTHON_PACKAGES if package not in missing]


def test_nothing_missing_runs_no_apt(setup: ModuleType, tmp_path: Path) -> None:
    installed(tmp_path, *all_but(setup))
    setup.install_packages()  # there is no apt-get here to run


def test_an_ordinary_user_is_given_the_exact_command(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, *all_but(setup, "ninja-build", "libssl-dev"))
    program(tmp_path, "sudo", "exit 1")  # wants a password
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(setup.SetupError, match=r"sudo apt-get install libssl-dev ninja-build\n"):
        setup.install_packages()


@pytest.mark.parametrize(("uid", "prefix"), [(0, ""), (1000, "sudo -n ")])
def test_root_and_sudo_without_a_password_install_what_is_missing(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, prefix: str
) -> None:
    installed(tmp_path, *all_but(setup, "ccache"))
    program(tmp_path, "sudo", 'shift; [ "$1" = true ] || exec "$@"')
    program(tmp_path, "true", "")
    program(tmp_path, "env", 'shift; exec "$@"')
    program(tmp_path, "apt-get", f'echo "$@" >> "{tmp_path}/apt"')
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    said: list[str] = []
    run = setup.run
    monkeypatch.setattr(setup, "run", lambda command, doing: (said.append(" ".join(command)), run(command, doing)))
    setup.install_packages()
    assert all(command.startswith(f"{prefix}env DEBIAN_FRONTEND=noninteractive") for command in said)
    assert (tmp_path / "apt").read_text().splitlines() == [
        "-q -y update",
        "-q -y install --no-install-recommends ccache",
    ]


def test_a_failing_command_is_shown_with_what_it_said(setup: ModuleType, tmp_path: Path) -> None:
    program(tmp_path, "apt-get", "echo 'E: no network'; exit 100")
    with pytest.raises(setup.SetupError, match=r"(?s)E: no network.*`apt-get update` failed with status 100"):
        setup.run(["apt-get", "update"], "apt-get update")


@pytest.mark.parametrize(
    ("banner", "version", "refused"),
    [
        ("c++ (Ubuntu) 11.4.0", "11", True),
        ("c++ (Debian) 12.2.0", "12", False),
        ("Debian clang version 13.0.1", "13.0.1", True),
        ("Debian clang version 14.0.6", "14.0.6", False),
    ],
)
def test_an_old_compiler_is_named_with_a_newer_one(
    setup: ModuleType, tmp_path: Path, banner: str, version: str, refused: bool
) -> None:
    program(tmp_path, "c++", f'[ "$1" = --version ] && echo "{banner}" || echo "{version}"')
    if not refused:
        setup.check_compiler()
        return
    with pytest.raises(setup.SetupError, match=r"apt-get install g\+\+-12"):
        setup.check_compiler()


def test_no_compiler_at_all_is_said(setup: ModuleType) -> None:
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
    assert [(point.group, point.value) for point in found.entry_points] == [("torch.backends", "muster._autoload:load")]
    assert (site / "torch_muster.pth").read_text().strip() == str(ROOT / "python")
    assert os.access(venv / "bin/muster", os.X_OK)
