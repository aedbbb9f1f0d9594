"""A rank of test_mpi.py: runs PyTorch's distributed_test.py over muster-mpi, as torch's test_distributed_fork.py does
over torch's own MPI. Prints what rank_results.py has.

Usage: mpirun -n SIZE python -m peer.mpi_rank PATTERN
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase

from peer import rank_results, suite


def main() -> None:
    dist.init_process_group("muster-mpi")
    module = suite.load(dist.get_world_size(), backend="muster-mpi")
    os.environ["BACKEND"] = "mpi"  # for decorators

    class TestMpi(TestCase, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        init_method = "env://"

        def _barrier(self, *_: object, **__: object) -> None:
            dist.barrier()

    rank_results.run(TestMpi, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
