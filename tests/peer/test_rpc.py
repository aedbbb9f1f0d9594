"""PyTorch's own tests of torch.distributed.rpc, of its references, autograd and optimizers, over the backend MUSTER."""

from __future__ import annotations

import contextlib

from muster.forkserver._client import ForkServerError
from torch.distributed.rpc import backend_registry
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import GENERIC_TESTS, generate_tests

from muster import forkserver


class MusterFixture(RpcAgentTestFixture):
    @property
    def rpc_backend(self) -> object:
        return backend_registry.BackendType["MUSTER"]

    @property
    def rpc_backend_options(self) -> object:
        return backend_registry.construct_rpc_backend_options(
            self.rpc_backend, init_method=self.init_method, num_worker_threads=8
        )

    def get_shutdown_error_regex(self) -> str:
        return "peer lost|was shut down|has left"

    def get_timeout_error_regex(self) -> str:
        return "RPC ran for more than"


def _start(self: common_distributed.MultiProcessTestCase) -> None:
    """Four processes that import torch take seconds, for each test."""
    self._start_processes(forkserver.get_context().Process)


common_distributed.MultiProcessTestCase._spawn_processes = _start  # type: ignore[method-assign]
with contextlib.suppress(ForkServerError):  # it runs already
    forkserver.preload("torch.testing._internal.distributed.rpc_utils")
globals().update(generate_tests("TestMuster", MusterFixture, GENERIC_TESTS, __name__))
