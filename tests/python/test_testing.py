"""Tests muster.testing: PyTorch's MultiProcessTestCase in processes of the fork server."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job

pytest.importorskip("torch")
pytest.importorskip("expecttest")

CASES = r"""
import os, unittest
import torch
import torch.distributed as dist
from muster.testing import DistributedTestBase, MultiProcessTestCase

class Cases(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self):
        dist.init_process_group(
            "gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=self.world_size
        )

    def test_sum(self):
        self.join()
        data = torch.ones(2)
        dist.all_reduce(data)
        self.assertEqual(data, torch.full((2,), 2.0))
        with open("/proc/%d/cmdline" % os.getppid()) as file:
            os.write(1, b"forked by %s\n" % file.read().split(" of ")[0].encode())

    def test_skipped(self):
        raise unittest.SkipTest("not today")

    def test_failure(self):
        self.join()
        if self.rank == 1:
            raise ValueError("as planned")
        dist.barrier()

    def test_late(self):
        if self.rank == 1:
            import signal
            signal.pause()

class Base(DistributedTestBase):
    world_size = 2

    def backend(self, device):
        return "gloo"

    def test_base(self):
        group = self.create_pg("cpu")
        group.barrier().wait()

if __name__ == "__main__":
    from torch.testing._internal import common_distributed
    common_distributed.TIMEOUT_OVERRIDE["test_late"] = 2
    unittest.main(verbosity=2)
"""


@pytest.fixture
def cases(tmp_path: Path, run_to_end: Callable[..., Job]) -> Callable[[str], Job]:
    def run(name: str) -> Job:
        path = tmp_path / "cases.py"
        path.write_text(CASES)
        return run_to_end([sys.executable, path, name], {"GLOO_SOCKET_IFNAME": "lo"})

    return run


def test_cases_pass_and_skip(cases: Callable[[str], Job]) -> None:
    job = cases("Cases.test_sum")
    assert job.err.strip().endswith("OK"), job.err
    assert job.out.count("forked by muster: fork server") == 2
    assert cases("Cases.test_skipped").err.strip().endswith("OK (skipped=1)")
    assert cases("Base.test_base").err.strip().endswith("OK")


def test_failures_of_cases(cases: Callable[[str], Job]) -> None:
    job = cases("Cases.test_failure")
    assert "Process 1 exited with error code 10 and exception" in job.err and "ValueError: as planned" in job.err
    assert job.err.strip().endswith("FAILED (errors=1)")
    job = cases("Cases.test_late")
    assert re.search(r"Process 1 terminated or timed out after [2-9]", job.err), job.err
