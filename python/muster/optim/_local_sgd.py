from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from muster import _C
from muster.optim._periodic_sync import PeriodicSyncOptimizer


class LocalSGD(PeriodicSyncOptimizer):
    """Each rank makes local steps, and all ranks average their parameters every `sync_every` steps (local SGD, Stich
    2019). This sends 1 / sync_every of the bytes. State such as momentum is not averaged.

        optimizer = muster.optim.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=8)

    optimizer:  any optimizer. The LocalSGD object replaces it in the training loop. The model is a plain module, not
                wrapped in DistributedDataParallel. (Or it is wrapped over the process group of one host, and `group`
                spans the hosts.)
    params:     the parameters to average; by default all of the optimizer's.
    warmup:     the number of first steps that are each followed by an average.
    init_sync:  all ranks start with the parameters of rank 0.
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
        super().__init__(optimizer, params, sync_every, group)
        self._native = _C.LocalSGD(self._backend, self._params, sync_every, warmup, init_sync)
