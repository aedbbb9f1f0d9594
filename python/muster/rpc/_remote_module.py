"""A module at another worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from muster.rpc import _calls
from muster.rpc._calls import UNSET_TIMEOUT
from muster.rpc._functions import export
from muster.rpc._future import CallFuture
from muster.rpc._rref import RRef, remote

_IN_A_FUNCTION = "in a function that you call there with get_module_rref()"


@export
class RemoteModule(nn.Module):
    """A module whose parameters are at another worker, and whose forward() runs there.

    It may be passed to other workers, and be a part of other modules. Its parameters are not among theirs: see
    remote_parameters(). In a context of muster.rpc.autograd, gradients flow back through it.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """remote_device: the name of a worker, also as "worker/cpu". module_cls: makes the module there, of `args` and
        `kwargs`. The worker must allow it, unless it is torch's.

        Waits for the module. Raises ValueError for other devices, and what the worker has raised.
        """
        super().__init__()
        worker, _, device = remote_device.partition("/")
        if device not in ("", "cpu"):
            raise ValueError(f"muster.rpc has modules on the CPU only, not on {device!r}")
        self.module_rref: RRef[nn.Module] = remote(worker, create, args=(module_cls, tuple(args), dict(kwargs or {})))
        self.module_rref._wait(UNSET_TIMEOUT)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, and waits for the result."""
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Calls the module, and returns a future of the result."""
        return _calls.rpc_async(self.module_rref.owner_name(), forward, (self.module_rref, *args), kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.Tensor]]:
        """References to the module's parameters, for a DistributedOptimizer."""
        owner = self.module_rref.owner_name()
        return _calls.rpc_sync(owner, parameters, (self.module_rref, recurse))  # type: ignore[no-any-return]

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module itself."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Sets the mode of the module at its worker."""
        super().train(mode)
        if (rref := self.__dict__.get("module_rref")) is not None:
            _calls.rpc_sync(rref.owner_name(), set_mode, (rref, mode))
        return self

    # nn.Module's own versions would do nothing, because this process has no parameters of the module.

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("parameters", "call remote_parameters()")

    def named_buffers(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("buffers", f"read them {_IN_A_FUNCTION}")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("state", f"save it {_IN_A_FUNCTION}")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("state", f"load it {_IN_A_FUNCTION}")

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        """For to(), half(), share_memory() and the like."""
        self._refuse("parameters", f"convert them {_IN_A_FUNCTION}")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        worker = self.module_rref.owner_name()
        raise ValueError(f"cannot reach the {what} of a module at worker {worker!r} from here: {instead}")


@export
def create(module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(f"module_cls must make a torch.nn.Module, not {type(module).__qualname__}")
    return module


@export
def forward(module: RRef[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
    return module.local_value()(*args, **kwargs)


@export
def parameters(module: RRef[nn.Module], recurse: bool) -> list[RRef[torch.Tensor]]:
    return [RRef(parameter) for parameter in module.local_value().parameters(recurse)]


@export
def set_mode(module: RRef[nn.Module], mode: bool) -> None:
    module.local_value().train(mode)
