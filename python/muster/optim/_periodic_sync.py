"""The common part of LocalSGD and DiLoCo: they behave like the optimizer that they wrap, except in step()."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from muster import _C
from muster._group import backend_of


class PeriodicSyncOptimizer(torch.optim.Optimizer):
    """An optimizer around another one, `inner`, with the parameter groups, options, state and hooks of `inner`.
    Schedulers and GradScaler can use it in place of `inner`.
    """

    # Fused optimizers set this. GradScaler would then leave the scale on this object, where `inner` does not look for
    # it, instead of unscaling the gradients.
    _step_supports_amp_scaling = False

    inner: torch.optim.Optimizer
    _native: _C.LocalSGD | _C.DiLoCo

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: Iterable[Tensor] | None,
        sync_every: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        if not hasattr(inner, "param_groups"):
            raise TypeError(f"{type(self).__name__} wraps an optimizer, such as torch.optim.SGD(...), not {inner!r}")
        # Optimizer.__init__() is not called, because the attributes that it sets come from `inner`.
        self.inner, self.sync_every = inner, sync_every
        self._backend = backend_of(group)
        if params is None:
            params = [param for each in inner.param_groups for param in each["params"]]
        self._params = [param for param in params if param.requires_grad]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # during construction
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sync_every={self.sync_every}, inner={self.inner!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to a process group and cannot be copied or pickled: save its state_dict() "
            "and load that into a new one"
        )

    @property
    def steps(self) -> int:
        """The number of steps so far, the same at all ranks."""
        return self._native.steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("parameters cannot be added: the ranks have agreed on those that they average")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of the inner optimizer, and averages if it is time. All ranks must call this equally often."""
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self._native.step()
        return loss

    def synchronize(self) -> None:
        """Averages now; a collective call. Afterwards all ranks have the same parameters. For the end of training."""
        self._native.synchronize()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self._native.steps = state_dict["steps"]
