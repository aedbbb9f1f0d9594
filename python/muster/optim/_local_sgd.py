from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.optim._wrapper import OuterOptimizer


class LocalSGD(OuterOptimizer):
    """Every rank makes steps of its own, and all average their parameters every `sync_every` steps (local SGD, Stich
    2019): 1 / sync_every of the bytes. State such as momentum is not averaged.

        optimizer = muster.optim.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=8)

    optimizer:  any optimizer; this one takes its place in the training loop. The model is a plain module, not wrapped
                in DistributedDataParallel (or one whose process group is that of one host, beside a `group` across).
    params:     what is averaged; by default all of the optimizer's.
    warmup:     steps that are all followed by an average, in the beginning.
    init_sync:  all ranks begin with the parameters of the first.
    group:      a process group of the muster backend; by default all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Iterable[Tensor] | None = None,
        sync_every: int = 8,
        warmup: int = 0,
        *,
        init_sync: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer, params, sync_every, init_sync, group)
        self.warmup = warmup

    def _meet(self) -> None:
        if self.steps <= self.warmup or self.steps % self.sync_every == 0:
            self.synchronize()

    def synchronize(self) -> None:
        """Collective: averages now, as after the last step."""
        self._average(self._params)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]
