"""Tests tools/stage.py: it prints one line for a stage, keeps the log, and shows and returns a failure."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stage(tmp_path: Path) -> list[str]:
    """A copy of tools/stage.py, so that its logs go into a directory of this test."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/stage.py", tmp_path / "tools")
    return [sys.executable, str(tmp_path / "tools/stage.py")]


def test_a_successful_stage_prints_one_line_and_summary(stage: list[str], tmp_path: Path) -> None:
    command = ["sh", "-c", "echo noise; echo 3 tests passed; echo errors too >&2"]
    done = subprocess.run([*stage, "unit tests", "--summary", "passed", "--", *command], capture_output=True, text=True)
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first.startswith("unit tests ")
    assert " ok " in first
    assert rest == ["  3 tests passed"]
    assert (tmp_path / "build/log/unit-tests.txt").read_text() == "noise\n3 tests passed\nerrors too\n"


def test_a_failed_stage_shows_its_log_and_status(stage: list[str], tmp_path: Path) -> None:
    command = ["sh", "-c", "seq 1000; echo broken; exit 3"]
    done = subprocess.run([*stage, "build", "--", *command], capture_output=True, text=True)
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert "FAILED (3)" in lines[0]
    assert lines[-2] == "broken"
    assert lines[-1].endswith(str(tmp_path / "build/log/build.txt"))
    assert len(lines) < 200


def test_a_failed_check_is_shown_last(stage: list[str]) -> None:
    command = ["sh", "-c", "echo '44: /x/p2p_test.cpp:7: Failure'; echo '44: is 3'; seq 1000; exit 8"]
    done = subprocess.run([*stage, "ctest", "--", *command], capture_output=True, text=True)
    assert done.returncode == 8
    assert done.stdout.splitlines()[-5:] == ["44: /x/p2p_test.cpp:7: Failure", "44: is 3", "1", "2", "3"]


def test_a_signaled_stage_has_the_shells_status(stage: list[str]) -> None:
    assert subprocess.run([*stage, "x", "--", "sh", "-c", "kill -9 $$"], capture_output=True).returncode == 128 + 9


def test_a_program_that_is_missing_fails_the_stage(stage: list[str]) -> None:
    done = subprocess.run([*stage, "x", "--", "no-such-program"], capture_output=True, text=True)
    assert done.returncode == 127
    assert "no-such-program" in done.stdout
