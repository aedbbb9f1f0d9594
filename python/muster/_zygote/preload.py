"""What is imported before the forks, and whether it survives them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence

from .processes import threads

# An open one means that a library has begun to use the device, and no child can share that.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci", "/dev/accel")
# What init_process_group("muster") loads, where it is installed.
HELPFUL = ("muster._backend", "multiprocessing.util")


class RefusedError(Exception):
    """A module that was asked for leaves what no fork survives; the message names it."""


class UnfitError(Exception):
    """Workers have to be started the ordinary way."""


def import_all(preload: Sequence[str], also: Iterable[str] = ()) -> None:
    """torch, each module of `preload`, checked on its own, and whichever of `also` can be imported."""
    gc.disable()  # nothing that is imported is garbage; become() turns it on again
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise UnfitError(f"{sys.executable} cannot import torch: {error}") from None
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
                f"--preload {name} opens {files[0]}, whose context no forked worker can use; leave it out"
            )
    for name in (*HELPFUL, *also):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    _check_threads(started)
    if files := _devices():
        raise UnfitError(f"importing torch opens {files[0]}, whose context no forked worker can use")
    # The collector leaves these pages alone, so they stay shared. Not collected before: that takes a ninth of the start
    # and finds little.
    gc.freeze()


def _check_threads(started: dict[int, str]) -> None:
    # A library that knows of forks ends its threads before each and starts them again when it needs them, as OpenBLAS
    # does. So a thread that is still there after a fork is one that the workers would lack.
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
    """What the script is about to import of torch: better once here than in every worker. False: nothing."""
    try:
        with open(script, "rb") as file:
            text = file.read(1 << 20).decode(errors="replace")
    except OSError:
        return False  # a folder; or whatever the worker will say
    names = set(re.findall(r"^\s*(?:import|from)\s+(torch(?:\.\w+)+)", text, re.MULTILINE))
    if re.search(r"\boptim\b|\.compile\b", text):
        names.add("torch._dynamo")  # the first optimizer imports it: eight hundred modules
    missing = sorted(name for name in names if name not in sys.modules)
    for name in missing:
        with contextlib.suppress(Exception):  # the script's own affair
            importlib.import_module(name)
    return bool(missing)


class Tops:
    """The first names of the modules that were imported since the interpreter started."""

    def __init__(self, at_start: frozenset[str]):
        self._at_start = at_start
        self.names: set[str] = set()

    def look(self) -> None:
        self.names = {name.partition(".")[0] for name in sys.modules if name not in self._at_start}


def hidden_by(folder: str, tops: set[str]) -> str:
    """A module of `folder` that comes before one of `tops` on a worker's sys.path; empty when there is none."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return ""
    for entry in names:
        name = entry.partition(".")[0]
        if name not in tops:
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
