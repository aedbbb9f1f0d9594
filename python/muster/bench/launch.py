"""Start and restart of a job's workers on this host, compared with torchrun."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from muster._programs import find_program
from muster.bench.report import BenchFailedError, Row
from muster.bench.timing import in_rounds

SUMMARY = "from the command to the workers' first barrier, and from a killed worker to the next, against torchrun"
PEERS: tuple[str, ...] = ("torchrun",)

# Each worker writes the time when it passed the barrier (CLOCK_MONOTONIC), its pid, and its share of memory.
WORKER = """
import os, signal, sys, time
import torch.distributed as dist
backend, folder, stay = sys.argv[1:]
dist.init_process_group(backend)
dist.barrier()
passed = time.monotonic()
with open('/proc/self/smaps_rollup') as file:
    pss = next(int(line.split()[1]) for line in file if line.startswith('Pss:'))
name = f"{folder}/{os.environ['TORCHELASTIC_RESTART_COUNT']}.{dist.get_rank()}"
with open(name + '.new', 'w') as file:
    file.write(f'{passed} {os.getpid()} {pss}')
os.rename(name + '.new', name)
while stay == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
    signal.pause()
dist.barrier()
dist.destroy_process_group()
"""

IMPORT = [sys.executable, "-c", "import torch"]
FORKS = """
import gc, os, sys, time, torch
gc.freeze()
begin = time.monotonic()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0: os._exit(0)
for _ in range(int(sys.argv[1])): os.wait()
print(time.monotonic() - begin)
"""


_END_TIMEOUT = 60  # seconds, for a launcher that ends its workers


@dataclass
class Variant:
    """One launcher with its options."""

    command: list[str]
    backend: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Passed:
    """A worker at its first barrier."""

    at: float
    pid: int
    pss: float  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=8, help="processes on this host (default: %(default)s)")
    parser.add_argument("--repeats", type=int, help="of each, in turn; the median counts (default: 5, --quick: 1)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each case."""
    if arguments.workers < 2:
        raise ValueError("--workers takes a number from 2 on")
    if arguments.repeats is not None and arguments.repeats < 1:
        raise ValueError(f"--repeats takes a number from 1 on; not {arguments.repeats}")
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        # Does not use the user's warm zygote. The path of a socket must be short, whatever TMPDIR is.
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-", dir="/tmp"))
        bench = Launching(folder, Path(runtime), arguments.workers, arguments.timeout)
        stack.enter_context(bench.warmed())
        yield from _starts(bench, repeats)
        yield from _restarts(bench, repeats)


def _starts(bench: Launching, repeats: int) -> Iterator[Row]:
    jobs = in_rounds({name: partial(bench.start, variant) for name, variant in bench.variants.items()}, repeats)
    median, share = {}, {}
    for name, runs in jobs.items():
        median[name] = statistics.median(max(worker.at for worker in workers) - begin for begin, workers in runs)
        share[name] = (
            statistics.median(statistics.mean(worker.pss for worker in workers) for _, workers in runs) / 2**20
        )
    floors = {"zygote": bench.import_time(), "spawn": bench.import_time(), "warm": bench.fork_time()}
    for name, shown in (("zygote", "cold"), ("warm", "muster warm"), ("spawn", "--start-method spawn")):
        yield bench.row(
            f"command to first barrier, {shown}", "time", "s", median[name], median["torchrun"], floors[name]
        )
    for name, shown in (("zygote", "forked"), ("spawn", "--start-method spawn")):
        yield bench.row(f"memory of a worker, {shown}", "PSS", "MiB", share[name], share["torchrun"], 0)


def _restarts(bench: Launching, repeats: int) -> Iterator[Row]:
    restarts = {name: partial(bench.restart, bench.variants[name]) for name in ("torchrun", "zygote")}
    peer, muster = (statistics.median(times) for times in in_rounds(restarts, repeats).values())
    yield bench.row("SIGKILL of one worker to next barrier", "time", "s", muster, peer, bench.fork_time())


class Launching:
    def __init__(self, folder: Path, runtime: Path, workers: int, timeout: float):
        self._folder = folder
        self._workers = workers
        self._timeout = timeout
        self._script = folder / "worker.py"
        self._script.write_text(WORKER)
        muster = find_program("muster")
        self._muster = muster
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "MUSTER_PYTHON": sys.executable}
        own = [muster, "run", f"--nproc-per-node={workers}"]
        self.variants = {
            "torchrun": Variant(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"],
                "gloo",
                {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            ),
            "zygote": Variant([*own, "--no-warm"], "muster"),
            "warm": Variant(own, "muster"),
            "spawn": Variant([*own, "--start-method=spawn"], "muster"),
        }

    def row(self, case: str, metric: str, unit: str, muster: float, peer: float, floor: float) -> Row:
        return Row("launch", case, self._workers, metric, unit, muster, peer, "torchrun", floor)

    @contextlib.contextmanager
    def warmed(self) -> Iterator[None]:
        self._call([self._muster, "warm"])
        try:
            yield
        finally:
            self._call([self._muster, "warm", "stop"])

    def import_time(self) -> float:
        """Returns the seconds of one `import torch`, the floor of a cold start."""
        begin = time.monotonic()
        self._call(IMPORT)
        return time.monotonic() - begin

    def fork_time(self) -> float:
        """Returns the seconds that a process with torch needs to fork as many times as there are workers."""
        return float(self._call([sys.executable, "-c", FORKS, str(self._workers)]))

    def start(self, variant: Variant) -> tuple[float, list[Passed]]:
        """Returns the time of the command, and the workers at their first barrier."""
        with self._job(variant, [], stay=False) as (begin, process, folder):
            workers = self._await(process, folder, restarts=0)
        return begin, workers

    def restart(self, variant: Variant) -> float:
        """Returns the seconds from the kill of one worker to the next barrier of all workers."""
        with self._job(variant, ["--max-restarts=1"], stay=True) as (_, process, folder):
            workers = self._await(process, folder, restarts=0)
            begin = time.monotonic()
            os.kill(workers[1].pid, signal.SIGKILL)
            again = self._await(process, folder, restarts=1)
        return max(worker.at for worker in again) - begin

    @contextlib.contextmanager
    def _job(
        self, variant: Variant, options: list[str], stay: bool
    ) -> Iterator[tuple[float, subprocess.Popen[bytes], Path]]:
        """Yields the time of the command, and the job, which must end after the block."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        words = [*variant.command, *options, str(self._script), variant.backend, str(folder), str(int(stay))]
        environment = {**self._environment, **variant.environment}
        with open(folder / "log", "wb") as log:
            begin = time.monotonic()
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield begin, process, folder
            self._finish(process, folder)
        finally:
            _end(process)

    def _await(self, process: subprocess.Popen[bytes], folder: Path, restarts: int) -> list[Passed]:
        deadline = time.monotonic() + self._timeout
        files = [folder / f"{restarts}.{rank}" for rank in range(self._workers)]
        while not all(file.exists() for file in files):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
                if not all(file.exists() for file in files):
                    raise BenchFailedError(f"{process.args!r} ended too early:\n{_tail(folder)}")
            if time.monotonic() > deadline:
                raise BenchFailedError(f"no barrier in time with {process.args!r}:\n{_tail(folder)}")
        found = []
        for file in files:
            at, pid, pss = file.read_text().split()
            found.append(Passed(float(at), int(pid), float(pss) * 1024))
        return found

    def _finish(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        try:
            status = process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            raise BenchFailedError(f"{process.args!r} did not end in time:\n{_tail(folder)}") from None
        if status != 0:
            raise BenchFailedError(f"{process.args!r} ended with status {status}:\n{_tail(folder)}")

    def _call(self, words: list[str]) -> str:
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True, timeout=self._timeout)
        if done.returncode != 0:
            raise BenchFailedError(f"{words!r} failed:\n{done.stderr}")
        return done.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(folder: Path) -> str:
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-15:])
