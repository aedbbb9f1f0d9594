"""Runs a function in several processes that are workers of muster.rpc, and returns its results."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_processes

from muster import rpc
from muster.rpc import _agent, _serving

CALL_TIMEOUT = 60.0
_LONGEST_TEST = 110.0  # less than the timeout of run_workers()


def run_workers(
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    fixed: bool = True,
    over: str | None = None,
    lost: tuple[int, ...] = (),
    timeout: float = 120,
    **init: Any,
) -> list[Any]:
    """Runs body(rank, *arguments) in workers "w0", "w1" and so on, which then shut down together. Returns the results
    in the order of the ranks.

    fixed: the job has a world_size.
    over: the workers use a process group of this backend.
    lost: ranks that are expected to die without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = [(rank, size if fixed else None, f"{folder}/store") for rank in range(size)]
        return run_processes(_worker_main, own, (init, body, arguments, over and (over, size)), lost, timeout)


def _held() -> Counter[str]:
    """What this process holds: the kinds of its descriptors, shared memory, and threads by name."""
    held: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this directory
            held[f"descriptor of {str(descriptor.readlink()).partition(':[')[0]}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.startswith(("memfd:", "dev/shm/")) and "muster-arena" not in path:  # those of living peers stay mapped
            held[f"memory {path}"] += 1
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            held[f"thread {(task / 'comm').read_text().strip()}"] += 1
    return held


def _leaked(before: Counter[str]) -> Counter[str]:
    """What is held more than before. A thread that has just let the last reference go may still be at it."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        leaked = _held() - before
        if not leaked or time.monotonic() > deadline:
            return leaked
        time.sleep(0.01)  # tidy: allow(sleep) memory has no events


def _wait_for_no_references() -> None:
    """And for no contexts of autograd: other workers may still use theirs, or the messages that end them are on their
    way.
    """
    agent = _agent.current().agent
    deadline = time.monotonic() + _LONGEST_TEST
    while (left := (*agent.ref_counts(), agent.context_count())) != (0, 0, 0):
        assert time.monotonic() < deadline, f"references owned and held, and contexts, that are left: {left}"
        gc.collect()
        time.sleep(0.01)  # tidy: allow(sleep) references have no events


def _worker_main(
    rank: int,
    size: int | None,
    store: str,
    answer: Connection,
    init: dict[str, Any],
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    over: tuple[str, int] | None,
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("MUSTER_STORE", None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if over:
            dist.init_process_group(over[0], store=dist.FileStore(f"{store}.group"), rank=rank, world_size=over[1])
            init = {"backend": "process_group", **init}
        rpc.empty_shared(1)
        _serving._loop()
        before = _held()  # with those two, which a process keeps once it has used them
        options = rpc.Options(rpc_timeout=CALL_TIMEOUT, join_timeout=CALL_TIMEOUT)
        init = {"rpc_backend_options": options, **init}
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, store=dist.FileStore(store), **init)
        result = body(rank, *arguments)
        _wait_for_no_references()
        rpc.shutdown()
        if not over:  # the process group stays
            leaked = _leaked(before)
            assert not leaked, f"shutdown() left {sorted(leaked.elements())}"
        answer.send((None, pickle.dumps(result)))
    except BaseException:
        answer.send((traceback.format_exc(), None))
