"""PyTorch's own tests of torch.distributed.rpc, of its references, autograd and optimizers, over muster.rpc itself.

test_rpc.py runs the same tests over torch's API, with muster's messages below it. The tests of TorchScript are left
out: muster.rpc calls Python functions, C++ functions and torch's operators.
"""

from __future__ import annotations

from typing import Any

from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import generate_tests

from muster import rpc
from peer import native_rpc
from peer.fork_server import use_fork_server

CLASSES = [
    "RpcTest",
    "TensorPipeAgentRpcTest",
    "ParameterServerTest",
    "DistAutogradTest",
    "TensorPipeAgentDistAutogradTest",
    "DistOptimizerTest",
    "RemoteModuleTest",
    "ThreeWorkersRemoteModuleTest",
    "DdpUnderDistAutogradTest",
    "DdpComparisonTest",
    "ReinforcementLearningRpcTest",
]


class NativeFixture(RpcAgentTestFixture):
    @property
    def rpc_backend(self) -> str:
        return "muster"

    @property
    def rpc_backend_options(self) -> rpc.Options:
        return rpc.Options(init_method=self.init_method, num_worker_threads=8)

    def get_shutdown_error_regex(self) -> str:
        return "peer lost|was shut down|has left"

    def get_timeout_error_regex(self) -> str:
        return "timeout: "


use_fork_server("torch.testing._internal.distributed.rpc_utils")
_modules = native_rpc.load()
_found: dict[str, Any] = {
    name: getattr(module, name) for module in _modules for name in CLASSES if name in vars(module)
}
globals().update(generate_tests("TestMuster", NativeFixture, [_found[name] for name in CLASSES], __name__))
