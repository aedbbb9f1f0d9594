"""Data parallelism: one model, trained by several processes or on several devices.

muster.nn.DistributedDataParallel   torch's, over muster's own reducer: a replica in each process
muster.nn.SyncBatchNorm             torch's, which also takes CPU tensors
muster.nn.DataParallel              replicas within one process, on any devices, the CPU several times too
muster.nn.data_parallel             the same for one call
"""

from muster.nn._data_parallel import DataParallel, data_parallel
from muster.nn._distributed import DistributedDataParallel
from muster.nn._sync_batch_norm import SyncBatchNorm

__all__ = ["DataParallel", "DistributedDataParallel", "SyncBatchNorm", "data_parallel"]
