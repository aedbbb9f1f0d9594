"""Runs a function in several processes that are workers of muster.rpc, and returns its results."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import forks
import torch
import torch.distributed as dist

from muster import rpc

CALL_TIMEOUT = 60.0


def run_workers(
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    fixed: bool = True,
    lost: tuple[int, ...] = (),
    timeout: float = 120,
    **init: Any,
) -> list[Any]:
    """Runs body(rank, *arguments) in workers "w0", "w1" and so on, which then shut down together. Returns the results
    in the order of the ranks.

    fixed: the job has a world_size.
    lost: ranks that are expected to die without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers = [], []
        for rank in range(size):
            receiving, sending = forks.CONTEXT.Pipe(duplex=False)
            where = (rank, size if fixed else None, f"{folder}/store")
            worker = forks.Process(target=_worker_main, args=(*where, sending, init, body, arguments))
            worker.start()
            sending.close()
            pipes.append(receiving)
            workers.append(worker)
        try:
            results = [_answer(rank, pipe, rank in lost, timeout) for rank, pipe in enumerate(pipes)]
            for rank, worker in enumerate(workers):
                worker.join(timeout)
                assert rank in lost or worker.exitcode == 0, f"worker {rank} exited with {worker.exitcode}"
            return results
        finally:
            for worker in workers:
                if worker.exitcode is None:
                    worker.kill()
                worker.join()


def _answer(rank: int, pipe: Connection, lost: bool, timeout: float) -> Any:
    assert pipe.poll(timeout), f"worker {rank} did not answer within {timeout} s"
    try:
        failure, result = pipe.recv()
    except EOFError:
        assert lost, f"worker {rank} died"
        return None
    assert failure is None, f"worker {rank} failed:\n{failure}"
    return pickle.loads(result)


def _worker_main(
    rank: int,
    size: int | None,
    store: str,
    answer: Connection,
    init: dict[str, Any],
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("MUSTER_STORE", None)
    try:
        options = rpc.Options(rpc_timeout=CALL_TIMEOUT, join_timeout=CALL_TIMEOUT)
        init = {"rpc_backend_options": options, **init}
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, store=dist.FileStore(store), **init)
        result = body(rank, *arguments)
        rpc.shutdown()
        answer.send((None, pickle.dumps(result)))
    except BaseException:
        answer.send((traceback.format_exc(), None))
