"""Runs a function in several processes that form a process group, and brings back what it returned or raised.

The processes are forked from one that has torch imported: a fresh interpreter for each would take seconds.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    backend: str = "muster",
    env: dict[str, str] | None = None,
    lost: tuple[int, ...] = (),
    timeout: float = 120,
) -> list[Any]:
    """body(rank, *arguments) in each rank, within an initialised process group; returns the results in rank order.

    Ranks in `lost` are expected to die without an answer: theirs is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers = [], []
        for rank in range(size):
            receiving, sending = _FORK.Pipe(duplex=False)
            worker = _FORK.Process(
                target=_rank_main, args=(rank, size, f"{folder}/store", backend, env or {}, sending, body, arguments)
            )
            worker.start()
            sending.close()
            pipes.append(receiving)
            workers.append(worker)
        try:
            results = [_answer(rank, pipe, rank in lost, timeout) for rank, pipe in enumerate(pipes)]
            deadline = time.monotonic() + timeout
            for rank, worker in enumerate(workers):
                worker.join(max(0.0, deadline - time.monotonic()))
                assert worker.exitcode is not None, f"rank {rank} answered but did not exit"
                assert rank in lost or worker.exitcode == 0, f"rank {rank} exited with {worker.exitcode}"
            return results
        finally:
            for worker in workers:
                if worker.exitcode is None:
                    worker.kill()
                worker.join()


def _answer(rank: int, pipe: multiprocessing.connection.Connection, lost: bool, timeout: float) -> Any:
    assert pipe.poll(timeout), f"rank {rank} did not answer within {timeout} s"
    try:
        failure, result = pipe.recv()
    except EOFError:
        assert lost, f"rank {rank} died"
        return None
    assert failure is None, f"rank {rank} failed:\n{failure}"
    return result


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
        answer.send((None, result))
    except BaseException:
        answer.send((traceback.format_exc(), None))
        raise
    finally:
        answer.close()
