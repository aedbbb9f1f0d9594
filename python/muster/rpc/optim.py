"""An optimizer for parameters of several workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from muster.rpc import autograd
from muster.rpc._calls import UNSET_TIMEOUT
from muster.rpc._functions import export
from muster.rpc._future import Future, wait_all
from muster.rpc._rref import RRef, remote

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """Updates parameters where they are, with the gradients of a context of muster.rpc.autograd.

    Each worker that has parameters gets an optimizer of its own, which updates only them. So a global choice, such as
    clipping by the norm of all gradients, needs code of your own. Steps of several trainers at one worker run one after
    the other; each uses the gradients of its own context.

        optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.1)
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Sequence[RRef[torch.Tensor]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """params: references to the parameters. optimizer_class: gets them, args and kwargs, at each worker that has
        some. It may be any class that takes parameters first; if it is not torch's, the workers must allow it.

        Waits until the optimizers are there. Raises ValueError without parameters, and what a worker has raised.
        """
        by_owner: dict[str, list[RRef[torch.Tensor]]] = {}
        for param in params:
            by_owner.setdefault(param.owner_name(), []).append(param)
        if not by_owner:
            raise ValueError("an optimizer needs at least one parameter")
        self._optimizers = [
            remote(owner, Optimizer, args=(optimizer_class, own, args, kwargs)) for owner, own in by_owner.items()
        ]
        for optimizer in self._optimizers:
            optimizer._wait(UNSET_TIMEOUT)

    def step(self, context_id: int, timeout: float = UNSET_TIMEOUT) -> None:
        """Updates the parameters at all workers, and waits for that. Parameters without a gradient do not change.

        timeout: in seconds; 0 is none. By default that of init_rpc().

        Raises what a worker has raised. The others have then updated their parameters. muster.Error if the context
        has ended.
        """
        autograd.get_gradients(context_id)  # raises if this worker does not know the context
        steps: list[Future[Any]] = [optimizer.rpc_async(timeout).step(context_id) for optimizer in self._optimizers]
        wait_all(steps)


@export
class Optimizer:
    """The part of one worker."""

    _lock = threading.Lock()  # steps of all optimizers of this worker: they may share parameters

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: list[RRef[torch.Tensor]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._params = [param.local_value() for param in params]
        self._optimizer = optimizer_class(self._params, *args, **kwargs)

    def step(self, context_id: int) -> None:
        gradients = autograd.gradients_here(context_id)
        with Optimizer._lock:
            own = [param.grad for param in self._params]
            try:
                for param in self._params:
                    param.grad = gradients.get(param)
                self._optimizer.step()
            finally:
                for param, gradient in zip(self._params, own, strict=True):
                    param.grad = gradient


# What the C++ DistributedOptimizer calls.


@export(name="muster.optim.create")
def create(kind: str, params: list[RRef[torch.Tensor]], options: dict[str, float]) -> Optimizer:
    return Optimizer(getattr(torch.optim, kind), params, (), options)


@export(name="muster.optim.step")
def step(optimizer: RRef[Optimizer], context_id: int) -> None:
    optimizer.local_value().step(context_id)
