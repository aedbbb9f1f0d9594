"""PyTorch's own tests of torch.distributed.rpc, of its references, autograd and optimizers, over the backend MUSTER."""

from __future__ import annotations

from torch.distributed.rpc import backend_registry
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import GENERIC_TESTS, generate_tests

from peer.fork_server import use_fork_server


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


use_fork_server("torch.testing._internal.distributed.rpc_utils")
globals().update(generate_tests("TestMuster", MusterFixture, GENERIC_TESTS, __name__))
