"""Tests programs of muster.forkserver that get their processes from the zygote of `muster warm`."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forkserver_program import FACTS, MATCH, differences
from launching import TIMEOUT, Job, call_warm, marked_processes, wait_until, warm_zygote

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def warm(muster: str, without_users_zygote: None) -> Iterator[dict[str, str]]:
    """Settings with which programs use a warm zygote."""
    settings = {"MUSTER_BIN": muster, "MUSTER_PYTHON": sys.executable}
    with warm_zygote(muster, settings):
        yield settings


@pytest.mark.parametrize("settings", ["{}", '{"OMP_NUM_THREADS": "1"}'])
def test_a_process_of_a_warm_zygote_matches_a_spawned_one(
    program: Callable[..., Job], muster: str, warm: dict[str, str], settings: str
) -> None:
    before = served(muster, warm)
    job = program(MATCH, FACTS, **warm, SETTINGS=settings)
    assert differences(job) == {"group"}
    assert served(muster, warm) == before + 1


def served(muster: str, warm: dict[str, str]) -> int:
    """The programs that have had a fork server."""
    (found,) = re.findall(r"0 runs now, (\d+) in total", call_warm(muster, warm, "status").stdout)
    return int(found)


WARM = """
os.setsid()
server = context.Process(target=print)
server.start()
server.join()
from muster.forkserver._client import client
with open(f'/proc/{client._pid}/cmdline') as file:
    say('by', *file.read().split('\\0')[1:3])
processes = [start(pause) for _ in range(2)]
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_processes_of_a_warm_zygote(
    program: Callable[..., Job], warm: dict[str, str], number: signal.Signals
) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: None)\n" if number == signal.SIGTERM else ""
    job = program(handler + WARM + "for process in processes: process.join(); say('exit', process.exitcode)\n", **warm)
    job.expect("by warm attach")
    job.expect(r"child \d+", 2)
    os.killpg(job.process.pid, number)
    if number == signal.SIGTERM:
        assert job.finish() == 0, job.err
        assert job.out.count(f"exit {-signal.SIGTERM}") == 2
    else:
        assert job.finish() == -signal.SIGINT, job.err
        assert job.err.count("KeyboardInterrupt") == 3, job.err
    assert job.left_behind() == []


def test_a_killed_program_leaves_nothing_in_a_warm_zygote(
    program: Callable[..., Job], muster: str, warm: dict[str, str]
) -> None:
    job = program(WARM + "signal.pause()", **warm)
    job.expect("by warm attach")
    job.expect(r"child \d+", 2)
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()
    assert job.left_behind() == []
    wait_until(lambda: "0 runs now" in call_warm(muster, warm, "status").stdout)


def test_a_program_with_other_settings_has_its_own_fork_server(
    program: Callable[..., Job], muster: str, warm: dict[str, str]
) -> None:
    before = served(muster, warm)
    job = program("start(print, 'done').join()", **warm, PYTHONHASHSEED="0")
    assert job.finish() == 0, job.err
    assert job.out == "done\n"
    assert job.left_behind() == []
    assert served(muster, warm) == before


def test_a_module_that_comes_before_one_of_the_warm_zygote(
    program: Callable[..., Job], warm: dict[str, str], tmp_path: Path
) -> None:
    """The program gets a fork server of its own, which imports this module."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mpmath.py").write_text("where = 'own'\n")
    text = f"sys.path.insert(0, {str(tmp_path / 'own')!r})\nstart(show).join()"
    functions = "def show(): import mpmath; say('mpmath', getattr(mpmath, 'where', 'installed'))"
    job = program(text, functions, **warm)
    assert job.finish() == 0, job.err
    assert "refuses" not in job.err
    assert job.out == "mpmath own\n"
    assert job.left_behind() == []


def test_a_program_that_calls_exec_leaves_nothing(
    program: Callable[..., Job], muster: str, warm: dict[str, str]
) -> None:
    handler = "signal.signal(signal.SIGUSR1, lambda *_: os.execvp('tail', ['tail', '-f', '/dev/null']))\n"
    job = program(handler + WARM + "signal.pause()", **warm)
    job.expect(r"child \d+", 2)
    os.kill(job.process.pid, signal.SIGUSR1)
    wait_until(lambda: marked_processes(job.mark) == [job.process.pid])
    wait_until(lambda: "0 runs now" in call_warm(muster, warm, "status").stdout)
    assert Path(f"/proc/{job.process.pid}/cmdline").read_text().startswith("tail")


def test_a_warm_zygote_that_does_not_answer_is_not_waited_for(
    program: Callable[..., Job], muster: str, warm: dict[str, str]
) -> None:
    (pid,) = map(int, re.findall(r"pid (\d+)", call_warm(muster, warm, "status").stdout))
    os.kill(pid, signal.SIGSTOP)
    try:
        text = "import muster.forkserver._client as c\nc.WARM_TIMEOUT = 0.1\nstart(print, 'done').join()"
        job = program(text, **warm)
        job.expect("done")
        job.process.wait(TIMEOUT)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert job.finish() == 0, job.err
    assert job.left_behind() == []
