"""Jobs of muster-collective-load over muster and over MPIs: processes that measure on request."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from muster._programs import find_program
from muster.bench.report import BenchFailedError

PROGRAM = "muster-collective-load"
MPIS = ("openmpi", "mpich")
# The changes of muster's own jobs to their environment.
OWN: dict[str, dict[str, str]] = {"muster": {}, "unrecorded": {"MUSTER_RECORDER": "0"}}


def available(mpi: str) -> bool:
    """True if the program for this MPI was built and mpirun exists."""
    with contextlib.suppress(FileNotFoundError):
        return shutil.which(f"mpirun.{mpi}") is not None and find_program(f"{PROGRAM}-{mpi}") != ""
    return False


class Job:
    """The ranks of one job. They block in read() between requests."""

    def __init__(self, name: str, ranks: int, folder: Path, timeout: float) -> None:
        self.name, self.ranks = name, ranks
        self._folder, self._timeout = folder, timeout
        self.processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[socket.socket] = []
        self._log = (folder / f"{name}.log").open("wb")

    def start(self) -> None:
        path = str(self._folder / self.name)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(self.ranks)
            listener.settimeout(0.2)
            environment = {**os.environ, **OWN.get(self.name, {})}
            for command in self._commands(path):
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment
                    )
                )
            deadline = time.monotonic() + self._timeout
            while len(self._controls) < self.ranks:
                with contextlib.suppress(TimeoutError):
                    self._controls.append(listener.accept()[0])
                    self._controls[-1].settimeout(self._timeout)
                    continue
                if time.monotonic() > deadline or any(process.poll() for process in self.processes):
                    raise BenchFailedError(f"{self.name} does not start: {self._last_output()}")
        self._lines: list[Callable[[], bytes]] = [control.makefile("rb").readline for control in self._controls]
        self._answers()

    def ask(self, *words: object) -> list[str]:
        """Returns the answers of the ranks, in any order."""
        line = " ".join(map(str, words)).encode() + b"\n"
        try:
            for control in self._controls:
                control.sendall(line)
            return self._answers()
        except OSError as error:
            raise BenchFailedError(
                f"{self.name}: {' '.join(map(str, words))}: {error}; {self._last_output()}"
            ) from None

    def time(self, verb: str, op: str, size: int, count: int, repeats: int) -> float:
        """Returns the seconds of the slowest rank."""
        return max(map(float, self.ask(verb, op, size, repeats, count, "-")))

    def close(self) -> None:
        """Ends all processes: a rank exits when its control socket closes, and mpirun with its ranks."""
        for control in self._controls:
            control.shutdown(socket.SHUT_RDWR)
            control.close()
        for process in self.processes:
            for ending in (None, signal.SIGTERM, signal.SIGKILL):
                if ending is not None:
                    process.send_signal(ending)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                    break
        self._log.close()

    def _answers(self) -> list[str]:
        answers = [line().decode().strip() for line in self._lines]
        if not all(answers):
            raise BenchFailedError(f"{self.name} ended: {self._last_output()}")
        return answers

    def _commands(self, path: str) -> list[list[str]]:
        if self.name in OWN:
            program, store = find_program(PROGRAM), f"file://{self._folder}/{self.name}.store"
            return [[program, path, str(rank), str(self.ranks), store] for rank in range(self.ranks)]
        command = [f"mpirun.{self.name}", "-n", str(self.ranks), "-bind-to", "none"]  # the ranks bind themselves
        if self.name == "openmpi":
            command.append("--oversubscribe")
            command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [[*command, find_program(f"{PROGRAM}-{self.name}"), path]]

    def _last_output(self) -> str:
        self._log.flush()
        text = (self._folder / f"{self.name}.log").read_text(errors="replace")
        return (text.strip().splitlines() or ["it printed nothing"])[-1]


@contextlib.contextmanager
def running(names: list[str], ranks: int, folder: Path, timeout: float) -> Iterator[dict[str, Job]]:
    jobs = {name: Job(name, ranks, folder, timeout) for name in names}
    try:
        for job in jobs.values():
            job.start()
        yield jobs
    finally:
        for job in jobs.values():
            job.close()
