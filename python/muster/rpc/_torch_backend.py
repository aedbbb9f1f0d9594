"""The backend MUSTER of torch.distributed.rpc: init_rpc(..., backend=torch.distributed.rpc.BackendType.MUSTER).

Calls, references, distributed autograd and optimizers are torch's own. Their messages travel through muster's links.
torch pickles functions and arguments, so each worker can run any code in any other one, as with TensorPipe. Naming the
backend is the consent. The workers prove to each other that they belong to the job.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed.rpc as torch_rpc
from torch.distributed import Store
from torch.distributed.rpc import api, constants

from muster.rpc._agent import options_of

_log = logging.getLogger("muster.rpc")


class Options(torch_rpc.RpcBackendOptions):
    """The options of the backend. num_worker_threads: functions that run at a time."""

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads


def options(rpc_timeout: float, init_method: str, **others: Any) -> Options:
    return Options(rpc_timeout, init_method, others.get("num_worker_threads", constants.DEFAULT_NUM_WORKER_THREADS))


def start(store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: object) -> Any:
    from muster import _C

    if not isinstance(rpc_backend_options, (Options, torch_rpc.TensorPipeRpcBackendOptions)):
        raise TypeError(f"the RPC backend MUSTER takes no {type(rpc_backend_options).__qualname__}")
    given = options_of(rpc_backend_options)  # TensorPipe's, too, so that a program changes in one place
    if not world_size:
        raise ValueError("the RPC backend MUSTER needs a world_size; muster.rpc itself does not")
    _log.warning("torch.distributed.rpc unpickles all that arrives, so the workers of this job can run any code here")
    store.set(f"name/{rank}", name)
    names = [store.get(f"name/{each}").decode() for each in range(world_size)]
    if len(set(names)) != world_size:
        raise RuntimeError(f"a name of a worker is not unique: the workers, by rank, are {names}")
    agent: Any = _C.torch_rpc_agent(store, name, rank, names, given.rpc_timeout, given.num_worker_threads)
    api._init_rpc_states(agent)
    agent.sync()
    return agent
