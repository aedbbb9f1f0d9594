"""Tests @pytest.mark.ranks, with pytest runs of their own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job

pytest.importorskip("torch")

HEAD = """
import os
import threading
import pytest
import torch
import torch.distributed as dist
"""


@pytest.fixture
def suite(tmp_path: Path, run_to_end: Callable[..., Job]) -> Callable[..., Job]:
    """suite(text, options...) runs pytest on a file with this text, to its end."""

    def run(text: str, *options: str, head: str = HEAD) -> Job:
        folder = tmp_path / "suite"
        folder.mkdir(exist_ok=True)
        (folder / "pytest.ini").touch()  # so that pytest uses no other one
        (folder / "test_suite.py").write_text(head + text)
        words = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *options, folder]
        return run_to_end(words, {"COLUMNS": "200"})

    return run


def counts(job: Job) -> dict[str, int]:
    last = job.out.strip().splitlines()[-1]
    return {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", last)}


PASSING = """
@pytest.fixture
def number():
    return 7

@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [1, 1000])
def test_sum(length, number, tmp_path):
    data = torch.full((length,), float(number))
    dist.all_reduce(data)
    assert data.tolist() == [28.0] * length
    assert dist.get_backend() == "muster"
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 4 == int(os.environ["WORLD_SIZE"])

class TestInClass:
    size = 2

    @pytest.mark.ranks(2, backend="gloo")
    def test_method(self):
        assert (dist.get_backend(), dist.get_world_size()) == ("gloo", self.size)

@pytest.mark.ranks(1)
def test_one_rank():
    dist.destroy_process_group()

@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_imperative_xfail():
    if dist.get_rank() == 1:
        pytest.xfail("known")

class PlannedError(Exception):
    pass

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=PlannedError)
def test_xfail_mark():
    raise PlannedError

def test_without_ranks():
    assert not dist.is_initialized()
"""


@pytest.mark.parametrize("option", ["--color=no", "-n2", "--import-mode=importlib", "-s"])
def test_outcomes_of_ranks(suite: Callable[..., Job], option: str) -> None:
    job = suite(PASSING, option)
    assert counts(job) == {"passed": 5, "skipped": 1, "xfailed": 2}, job.out
    assert re.search(r"SKIPPED \[1\] .*test_suite.py:\d+: not today \(rank 0\)", job.out), job.out
    assert "known (rank 1)" in job.out


FAILING = """
def helper(number):
    raise ValueError(f"bad {number}")

@pytest.mark.ranks(4)
def test_one_rank_fails():
    print("output of", dist.get_rank())
    os.write(2, b"error of %d" % dist.get_rank())
    if dist.get_rank() == 2:
        helper(3)
    dist.barrier()

@pytest.mark.ranks(2)
def test_assertion():
    sizes = [dist.get_rank(), 5]
    assert sizes == [7, 5]

@pytest.mark.ranks(2)
def test_explicit():
    pytest.fail("without a trace", pytrace=False)

@pytest.mark.ranks(2)
def test_skip_and_failure():
    if dist.get_rank() == 0:
        pytest.skip("only rank 0")
    assert False

@pytest.mark.ranks(2)
def test_exception_that_cannot_be_pickled():
    class LocalError(Exception):
        pass
    raise LocalError("local")

def make_odd_error(text):
    os.environ["RANK"]  # not set in pytest's process
    return OddError(text)

class OddError(Exception):
    def __reduce__(self):
        return make_odd_error, self.args

@pytest.mark.ranks(2)
def test_exception_that_only_ranks_can_unpickle():
    raise OddError("odd")

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.mark.ranks(2)
def test_fixture(lock):
    pass

@pytest.mark.ranks(0)
def test_size():
    pass
"""


def test_failures_are_shown(suite: Callable[..., Job]) -> None:
    job = suite(FAILING)
    assert counts(job) == {"failed": 8}, job.out
    parts = re.split(r"^_{5,} (\w+) _{5,}$", job.out, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    first = shown["test_one_rank_fails"]
    assert '    def helper(number):\n>       raise ValueError(f"bad {number}")\nE       ValueError: bad 3' in first
    assert ">           helper(3)" in first and "muster_pytest" not in first
    assert "rank 2 failed first; the other ranks" in first
    for rank in (0, 1, 3):  # on a machine that is busy, a rank may not have ended in time
        line = rf"^rank {rank}: (muster\.errors\.\w*Error: .*rank 2|had not ended$)"
        assert re.search(line, first, re.MULTILINE), first
    for rank in range(4):
        assert f"- Captured stdout of rank {rank} call -" in first and f"\noutput of {rank}\n" in first
        assert f"- Captured stderr of rank {rank} call -" in first and f"\nerror of {rank}" in first
    assert re.search(r"E +assert \[[01], 5\] == \[7, 5\]\nE +\nE +At index 0 diff: [01] != 7", shown["test_assertion"])
    assert re.match(r"\nwithout a trace\n-+ rank \d failed first", shown["test_explicit"]), shown["test_explicit"]
    assert "rank 1 failed first; the other ranks -" in shown["test_skip_and_failure"]
    assert "\nrank 0: skipped\n" in shown["test_skip_and_failure"]
    assert "LocalError: local" in shown["test_exception_that_cannot_be_pickled"]
    assert "OddError: odd" in shown["test_exception_that_only_ranks_can_unpickle"]
    assert "the value of 'lock' cannot be sent to the ranks: TypeError: cannot pickle" in shown["test_fixture"]
    assert "ranks() takes a number of ranks and a timeout above 0, not 0" in shown["test_size"]


LOST = """
@pytest.mark.ranks(2)
def test_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

@pytest.mark.ranks(2)
def test_exit():
    if dist.get_rank() == 1:
        os._exit(3)

@pytest.mark.ranks(3, timeout=3)
def test_late():
    if dist.get_rank() == 1:
        threading.Event().wait()

@pytest.mark.ranks(2, timeout=10)
def test_late_for_a_collective():
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()

@pytest.mark.ranks(2)
def test_after_all_that():
    dist.barrier()
"""


def test_lost_and_late_ranks(suite: Callable[..., Job]) -> None:
    job = suite(LOST)
    assert counts(job) == {"passed": 1, "failed": 4}, job.out
    assert re.search(r"\nrank 1 was ended by SIGKILL; the other ranks:\nrank 0: muster.errors.PeerLostError: ", job.out)
    assert "\nrank 1 ended with status 3; the other ranks:\nrank 0: " in job.out
    assert (
        "\nthe test did not end within 3 s at rank 1\nrank 0: passed\nrank 1: had not ended\nrank 2: passed\n"
        in job.out
    )
    assert "in test_late\n" in job.out  # the stack
    assert re.search(r"E +muster.errors.TimeoutError: .*rank 1", job.out), job.out


SLOW_START = """
@pytest.fixture
def slow_start(monkeypatch):
    \"\"\"The clock goes on by 100 s while the first rank starts.\"\"\"
    import time
    import types
    from muster.forkserver import _client
    from muster_pytest import _run
    passed, fork = [], _client.Client.fork
    def fork_slowly(*arguments):
        passed[:] = [100.0]
        return fork(*arguments)
    monkeypatch.setattr(_client.Client, "fork", fork_slowly)
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed))
    monkeypatch.setattr(_run, "time", clock)

@pytest.mark.ranks(2)
@pytest.mark.usefixtures("slow_start")
def test_barrier():
    dist.barrier()
"""


def test_the_deadline_begins_when_all_ranks_are_started(suite: Callable[..., Job]) -> None:
    job = suite(SLOW_START)
    assert counts(job) == {"passed": 1}, job.out


REFUSED = """
import unittest

@pytest.mark.ranks(2)
async def test_coroutine():
    assert False

class Cases(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self):
        pass
"""


@pytest.mark.parametrize("option", ["--color=no", "-n1"])
def test_ranks_are_for_plain_functions(suite: Callable[..., Job], option: str) -> None:
    job = suite(REFUSED, option)
    assert job.process.returncode == pytest.ExitCode.TESTS_FAILED
    for name in ("test_coroutine", "Cases::test_method"):
        assert re.search(rf"^ERROR .*test_suite\.py::{name} - .*ranks\(\) takes plain functions", job.out, re.MULTILINE)
    assert "2 errors in" in job.out, job.out


def test_the_fork_server_reads_no_settings_of_pytest(
    suite: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, imported = tmp_path / "suite", tmp_path / "imported"
    folder.mkdir()
    for name in ("conftest", "own_plugin"):
        (folder / f"{name}.py").write_text(f"with open({str(imported)!r}, 'a') as file: print('{name}', file=file)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_PLUGINS", "own_plugin")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n0")  # of a plugin that the fork server does not load
    job = suite("@pytest.mark.ranks(2)\ndef test_barrier(): dist.barrier()\n")
    assert counts(job) == {"passed": 1}, job.out
    assert sorted(imported.read_text().split()) == ["conftest", "own_plugin"]


def test_other_runs_import_no_torch(suite: Callable[..., Job]) -> None:
    text = """
import sys
def test_modules():
    assert "muster_pytest" in sys.modules
    assert not {"torch", "muster"} & set(sys.modules)
"""
    job = suite(text, "--strict-markers", head="")
    assert counts(job) == {"passed": 1}, job.out


def test_preloaded_modules(suite: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import os\nwhere = os.getpid()\n")
    text = """
@pytest.mark.ranks(2)
def test_preload():
    import slow_module
    assert slow_module.where == os.getppid()
"""
    job = suite(text, "-o", f"pythonpath={tmp_path}", "-o", "ranks_preload=slow_module")
    assert counts(job) == {"passed": 1}, job.out
