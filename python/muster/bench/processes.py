"""muster bench processes: the start of processes that have torch imported, and of a pytest test at several ranks."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from muster import forkserver
from muster.bench.report import BenchFailedError, Row
from muster.bench.timing import in_rounds

SUMMARY = "processes with torch imported: muster.forkserver beside multiprocessing's spawn and forkserver"
PEERS: tuple[str, ...] = ("spawn",)

_METHODS = ("muster", "spawn", "forkserver")
_TESTS = """
import json, sys, time
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

def body(rank, size, path):
    dist.init_process_group("muster", store=dist.FileStore(path, size), rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()

@pytest.mark.ranks(@SIZE@)
@pytest.mark.parametrize("number", range(@REPEATS@ + 1))
def test_ranks(number):
    dist.barrier()

@pytest.mark.parametrize("number", range(@REPEATS@))
def test_spawn(number, tmp_path):
    mp.spawn(body, (@SIZE@, str(tmp_path / "store")), nprocs=@SIZE@)
"""
_CONFTEST = """
import json
seconds = {}
def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        seconds.setdefault(report.location[2].partition("[")[0], []).append(report.duration)
def pytest_sessionfinish():
    with open("seconds.json", "w") as file:
        json.dump(seconds, file)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=8, help="started at once (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="of the pytest test (default: %(default)s)")
    parser.add_argument("--repeats", type=int, help="of each, in turn; the median counts (default: 5, --quick: 1)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    if min(arguments.processes, arguments.ranks, repeats) < 1:
        raise ValueError("--processes, --ranks and --repeats take numbers from 1 on")
    starts = {method: partial(_measure, method, arguments.processes, arguments.timeout) for method in _METHODS}
    rounds = in_rounds(starts, repeats)
    for index, case in enumerate(("first start of all processes", "start of all processes")):
        median = {method: statistics.median(times[index] for times in rounds[method]) for method in _METHODS}
        also = {"forkserver": median["forkserver"]}
        yield Row(
            "processes", case, arguments.processes, "time", "s", median["muster"], median["spawn"], "spawn", also=also
        )
    muster, peer = _time_tests(arguments.ranks, repeats, arguments.timeout)
    yield Row("processes", "pytest test, with a barrier", arguments.ranks, "time", "s", muster, peer, "spawn")


def _measure(method: str, count: int, timeout: float) -> tuple[float, float]:
    """Runs print_starts() in a new process."""
    code = f"from muster.bench.processes import print_starts; print_starts({method!r}, {count})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise BenchFailedError(f"processes of {method!r} failed:\n{done.stderr}")
    first, again = map(float, done.stdout.split())
    return first, again


def print_starts(method: str, count: int) -> None:
    """Prints the seconds until all processes have imported torch: of the first ones, and of the next ones."""
    if method == "muster":
        forkserver.preload(__name__)
    elif method == "forkserver":
        multiprocessing.get_context(method).set_forkserver_preload([__name__, "torch"])
    print(*(_start(method, count) for _ in range(2)))


def _start(method: str, count: int) -> float:
    context = multiprocessing.get_context(method)
    begin = time.monotonic()
    started = []
    for _ in range(count):
        receiving, sending = context.Pipe(duplex=False)
        with sending:
            process = context.Process(target=_report, args=(sending,))  # type: ignore[attr-defined]
            process.start()
            started.append((process, receiving))
    for _, receiving in started:
        receiving.recv_bytes()
    taken = time.monotonic() - begin
    for process, _ in started:
        process.join()
    return taken


def _report(sending: Connection) -> None:
    import torch

    torch.ones(1)
    sending.send_bytes(b"ready")


def _time_tests(size: int, repeats: int, timeout: float) -> tuple[float, float]:
    """Returns the seconds of a test at `size` ranks, without the first one, and of one that calls mp.spawn()."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        (folder / "pytest.ini").touch()
        (folder / "conftest.py").write_text(_CONFTEST)
        tests = _TESTS.replace("@SIZE@", str(size)).replace("@REPEATS@", str(repeats))
        (folder / "test_bench.py").write_text(tests)
        words = [sys.executable, "-m", "pytest", "-q", "-p", "muster_pytest", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            raise BenchFailedError(f"pytest failed:\n{done.stdout}{done.stderr}")
        seconds = json.loads((folder / "seconds.json").read_text())
    return statistics.median(seconds["test_ranks"][1:]), statistics.median(seconds["test_spawn"])
