"""The child's side: what a process does that the fork server has forked."""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import socket
import sys
from multiprocessing import resource_tracker, spawn, util
from typing import NoReturn

from muster.forkserver._client import FORK_TIMEOUT, client
from muster.forkserver._popen import MAX_DESCRIPTORS, MORE

inherited: list[int] = []  # descriptors that pickled objects of the parent refer to


def main() -> None:
    link = _take_standard_input()
    (data, tracker, channel, *inherited[:]), umask = _receive(link)
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    client.adopt(channel)
    os.umask(umask)
    _buffer_output()
    os.lseek(data, 0, os.SEEK_SET)
    _exit(spawn._main(data, link.detach()))  # type: ignore[attr-defined]


def _buffer_output() -> None:
    """A warm zygote is called with -u, and a spawned process is not."""
    if os.environ.get("PYTHONUNBUFFERED") or not getattr(sys.stdout, "write_through", False):
        return
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(fd, "w", closefd=False)
        raw.name = f"<{name}>"
        by_lines = fd == 2 or raw.isatty()
        new = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, old.errors, line_buffering=by_lines)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _exit(status: int) -> NoReturn:
    """Ends without the destruction of all modules, which takes 70 ms and only frees memory."""
    atexit._run_exitfuncs()
    util._flush_std_streams()  # type: ignore[attr-defined]
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def _take_standard_input() -> socket.socket:
    link = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return link


def _receive(link: socket.socket) -> tuple[list[int], int]:
    """Returns the descriptors that the parent sends, and its umask."""
    link.settimeout(FORK_TIMEOUT)
    found: list[int] = []
    while True:
        data, fds, _, _ = socket.recv_fds(link, 16, MAX_DESCRIPTORS)
        for fd in fds:
            os.set_inheritable(fd, False)
        found += fds
        if not data:
            os._exit(1)  # the parent has ended
        if data != MORE:
            return found, int(data, 8)
