"""Data parallelism: one model, trained by several processes or on several devices.

muster.nn.DistributedDataParallel   torch's class over muster's reducer: a replica in each process
muster.nn.fully_shard               each rank keeps a part of each parameter, also in a compiled graph
muster.nn.SyncBatchNorm             torch's class, also for CPU tensors
muster.nn.DataParallel              replicas in one process, on any devices, also several on the CPU
muster.nn.data_parallel             the same for one call
"""

from typing import TYPE_CHECKING

from muster.nn._data_parallel import DataParallel, data_parallel
from muster.nn._distributed import DistributedDataParallel
from muster.nn._sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from muster.nn._fully_shard import fully_shard

__all__ = ["DataParallel", "DistributedDataParallel", "SyncBatchNorm", "data_parallel", "fully_shard"]


def __getattr__(name: str) -> object:
    if name != "fully_shard":
        raise AttributeError(f"module 'muster.nn' has no attribute {name!r}")
    from muster.nn._fully_shard import fully_shard  # imports DTensor, which few programs need

    return fully_shard
