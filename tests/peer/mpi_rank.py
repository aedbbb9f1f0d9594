"""A rank of test_mpi.py: runs PyTorch's distributed_test.py over muster-mpi, as torch's test_distributed_fork.py does
over torch's own MPI. Prints a line of JSON for each test: its name, its result, and the reason or the traceback.

Usage: mpirun -n SIZE python -m peer.mpi_rank PATTERN
"""

from __future__ import annotations

import json
import os
import re
import sys
import unittest

import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.common_utils import TestCase

from peer import suite


def main() -> None:
    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    dist.init_process_group("muster-mpi")
    module = suite.load(dist.get_world_size(), backend="muster-mpi")
    os.environ["BACKEND"] = "mpi"  # for decorators

    class TestMpi(TestCase, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        init_method = "env://"

        def _barrier(self, *_: object, **__: object) -> None:
            dist.barrier()

    for name in filter(re.compile(sys.argv[1]).fullmatch, unittest.defaultTestLoader.getTestCaseNames(TestMpi)):
        outcome = unittest.TestResult()
        unittest.TestSuite([TestMpi(name)]).run(outcome)  # type: ignore[no-untyped-call]
        failed = [text for _, text in outcome.failures + outcome.errors]
        skipped = [text for _, text in outcome.skipped]
        result = "failed" if failed else "skipped" if skipped else "passed"
        text = "".join(failed or skipped)
        ended = re.search(r"\nSystemExit: (\d+)\n$", text)  # how some tests skip themselves
        if ended is not None:
            result, text = "skipped", reasons[int(ended[1])]
        for rank in range(dist.get_world_size()):  # one after the other, because lines of ranks may mix
            dist.barrier()
            if rank == dist.get_rank():
                sys.stdout.write(json.dumps({"test": name, "rank": rank, "result": result, "text": text}) + "\n")
                sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
