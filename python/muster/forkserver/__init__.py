"""Processes that start in milliseconds with torch imported, and are otherwise as clean as spawned ones.

The first process of a program starts a fork server: a Python process that imports torch and does nothing else. It forks
all processes. So a process inherits no thread, no lock and no device context of its parent, and gets its function and
arguments pickled, as with the start method "spawn". The names:

    get_context()              a context of multiprocessing, also multiprocessing.get_context("muster")
    spawn(fn, args, nprocs)    as torch.multiprocessing.spawn()
    preload("module", ...)     modules that the fork server imports after torch
    ensure_running()           starts the fork server early; does not wait for it

A killed parent leaves nothing behind: its processes are killed, and then the fork server ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing import context, process
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.popen_fork import Popen

__all__ = ["ensure_running", "get_context", "preload", "spawn"]

NAME = "muster"


class Process(process.BaseProcess):
    _start_method = NAME

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Popen:  # noqa: N802
        from muster.forkserver._popen import Popen

        return Popen(process_obj)

    @staticmethod
    def _after_fork() -> None:
        """A child inherits no state that has to be cleared."""


class ForkServerContext(context.BaseContext):
    _name = NAME
    Process = Process

    def set_forkserver_preload(self, module_names: Iterable[str]) -> None:
        preload(*module_names)


# multiprocessing.get_context() looks contexts up here, and a child finds the start method of its parent. `import torch`
# has put an object here that becomes the context with this import (_autoload.py).
_CONTEXT: ForkServerContext = vars(context)["_concrete_contexts"].setdefault(NAME, ForkServerContext())
_CONTEXT.__class__ = ForkServerContext


def get_context() -> ForkServerContext:
    return _CONTEXT


def preload(*modules: str) -> None:
    """Adds modules that the fork server imports after torch. Raises ForkServerError if it runs already."""
    from muster.forkserver._client import client

    client.preload(modules)


def ensure_running() -> None:
    """Starts the fork server if there is none. Does not wait until it has imported torch.

    Waits for a zygote of `muster warm` that does not answer, for 2 s.
    """
    from muster.forkserver._client import client

    client.ensure_running()


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = NAME,
) -> Any:
    """Calls fn(i, *args) in `nprocs` processes. Arguments, result and exceptions are those of
    torch.multiprocessing.spawn().
    """
    from torch.multiprocessing import start_processes

    return start_processes(fn, args, nprocs, join, daemon, start_method)
