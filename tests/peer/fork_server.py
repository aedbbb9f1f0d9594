"""Starts the processes of PyTorch's tests with muster.forkserver: importing torch in each would take seconds."""

from __future__ import annotations

import contextlib

from muster.forkserver._client import ForkServerError
from torch.testing._internal import common_distributed

from muster import forkserver


def use_fork_server(preloaded: str) -> None:
    """All later tests of common_distributed.MultiProcessTestCase. preloaded: a module that they find imported."""
    common_distributed.MultiProcessTestCase._spawn_processes = _start  # type: ignore[method-assign]
    with contextlib.suppress(ForkServerError):  # it runs already
        forkserver.preload(preloaded)


def _start(self: common_distributed.MultiProcessTestCase) -> None:
    self._start_processes(forkserver.get_context().Process)
