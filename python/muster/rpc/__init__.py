"""Remote calls: run functions in other processes of a job.

The names and the behavior are those of torch.distributed.rpc. What differs:

- Only these functions can be called: those of the program's own `__main__`, those marked with `@muster.rpc.export`,
  those in the list that allow() extends, and torch's functions, modules and optimizers. Nothing else is unpickled.
- Functions and futures work with asyncio: an `async def` may be called, and the result of rpc_async() awaited.
- A worker that dies fails the calls to it at once, and no others. shutdown() names it.
- Workers may come and go if init_rpc() is given no world_size.

Thread-safe, unless a function says otherwise.
"""

from __future__ import annotations

from typing import Any

from muster.rpc import autograd, functions, optim
from muster.rpc._agent import Options, WorkerInfo, get_worker_info, init_rpc, is_initialized, shutdown, workers
from muster.rpc._calls import rpc_async, rpc_one_way, rpc_sync
from muster.rpc._functions import allow, export
from muster.rpc._future import Future, collect_all, wait_all
from muster.rpc._remote_module import RemoteModule
from muster.rpc._rref import RRef, remote
from muster.rpc._shared import Alias, alias, empty_shared


def __getattr__(name: str) -> Any:
    """torch's names for options, so that a program which moves from torch.distributed.rpc keeps them."""
    if name not in ("BackendType", "TensorPipeRpcBackendOptions"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch.distributed.rpc

    return getattr(torch.distributed.rpc, name)


__all__ = [
    "Alias",
    "Future",
    "Options",
    "RRef",
    "RemoteModule",
    "WorkerInfo",
    "alias",
    "allow",
    "autograd",
    "collect_all",
    "empty_shared",
    "export",
    "functions",
    "get_worker_info",
    "init_rpc",
    "is_initialized",
    "optim",
    "remote",
    "rpc_async",
    "rpc_one_way",
    "rpc_sync",
    "shutdown",
    "wait_all",
    "workers",
]
