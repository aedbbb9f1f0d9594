"""Runs one benchmark in several processes and yields the results of rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.bench.report import BenchFailedError

_TO_WRITE = 1.0  # seconds
_MOST_SHOWN = 20_000  # characters of a rank's log


@dataclass
class RankSetup:
    """Where a rank runs: the prefix of its command, and its changes to the environment."""

    prefix: list[str] = field(default_factory=list)
    # Loopback, for peers that would otherwise use the host name.
    environment: dict[str, str] = field(default_factory=lambda: {"GLOO_SOCKET_IFNAME": "lo"})


def run_ranks(
    module: str,
    setups: list[RankSetup],
    parameters: dict[str, Any],
    timeout: float,
    load: int = 0,
) -> Iterator[dict[str, Any]]:
    """Starts a muster.bench.worker for each of `setups` and yields the results of rank 0. Leaves no process behind.

    module: of muster.bench; it has a function measure().
    timeout: in seconds, for the whole benchmark. load: the number of busy processes that run in the background.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder, contextlib.ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        workers: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, workers)
        busy: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, busy)
        try:
            for _ in range(load):
                busy.append(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
            for rank, setup in enumerate(setups):
                log = stack.enter_context(open(_log(folder, rank), "wb"))
                workers.append(_start(setup, module, rank, len(setups), folder, parameters, writing, log))
        finally:
            os.close(writing)
        for line in _lines(reading, workers, folder, deadline):
            yield json.loads(line)
        _join(workers, folder, deadline)


def _lines(reading: int, workers: list[subprocess.Popen[bytes]], folder: str, deadline: float) -> Iterator[bytes]:
    """Yields the lines of rank 0 until it closes the pipe. Raises when a rank fails, and at the deadline."""
    buffer = b""
    while True:
        if time.monotonic() > deadline:
            raise BenchFailedError(_late(workers, folder))
        if not select.select([reading], [], [], 0.2)[0]:
            for rank, worker in enumerate(workers):
                if worker.poll():
                    raise BenchFailedError(_report(rank, worker, folder))
            continue
        chunk = os.read(reading, 65536)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines


def _start(
    setup: RankSetup, module: str, rank: int, ranks: int, folder: str, parameters: dict[str, Any], report: int, log: Any
) -> subprocess.Popen[bytes]:
    command = [*setup.prefix, sys.executable, "-m", "muster.bench.worker", module, str(rank), str(ranks), folder]
    command += [json.dumps(parameters), str(report) if rank == 0 else "-1"]
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ) | setup.environment
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=[report] if rank == 0 else []
    )


def _log(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.log"


def _join(workers: list[subprocess.Popen[bytes]], folder: str, deadline: float) -> None:
    for rank, worker in enumerate(workers):
        try:
            status = worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise BenchFailedError(f"rank {rank} did not end in time; use a longer --timeout") from None
        if status != 0:
            raise BenchFailedError(_report(rank, worker, folder))


def _report(rank: int, worker: subprocess.Popen[bytes], folder: str) -> str:
    tail = "\n".join(_log(folder, rank).read_text(errors="replace").splitlines()[-15:])
    return f"rank {rank} ended with status {worker.returncode}:\n{tail}"


def _late(workers: list[subprocess.Popen[bytes]], folder: str) -> str:
    """Where each rank is now. A worker writes the stacks of its threads to its log when it gets SIGUSR1."""
    for worker in workers:
        worker.send_signal(signal.SIGUSR1)
    time.sleep(_TO_WRITE)  # tidy: allow(sleep) nothing tells when a log is complete
    stacks = [
        f"rank {rank}:\n{_log(folder, rank).read_text(errors='replace')[-_MOST_SHOWN:]}" for rank in range(len(workers))
    ]
    return "\n".join(["rank 0 has not reported all results in time; use a longer --timeout", *stacks])


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
    for worker in workers:
        worker.wait()
