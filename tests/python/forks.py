"""Forks processes from a server process that has imported torch and computed nothing.

A fresh interpreter for each process would take seconds to import torch. A fork of the test process itself would lack
the threads of OpenMP and autograd that earlier tests have started there, and would wait for them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import unittest.mock
from multiprocessing import forkserver
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
_MODULES = ["pytest", "torch.distributed", "torch._dynamo"]  # constructing a DDP imports the last


def preload(module: str) -> None:
    """The fork server imports this module. Call it before the first process starts."""
    _MODULES.append(module)


class Process(CONTEXT.Process):  # type: ignore[name-defined, misc]
    """Gets the current environment: its parent, the fork server, has the environment of its own start."""

    def start(self) -> None:
        _start_server()
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> Any:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


def _start_server() -> None:
    """Starts the server once. Python 3.11's server preloads without the sys.path that it gets, hence PYTHONPATH."""
    CONTEXT.set_forkserver_preload(_MODULES)
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
