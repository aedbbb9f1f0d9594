"""PyTorch's base classes of distributed tests, with processes of the fork server: a test starts in milliseconds.

    from muster.testing import MultiProcessTestCase   # instead of torch.testing._internal.common_distributed

torch's module needs the package expecttest.
"""

from __future__ import annotations

import contextlib
import time
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
        """torch looks at the processes ten times a second. This waits for what it looks for."""
        deadline = time.monotonic() + common_distributed.get_timeout(self.id())
        running = {process.sentinel: process for process in self.processes}
        while running and (ended := connection.wait(list(running), max(0.0, deadline - time.monotonic()))):
            codes = [running.pop(each).exitcode for each in ended]  # type: ignore[call-overload]
            if self.TEST_ERROR_EXIT_CODE in codes:
                break
        super()._join_processes(fn)


class MultiProcessTestCase(_ForkServerProcesses):
    """As torch.testing._internal.common_distributed.MultiProcessTestCase."""


class DistributedTestBase(_ForkServerProcesses, common_distributed.DistributedTestBase):
    """As torch.testing._internal.common_distributed.DistributedTestBase."""
