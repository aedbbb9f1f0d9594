"""What both optimizers share: they are the inner one, but for their steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed import AllreduceCoalescedOptions, ReduceOp

from muster._group import backend_of


class OuterOptimizer(torch.optim.Optimizer):
    """An optimizer around another, `inner`, whose groups, options, state and hooks are its own too: schedulers and
    GradScaler take it for what it wraps.
    """

    # What a fused inner one says of itself. But then GradScaler would leave the scale on this object, where the inner
    # one does not look, in place of scaling gradients back.
    _step_supports_amp_scaling = False

    inner: torch.optim.Optimizer
    steps: int
    """Steps made so far, the same at all ranks."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: Iterable[Tensor] | None,
        sync_every: int,
        init_sync: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every is a number of steps, at least 1, not {sync_every}")
        if not hasattr(inner, "param_groups"):
            raise TypeError(f"{type(self).__name__} wraps an optimizer, such as torch.optim.SGD(...), not {inner!r}")
        # Not Optimizer's: what it would set is the inner one's.
        self.inner, self.steps, self.sync_every = inner, 0, sync_every
        self._group = group or dist.distributed_c10d._get_default_group()
        self._backend = backend_of(self._group)
        chosen = _parameters_of(inner) if params is None else params
        self._params = [param for param in chosen if param.requires_grad]
        if not self._params:
            raise ValueError("there is no parameter to average: none requires a gradient")
        if init_sync:
            self._broadcast(self._params)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # asked before it is set
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sync_every={self.sync_every}, inner={self.inner!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to a process group and cannot be copied or pickled: save its state_dict(), "
            "and load that into one that is made anew"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("parameters cannot be added: the ranks have agreed on those that they average")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer; collective when one is due. All ranks must make equally many."""
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.steps += 1
        self._meet()
        return loss

    def _meet(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def _average(self, tensors: Sequence[Tensor]) -> None:
        """In place, all tensors of one dtype as one operation."""
        options = AllreduceCoalescedOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG)
        for alike in _by_dtype(tensors):
            self._group.allreduce_coalesced(alike, options).wait()

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for alike in _by_dtype(tensors):
            _broadcast_coalesced(self._group, alike, 256 << 20, 0)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _by_dtype(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    lists: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        lists[tensor.dtype].append(tensor.detach())
    return lists.values()
