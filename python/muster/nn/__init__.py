"""Data parallelism: one model, trained by several processes or on several devices.

muster.nn.DistributedDataParallel   torch's class over muster's reducer: a replica in each process
muster.nn.SyncBatchNorm             torch's class, also for CPU tensors
muster.nn.DataParallel              replicas in one process, on any devices, also several on the CPU
muster.nn.data_parallel             the same for one call
"""

from muster.nn._data_parallel import DataParallel, data_parallel
from muster.nn._distributed import DistributedDataParallel
from muster.nn._sync_batch_norm import SyncBatchNorm

__all__ = ["DataParallel", "DistributedDataParallel", "SyncBatchNorm", "data_parallel"]
