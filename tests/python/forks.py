"""Processes forked from one that has imported torch and computed nothing.

A fresh interpreter for each would take seconds to import torch. A fork of the tests' own process would lack the threads
of OpenMP and autograd that earlier tests have started there, and wait for them.
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
    """The processes find this module imported; asked for before the first of them starts."""
    _MODULES.append(module)


class Process(CONTEXT.Process):  # type: ignore[name-defined, misc]
    """Has the environment of now: its parent, the fork server, has that of its own start."""

    def start(self) -> None:
        _start_server()
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> Any:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


def _start_server() -> None:
    """Once. The server of Python 3.11 does not look for what it is to preload in the sys.path that it is given."""
    CONTEXT.set_forkserver_preload(_MODULES)
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
