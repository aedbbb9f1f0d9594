"""PyTorch's base classes of distributed tests, with processes of the fork server: a test starts in milliseconds.

    from muster.testing import MultiProcessTestCase   # instead of torch.testing._internal.common_distributed

torch's module needs the package expecttest.
"""

from __future__ import annotations

import contextlib
import time
import types
import unittest.mock
from collections.abc import Callable
from multiprocessing import connection

from torch.testing._internal import common_distributed

from muster import forkserver
from muster.forkserver._client import ForkServerError

__all__ = ["DistributedTestBase", "MultiProcessTestCase"]

with contextlib.suppress(ForkServerError):  # it runs already; then each process imports the module itself
    forkserver.preload(common_distributed.__name__)


class _ForkServerProcesses(common_distributed.MultiProcessTestCase):
    def _spawn_processes(self) -> None:
        self._start_processes(forkserver.get_context().Process)

    def _join_processes(self, fn: Callable[..., object]) -> None:
        """torch looks at the processes and sleeps in turn. Here the end of a process ends such a sleep."""
        clock = types.SimpleNamespace(**{**vars(time), "sleep": self._wait})
        with unittest.mock.patch.object(common_distributed, "time", clock):
            super()._join_processes(fn)

    def _wait(self, timeout: float) -> None:
        running = [process.sentinel for process in self.processes if process.exitcode is None]
        connection.wait(running, timeout)


class MultiProcessTestCase(_ForkServerProcesses):
    """As torch.testing._internal.common_distributed.MultiProcessTestCase."""


class DistributedTestBase(_ForkServerProcesses, common_distributed.DistributedTestBase):
    """As torch.testing._internal.common_distributed.DistributedTestBase."""
