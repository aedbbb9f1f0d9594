"""Loads PyTorch's own tests of torch.distributed.rpc with muster.rpc in its place.

load() makes copies of torch's test modules. RULES are replacements in their source, by text: names of torch.distributed
become those of muster.rpc, or of this module. A rule that no longer finds its place fails. The rest of this module is
what the tests import as `rpc` and `dist_autograd`: all names of muster.rpc, and those private names of torch that have
a counterpart here. A test that uses another private name fails with AttributeError, and is in skipped_rpc_native.txt.
"""

from __future__ import annotations

import types
from typing import Any

from torch.distributed import rpc as torch_rpc

from muster import rpc
from muster.rpc import _agent, autograd
from peer.torch_source import load_copy

TORCH = "torch.testing._internal."
RPC = "import torch.distributed.rpc as rpc"
AUTOGRAD = "import torch.distributed.autograd as dist_autograd"
UTILS = "from torch.testing._internal.dist_utils import"
OURS = {
    RPC: "import peer.native_rpc as rpc",
    AUTOGRAD: "from peer.native_rpc import dist_autograd",
    UTILS: "from peer.native_dist_utils import",
}
FUTURES = {"torch.futures.wait_all(": "rpc.wait_all("}

# Replacements, by the module's name. The copy of torch.testing._internal.dist_utils is peer.native_dist_utils.
RULES: dict[str, dict[str, str]] = {
    "dist_utils": {RPC: OURS[RPC]},
    "distributed.rpc.rpc_test": {
        **OURS,
        **FUTURES,
        "from torch.distributed.rpc import (": "from peer.native_rpc import (",
        "torch.futures.collect_all(": "rpc.collect_all(",
        # Private ways to the same values.
        "rpc.api._get_current_rpc_agent().get_worker_infos()": "rpc.workers()",
        "rpc._get_current_rpc_agent().get_worker_infos()": "rpc.workers()",
        "rpc.api.get_worker_info()": "rpc.get_worker_info()",
        # An error of remote() is raised by to_here(), not by remote().
        "rref.remote().non_exist()": "rref.remote().non_exist().to_here()",
        "result._get_future().wait()": "result.to_here()",
        'in ["rpc_sync", "rpc_async", "remote"]:': 'in ["rpc_sync", "rpc_async"]:',
        # Classes and texts of errors.
        'RuntimeError, "could not find destination"': 'LookupError, "no worker has the name"',
        "(RuntimeError, expected_reinit_err)": "(ValueError, expected_reinit_err)",
        '"is already initialized"': '"already: call shutdown"',
        '"^RPC has not been initialized"': '"this process is not a worker"',
        '"Current RPC agent is not set! Did you initialize the RPC framework"': '"this process is not a worker"',
        '"Original exception on remote side was" in msg': '"foo" in msg',
        'RuntimeError, "Can not pickle rref in python pickler"': 'TypeError, "can only be pickled by muster.rpc"',
        'RuntimeError, "my\\\\_function\\\\(\\\\) missing': 'TypeError, "my\\\\_function\\\\(\\\\) missing',
        'RuntimeError, "unsupported operand': 'TypeError, "unsupported operand',
        '"Future can only be marked completed once"': '"is set by its worker"',
        '"incompatible function arguments."': '"must be callable"',
        'RuntimeError, "RPC pickler does not serialize"': 'AttributeError, "has no attribute .foo_add."',
        "  with self.assertRaisesRegex(RuntimeError, errMsg)": "  with self.assertRaisesRegex(TypeError, errMsg)",
        '"Functions decorated with @rpc\\\\.async_function must return a "': '"is marked with async_execution, "',
        '"torch\\\\.futures\\\\.Future object,"': '"but returned Tensor"',
        'RuntimeError,\n            "Overloaded torch operator invoked from Python failed to match any schema"': (
            'TypeError,\n            "received an invalid combination of arguments"'
        ),
    },
    "distributed.rpc.dist_autograd_test": {
        **OURS,  # its RRef is in the signature of a TorchScript function only
        **FUTURES,
        # Texts of errors. An error in a backward pass keeps its class.
        '"Already have an autograd context id for this thread"': '"contexts cannot be nested"',
        'f"Could not find autograd context with id: {context_id}"': 'f"context {context_id} of distributed autograd"',
        'RuntimeError, "Error on Node [0-9]+: Simulate error': 'Exception, "Simulate error',
        'RuntimeError, "Simulate error on': 'Exception, "Simulate error on',
    },
    "distributed.rpc.dist_optimizer_test": {
        **OURS,
        "from torch.distributed.optim import": "from muster.rpc.optim import",
    },
    "distributed.nn.api.remote_module_test": {
        RPC: OURS[RPC],
        "import torch.testing._internal.dist_utils as": "import peer.native_dist_utils as",
        "from torch.distributed.nn import RemoteModule": "from muster.rpc import RemoteModule",
        # Without modules of TorchScript.
        "modes = ModuleCreationMode.__members__.values()": "modes = [ModuleCreationMode.MODULE_CTOR]",
        # Classes and texts of errors.
        r'r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Module>,"': (
            '"module_cls must make a torch.nn.Module"'
        ),
        'RuntimeError,\n                    "Cannot pickle RemoteModule in python pickler. RemoteModule can only be ': (
            'TypeError,\n                    "can only be pickled by muster.rpc"  # "'
        ),
    },
    "distributed.ddp_under_dist_autograd_test": {
        AUTOGRAD: OURS[AUTOGRAD],
        UTILS: OURS[UTILS],
        "from torch.distributed import rpc": OURS[RPC],
        "from torch.distributed.nn import RemoteModule": "from muster.rpc import RemoteModule",
    },
    "distributed.rpc.examples.parameter_server_test": {RPC: OURS[RPC], UTILS: OURS[UTILS], **FUTURES},
    "distributed.rpc.examples.reinforcement_learning_rpc_test": {
        RPC: OURS[RPC],
        UTILS: OURS[UTILS],
        "from torch.distributed.rpc import": "from muster.rpc import",
    },
}


def load() -> list[types.ModuleType]:
    """The copies, in the order of RULES. The copy of torch's `...a_test` is peer.native_a_test."""
    return [
        load_copy(TORCH + name, "peer.native_" + name.rpartition(".")[2], rules, __file__)
        for name, rules in RULES.items()
    ]


# ---- what the tests import as `rpc`

globals().update({name: getattr(rpc, name) for name in rpc.__all__})
constants = torch_rpc.constants
RpcBackendOptions = torch_rpc.RpcBackendOptions
TensorPipeRpcBackendOptions = torch_rpc.TensorPipeRpcBackendOptions
# The tests that call these are skipped.
_get_debug_info = torch_rpc._get_debug_info
_rref_context_get_debug_info = torch_rpc._rref_context_get_debug_info


def init_rpc(*args: Any, **kwargs: Any) -> None:
    """The tests send methods of objects, and functions and classes of their modules."""
    rpc.init_rpc(*args, **kwargs, allow_pickle=True)


def get_rpc_timeout() -> float:
    return _agent.current().timeout


def _set_rpc_timeout(timeout: float) -> None:
    """muster.rpc takes the default timeout when it starts, and cannot change it later."""
    _agent._worker = _agent.current()._replace(timeout=timeout)


# ---- what they import as `dist_autograd`


def _retrieve_context(context_id: int) -> dict[Any, Any]:
    """RuntimeError if this worker does not have the context."""
    return autograd.get_gradients(context_id)


dist_autograd = types.SimpleNamespace(
    **{name: getattr(autograd, name) for name in autograd.__all__}, _retrieve_context=_retrieve_context
)
