from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster import hooks
from muster._C import Averager, PendingAverage
from muster.optim._wrapper import OuterOptimizer

_NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(OuterOptimizer):
    """Every rank makes `sync_every` steps of its own; how far all have come from where they began, averaged, then is
    the gradient of an outer optimizer, whose parameters all ranks go on from (DiLoCo, Douillard et al. 2023).

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        optimizer = muster.optim.DiLoCo(inner, sync_every=100, hook=muster.hooks.int8())

    optimizer:        the inner one, any; this one takes its place in the training loop.
    params:           what is averaged; by default all of the optimizer's. Buffers of the model stay each rank's own.
    outer_optimizer:  makes the outer optimizer from a list of parameters. By default SGD with the paper's learning
                      rate of 0.7 and Nesterov momentum of 0.9.
    hook:             how averages are sent: one of muster.hooks. By default as float32.
    fragments:        the model is averaged in that many parts, at times spread over sync_every steps (Streaming DiLoCo,
                      Douillard et al. 2025), so that the most bytes at a time are a part of the model's.
    delay:            steps that go on while a part is averaged, before the result is used; less than sync_every.
    mixing:           what share of its own parameters a rank keeps when they are replaced. By default 0, or with a
                      delay 0.5, as the steps of the meantime are in the own ones only.
    init_sync, group: as in LocalSGD.

    Keeps a copy of the parameters (float32, float64 for such) and the outer optimizer's state at every rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Iterable[Tensor] | None = None,
        outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = _NESTEROV,
        sync_every: int = 100,
        *,
        hook: hooks.NativeHook | None = None,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        init_sync: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if hook is not None and not isinstance(hook, hooks.NativeHook):
            raise TypeError(f"hook is one of muster.hooks, such as muster.hooks.int8(), not {hook!r}")
        super().__init__(optimizer, params, sync_every, init_sync, group)
        if not 0 <= delay < sync_every:
            raise ValueError(f"delay is a number of steps below sync_every, {sync_every}, not {delay}")
        if not 1 <= fragments <= min(sync_every, len(self._params)):
            raise ValueError(f"fragments must be between 1 and {min(sync_every, len(self._params))}, not {fragments}")
        self.delay = delay
        self.mixing = mixing if mixing is not None else 0.5 if delay else 0.0
        self._averager = Averager(hook or hooks.all_reduce(), self._backend)
        self._fragments = [_Fragment(part, outer_optimizer) for part in _split(self._params, fragments)]

    def _meet(self) -> None:
        for index, fragment in enumerate(self._fragments):
            begin = index * self.sync_every // len(self._fragments)
            if self.steps % self.sync_every == begin:
                fragment.begin(self._averager, index, len(self._fragments))
            if fragment.pending is not None and (self.steps - begin) % self.sync_every == self.delay:
                fragment.finish(self.mixing)

    def synchronize(self) -> None:
        """Collective: an outer step now, after which all ranks have the same parameters. For the end of training."""
        self._finish()
        for index, fragment in enumerate(self._fragments):
            fragment.begin(self._averager, index, len(self._fragments))
        for fragment in self._fragments:
            fragment.finish(0)

    def _finish(self) -> None:
        for fragment in self._fragments:
            if fragment.pending is not None:
                fragment.finish(self.mixing)

    def state_dict(self) -> dict[str, Any]:
        """Averages on their way are waited for and used first, so call it at all ranks after the same step."""
        self._finish()
        outer = [fragment.state_dict() for fragment in self._fragments]
        return {"inner": self.inner.state_dict(), "outer": outer, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of as many fragments. The model's parameters are not part of it."""
        if len(state_dict["outer"]) != len(self._fragments):
            raise ValueError(f"the state is of {len(state_dict['outer'])} fragments, not {len(self._fragments)}")
        self._finish()
        self.inner.load_state_dict(state_dict["inner"])
        for fragment, state in zip(self._fragments, state_dict["outer"], strict=True):
            fragment.load_state_dict(state)
        self.steps = state_dict["steps"]


class _Fragment:
    """Parameters that are averaged together, and the outer optimizer's copies of them."""

    def __init__(self, params: list[Tensor], outer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self.params = params
        self.pending: PendingAverage | None = None
        dtype = torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32
        self._difference = torch.empty(sum(param.numel() for param in params), dtype=dtype)
        self._outer_params = [param.detach().to(dtype, copy=True) for param in params]
        parts = torch.split_with_sizes(self._difference, [param.numel() for param in params])
        for copy, part in zip(self._outer_params, parts, strict=True):
            copy.grad = part.view(copy.shape)
        self._outer = outer(self._outer_params)

    @torch.no_grad()
    def begin(self, averager: Averager, index: int, count: int) -> None:
        for copy, param in zip(self._outer_params, self.params, strict=True):
            torch.sub(copy, param, out=copy.grad)
        self.pending = averager.begin(index, count, self._difference, self._outer_params)

    @torch.no_grad()
    def finish(self, mixing: float) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        self._outer.step()
        for copy, param in zip(self._outer_params, self.params, strict=True):
            if mixing == 0:
                param.copy_(copy)
            else:
                param.lerp_(copy.to(param.dtype), 1 - mixing)

    def state_dict(self) -> dict[str, Any]:
        return {"params": self._outer_params, "optimizer": self._outer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for copy, saved in zip(self._outer_params, state["params"], strict=True):
            copy.copy_(saved)
        self._outer.load_state_dict(state["optimizer"])


def _split(params: list[Tensor], parts: int) -> list[list[Tensor]]:
    """Into as many lists of about equal size, in order, none empty."""
    total = sum(param.numel() for param in params)
    lists: list[list[Tensor]] = [[] for _ in range(parts)]
    done, index = 0, 0
    for left, param in zip(range(len(params), 0, -1), params, strict=True):
        full = done * parts >= (index + 1) * total or left <= parts - index - 1
        if lists[index] and full:
            index += 1
        lists[index].append(param)
        done += param.numel()
    return lists
