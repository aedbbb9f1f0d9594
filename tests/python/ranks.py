"""Runs a function in several processes that form a process group, and returns its results or raises its exceptions.

Functions and arguments are pickled: a process finds a function by its name in the module of the test.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import torch
import torch.distributed as dist


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    backend: str = "muster",
    env: dict[str, str] | None = None,
    lost: tuple[int, ...] = (),
    timeout: float = 120,
) -> list[Any]:
    """Runs body(rank, *arguments) at each rank, in an initialized process group. Returns the results in rank order.

    Ranks in `lost` are expected to die without an answer: their result is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments_of = [(rank, size, f"{folder}/store", backend, env or {}) for rank in range(size)]
        return run_processes(_rank_main, arguments_of, (body, arguments), lost, timeout)


def run_processes(
    main: Callable[..., None],
    own: list[tuple[Any, ...]],
    common: tuple[Any, ...],
    lost: tuple[int, ...] = (),
    timeout: float = 120,
) -> list[Any]:
    """Runs main(*own[rank], answer, *common) in a process for each rank. Returns what they answer, in rank order.

    main sends a pair to `answer`: a traceback or None, and the pickled result. The first failure is raised.
    """
    pipes, workers = [], []
    with tempfile.TemporaryDirectory() as stacks:
        for rank, arguments in enumerate(own):
            receiving, sending = forks.CONTEXT.Pipe(duplex=False)
            worker = forks.Process(target=_process_main, args=(f"{stacks}/{rank}", main, *arguments, sending, *common))
            worker.start()
            sending.close()
            pipes.append(receiving)
            workers.append(worker)
        try:
            results = _answers(pipes, workers, stacks, lost, timeout)
            deadline = time.monotonic() + timeout
            for rank, worker in enumerate(workers):
                worker.join(max(0.0, deadline - time.monotonic()))
                assert worker.exitcode is not None, (
                    f"rank {rank} answered but did not exit\n{_stacks(worker, stacks, rank)}"
                )
                assert rank in lost or worker.exitcode == 0, f"rank {rank} exited with {worker.exitcode}"
            return results
        finally:
            for worker in workers:
                if worker.exitcode is None:
                    worker.kill()
                worker.join()


def _process_main(stacks: str, main: Callable[..., None], *arguments: Any) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        for category in (DeprecationWarning, FutureWarning):  # as pyproject.toml has it for pytest's own process
            warnings.filterwarnings("error", category=category, module=r"muster(\.|$)")
        # An option that the test gives to DistributedDataParallel; torch's line of code is ours.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        main(*arguments)
        faulthandler.unregister(signal.SIGUSR1)


def _stacks(worker: Any, folder: str, rank: int) -> str:
    """Where the threads of a rank are now."""
    os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(1)  # tidy: allow(sleep) nothing tells that the stacks are written
    return f"rank {rank} is here:\n{Path(folder, str(rank)).read_text()}"


def _answers(
    pipes: list[multiprocessing.connection.Connection],
    workers: list[Any],
    stacks: str,
    lost: tuple[int, ...],
    timeout: float,
) -> list[Any]:
    """What the ranks answer, in rank order. Raises the first failure, or shows where ranks hang.

    stacks: a folder where each rank writes the stacks of its threads.
    """
    results: list[Any] = [None] * len(pipes)
    pending = dict(enumerate(pipes))
    deadline = time.monotonic() + timeout
    while pending:
        ready = multiprocessing.connection.wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            where = "\n".join(_stacks(workers[rank], stacks, rank) for rank in pending)
            raise AssertionError(f"ranks {list(pending)} did not answer within {timeout} s\n{where}")
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            results[rank] = _answer(rank, pending.pop(rank), rank in lost)
    return results


class RankPool:
    """Ranks that live for many small tests: run() calls a function at all of them and returns the results in rank
    order. A failure at a rank ends all ranks, and the next run() starts new ones.
    """

    def __init__(self, size: int, timeout: float = 120) -> None:
        self.size, self._timeout = size, timeout
        self._workers: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []

    def run(self, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs body(rank, *arguments) at each rank. Returns the results in rank order."""
        if not self._workers:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((body, arguments))
            return _answers(self._pipes, self._workers, self._folder.name, (), self._timeout)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for worker in self._workers:
            worker.join(self._timeout)
        self._end()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, its = forks.CONTEXT.Pipe()
            arguments = (rank, self.size, f"{self._folder.name}/store", its)
            stacks = f"{self._folder.name}/{rank}"
            self._workers.append(forks.Process(target=_process_main, args=(stacks, _pool_main, *arguments)))
            self._workers[-1].start()
            its.close()
            self._pipes.append(ours)

    def _end(self) -> None:
        for worker in self._workers:
            if worker.exitcode is None:
                worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        self._folder.cleanup()


def _pool_main(rank: int, size: int, store: str, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=100)  # shorter than run()'s wait for the answer, so that the answer names the late rank
    dist.init_process_group("muster", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
    while (job := pipe.recv()) is not None:
        body, arguments = job
        try:
            pipe.send((None, pickle.dumps(body(rank, *arguments))))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def _answer(rank: int, pipe: multiprocessing.connection.Connection, lost: bool) -> Any:
    try:
        failure, result = pipe.recv()
    except EOFError:
        assert lost, f"rank {rank} died"
        return None
    assert failure is None, f"rank {rank} failed:\n{failure}"
    return pickle.loads(result) if result is not None else None


def _rank_main(
    rank: int,
    size: int,
    store: str,
    backend: str,
    env: dict[str, str],
    answer: multiprocessing.connection.Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **env})
    dist.set_debug_level_from_env()
    try:
        dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
        result = body(rank, *arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        # Pickled here, because the pipe itself would send tensors as shared memory of a process that is about to end.
        answer.send((None, pickle.dumps(result)))
    except BaseException:
        answer.send((traceback.format_exc(), None))
        raise
    finally:
        answer.close()
