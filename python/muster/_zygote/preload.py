"""Imports modules before the forks, and checks that they survive a fork."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence

from .processes import threads

# If one of these is open, a library has a device context, which a forked process cannot use.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci", "/dev/accel")
# The modules that init_process_group("muster") imports, if muster is installed.
BACKEND_MODULES = ("muster._backend", "muster._torch_patches", "multiprocessing.util")
# Modules that training scripts usually import next. The warm zygote imports them, and no client waits for that.
COMMON_MODULES = (
    "torch._dynamo",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "muster.forkserver._child",
)


class RefusedError(Exception):
    """A module of --preload does not survive a fork; the message names it."""


class UnfitError(Exception):
    """Workers must be started without a zygote."""


def import_all(preload: Sequence[str], optional: Iterable[str] = ()) -> None:
    """Imports torch, each module of `preload` (checked one by one), and `optional` modules if possible."""
    gc.disable()  # imports leave no garbage; become_worker() enables it again
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise UnfitError(f"{sys.executable} cannot import torch: {error}") from None
    _import_if_possible(BACKEND_MODULES)
    freeze()
    started: dict[int, str] = {}
    for name in preload:
        before = set(threads())
        try:
            importlib.import_module(name)
        except Exception as error:
            raise RefusedError(f"--preload {name} cannot be imported: {type(error).__name__}: {error}") from None
        started.update(dict.fromkeys(set(threads()) - before, name))
        if files := _devices():
            raise RefusedError(
                f"--preload {name} opens {files[0]}, whose context no forked worker can use; leave it out, and "
                "import it in the program, or use --start-method spawn"
            )
    _import_if_possible(optional)
    _check_threads(started)
    if files := _devices():
        raise UnfitError(f"importing torch opens {files[0]}, whose context no forked worker can use")
    freeze()


def freeze() -> None:
    """Keeps the collector from writing to the pages of all objects, so that they stay shared after a fork.

    There is no collection before it, because that takes a ninth of the start and finds little.
    """
    gc.freeze()


def _import_if_possible(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _check_threads(started: dict[int, str]) -> None:
    # A library with fork handlers, such as OpenBLAS, ends its threads before a fork and starts them when it needs them.
    # So the workers would lack the threads that still exist after this fork.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for task, thread in threads().items():
        lacking = f"starts a thread ({thread}), which workers forked after it would lack"
        if task in started:
            raise RefusedError(f"--preload {started[task]} {lacking}; leave it out")
        raise UnfitError(f"importing torch {lacking}")


def _devices() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(DEVICES):
                found.append(target)
    return found


def import_for(script: str) -> bool:
    """Imports the modules of torch that the script imports, once for all workers. Returns False if there are none."""
    try:
        with open(script, "rb") as file:
            text = file.read(1 << 20).decode(errors="replace")
    except OSError:
        return False  # a directory, or an error that the worker will report
    names = set(re.findall(r"^\s*(?:import|from)\s+(torch(?:\.\w+)+)", text, re.MULTILINE))
    if re.search(r"\boptim\b|\.compile\b", text):
        names.add("torch._dynamo")  # the first optimizer imports it: 800 modules
    missing = sorted(name for name in names if name not in sys.modules)
    for name in missing:
        with contextlib.suppress(Exception):  # the script will report it
            importlib.import_module(name)
    return bool(missing)


class ImportedPackages:
    """The top-level names of the modules that were imported since the interpreter started."""

    def __init__(self, at_start: frozenset[str]):
        self._at_start = at_start
        self.names: set[str] = set()

    def update(self) -> None:
        self.names = {name.partition(".")[0] for name in sys.modules if name not in self._at_start}


def shadowing_module(folder: str, packages: set[str]) -> str:
    """Returns the path of a module in `folder` that would shadow one of `packages` in a worker, or an empty string."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return ""
    for entry in names:
        name = entry.partition(".")[0]
        if name not in packages:
            continue
        path = os.path.join(folder, entry)
        package = os.path.join(path, "__init__.py")
        if os.path.isfile(package):
            path = package
        elif not entry.endswith((".py", ".so")):
            continue
        own = getattr(sys.modules.get(name), "__file__", None)
        if own and os.path.realpath(own) != os.path.realpath(path):
            return path
    return ""
