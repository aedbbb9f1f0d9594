"""Runs one test at several ranks, from pytest's process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

import pytest
from muster.forkserver._client import memory_file

from muster import forkserver
from muster_pytest._job import Descriptor, Job, Result, Test

GRACE = 1.0  # seconds, for other ranks to fail after the first one, or to show where they are at the deadline
_STREAMS = ("stdout", "stderr")


class RankError(Exception):
    """A rank failed with an exception that cannot be pickled, ended without an answer, or was late."""


@dataclasses.dataclass
class Outcome:
    """Of all ranks together."""

    kind: str  # as of a Result
    reason: str = ""
    exception: BaseException | None = None
    longrepr: Any = None

    def raise_outcome(self) -> None:
        __tracebackhide__ = True
        if self.kind == "skipped":
            raise pytest.skip.Exception(self.reason, _use_item_location=True)
        if self.kind == "xfailed":
            pytest.xfail(self.reason)
        if self.kind == "failed":
            raise self.exception or RankError(self.reason)


def run(item: pytest.Function, size: int, backend: str, timeout: float) -> Outcome:
    """The output of each rank becomes a section of the test's report."""
    test = _describe(item)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(_captured(item, rank)) for rank in reversed(range(size))][::-1]
        ranks = stack.enter_context(contextlib.closing(_Ranks(timeout)))
        ranks.start(test, backend, outputs)
        ranks.collect()
        return ranks.outcome()


def _describe(item: pytest.Function) -> Test:
    config = item.config
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    for name, value in arguments.items():
        try:
            reduction.ForkingPickler.dumps(value)
        except Exception as error:
            pytest.fail(f"the value of {name!r} cannot be sent to the ranks: {type(error).__name__}: {error}", False)
    style = config.getoption("tbstyle")
    return Test(
        path=item.path,
        import_options={
            "mode": config.getoption("importmode"),
            "root": config.rootpath,
            "consider_namespace_packages": config.getini("consider_namespace_packages"),
        },
        names=[*(item.cls.__qualname__.split(".") if item.cls else []), item.originalname],
        arguments=arguments,
        python_files=config.getini("python_files"),
        repr_options={
            "style": "long" if style == "auto" else style,
            "showlocals": config.getoption("showlocals"),
            "funcargs": True,
            "abspath": Path.cwd() != config.invocation_params.dir,
            "truncate_locals": config.getoption("verbose") <= 1,
        },
    )


@contextlib.contextmanager
def _captured(item: pytest.Function, rank: int) -> Iterator[list[Descriptor]]:
    if item.config.getoption("capture") == "no":
        yield []
        return
    fds = [os.memfd_create(name) for name in _STREAMS]
    try:
        yield [Descriptor(fd) for fd in fds]
    finally:
        for name, fd in zip(_STREAMS, fds, strict=True):
            with open(fd, errors="replace") as file:
                file.seek(0)
                if text := file.read():
                    item.add_report_section("call", f"{name} of rank {rank}", text)


class _Ranks:
    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = 0.0
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._results: dict[int, Result] = {}  # in the order of arrival

    def start(self, test: Test, backend: str, outputs: list[list[Descriptor]]) -> None:
        context = forkserver.get_context()
        size = len(outputs)
        with memory_file() as store:
            for rank in range(size):
                pipe, answer = context.Pipe(duplex=False)
                self._pipes.append(pipe)
                with answer:
                    job = Job(rank, size, backend, self._timeout, Descriptor(store), outputs[rank])
                    process = context.Process(target=_main, args=(job, test, answer), name=f"rank {rank}")
                    process.start()
                    self._processes.append(process)
        # The start of the first process may have waited for the fork server's imports.
        self._deadline = time.monotonic() + self._timeout + GRACE

    def collect(self) -> None:
        """Waits for the results of all ranks until the deadline, or until shortly after the first failure."""
        deadline = self._deadline
        pending = dict(enumerate(self._pipes))
        while pending and (ready := connection.wait(pending.values(), max(0.0, deadline - time.monotonic()))):
            arrived = {rank: self._result(rank) for rank, pipe in pending.items() if pipe in ready}
            for rank in sorted(arrived, key=lambda rank: arrived[rank].at):
                del pending[rank]
                self._results[rank] = arrived[rank]
                if arrived[rank].kind == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE)

    def _result(self, rank: int) -> Result:
        with contextlib.suppress(EOFError, OSError):  # OSError: it ended while it wrote
            result: Result = pickle.loads(self._pipes[rank].recv_bytes())
            if result.kind != "passed":
                return result
        process = self._processes[rank]
        process.join(max(0.0, self._deadline - time.monotonic()))
        code = process.exitcode
        if code == 0:
            return Result("passed")
        how = "did not end after the test" if code is None else f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return Result("failed", how)

    def outcome(self) -> Outcome:
        missing = [rank for rank in range(len(self._pipes)) if rank not in self._results]
        failed = next((rank for rank, result in self._results.items() if result.kind == "failed"), None)
        if failed is not None:
            return self._failure(failed)
        if missing:
            names = ", ".join(map(str, missing))
            reason = f"the test did not end within {self._timeout:g} s at rank{'s' * (len(missing) > 1)} {names}"
            return Outcome("failed", reason, longrepr=self._with_others(reason, ""))
        for rank, result in sorted(self._results.items()):
            if result.kind != "passed":
                return Outcome(result.kind, f"{result.line} (rank {rank})")
        return Outcome("passed")

    def _failure(self, rank: int) -> Outcome:
        result = self._results[rank]
        exception = _unpickled(result.exception)
        reason = f"rank {rank} {result.line}" if result.longrepr is None else result.line
        title = f"rank {rank} failed first; the other ranks"
        if result.longrepr is None:
            return Outcome("failed", reason, exception, self._with_others(reason, "; the other ranks:", rank))
        if len(self._pipes) > 1:
            result.longrepr.addsection(title, self._others(rank))
        return Outcome("failed", reason, exception, result.longrepr)

    def _with_others(self, reason: str, join: str, but: int = -1) -> str:
        others = self._others(but)
        return f"{reason}{join}\n{others}" if others else reason

    def _others(self, but: int) -> str:
        lines = []
        for rank in range(len(self._pipes)):
            result = self._results.get(rank)
            line = "had not ended" if result is None else result.line if result.kind == "failed" else result.kind
            if rank != but:
                lines.append(f"rank {rank}: {line}")
        return "\n".join(lines)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(GRACE)


def _unpickled(data: bytes) -> BaseException | None:
    """None if there is none, or if only the rank can make it. The rank's report is shown in any case."""
    try:
        exception: BaseException = pickle.loads(data)
    except Exception:
        return None
    return exception


def _main(job: Job, test: Test, answer: connection.Connection) -> None:
    from muster_pytest import _rank  # only in the ranks: it changes how modules are imported

    _rank.main(job, test, answer)
