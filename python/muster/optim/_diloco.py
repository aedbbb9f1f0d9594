from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster import _C, hooks
from muster._deprecated import renamed_arguments
from muster.optim._periodic_sync import PeriodicSyncOptimizer

_NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(PeriodicSyncOptimizer):
    """Each rank makes `sync_every` local steps. Then the average change of the ranks' parameters since the last average
    becomes the gradient of an outer optimizer, and all ranks continue from the outer parameters (DiLoCo, Douillard et
    al. 2023).

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        optimizer = muster.optim.DiLoCo(inner, sync_every=100, hook=muster.hooks.int8())

    optimizer:        the inner optimizer, of any kind. The DiLoCo object replaces it in the training loop.
    params:           the parameters to average; by default all of the optimizer's. Buffers of the model stay local.
    outer_optimizer:  makes the outer optimizer from a list of parameters. By default SGD with the paper's learning
                      rate of 0.7 and Nesterov momentum of 0.9.
    hook:             how averages are sent: one of muster.hooks. By default as float32.
    fragments:        the model is averaged in this many parts, at times spread over sync_every steps (Streaming DiLoCo,
                      Douillard et al. 2025), which divides the peak traffic.
    delay:            the number of steps that run while a part is averaged, before the result is used; less than
                      sync_every.
    merge_alpha:      the share of its own parameters that a rank keeps when it merges the outer parameters. The default
                      is 0 without a delay. With a delay it is 0.5, because only the rank's own parameters have the
                      steps made during the delay.
    init_sync, group: as in LocalSGD.

    Each rank keeps a copy of the parameters (float32; float64 for float64 parameters) and the outer optimizer's state.
    """

    @renamed_arguments(mixing="merge_alpha")
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
        merge_alpha: float | None = None,
        init_sync: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if hook is not None and not isinstance(hook, hooks.NativeHook):
            raise TypeError(f"hook must be one of muster.hooks, such as muster.hooks.int8(), not {hook!r}")
        super().__init__(optimizer, params, sync_every, group)
        outer: list[tuple[list[Tensor], torch.optim.Optimizer]] = []  # by fragment: the parameters and their optimizer

        def make_outer(parameters: list[Tensor]) -> Callable[[], object]:
            outer.append((parameters, outer_optimizer(parameters)))
            return outer[-1][1].step

        self._outer = outer
        self._native: _C.DiLoCo = _C.DiLoCo(
            self._backend,
            self._params,
            make_outer,
            hook or hooks.all_reduce(),
            sync_every,
            fragments,
            delay,
            merge_alpha,
            init_sync,
        )

    def state_dict(self) -> dict[str, Any]:
        """Waits for averages that are in flight, and applies them. All ranks must call this after the same step."""
        self._native.finish()
        outer = [{"params": params, "optimizer": optimizer.state_dict()} for params, optimizer in self._outer]
        return {**super().state_dict(), "outer": outer}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The state must have the same number of fragments. It does not contain the model's parameters."""
        if len(state_dict["outer"]) != len(self._outer):
            raise ValueError(f"the state has {len(state_dict['outer'])} fragments, the optimizer {len(self._outer)}")
        self._native.finish()
        super().load_state_dict(state_dict)
        for (params, optimizer), state in zip(self._outer, state_dict["outer"], strict=True):
            for param, saved in zip(params, state["params"], strict=True):
                param.copy_(saved)
            optimizer.load_state_dict(state["optimizer"])
