"""Processes and threads, from /proc and prctl(2)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MADV_COLLAPSE = 25
HUGE_PAGE = 2 << 20
_LIBC = ctypes.CDLL(None)


def prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the parent died before the line above took effect


def skip_destructors() -> None:
    """When this process exits, skips the static destructors of the libraries that are loaded now. Those of
    libtorch take 0.15 s and free only memory. Destructors of later libraries still run, and C's streams are flushed.
    """
    if hasattr(_LIBC, "on_exit") and "LD_PRELOAD" not in os.environ:  # a profiler may write its file in a destructor
        _LIBC.on_exit(_LIBC._exit, None)
        _LIBC.on_exit(_LIBC.fcloseall, None)  # runs in reverse order


def children() -> dict[int, str]:
    """Returns the running children of this process, with their names."""
    found = {}
    for pid in _child_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
            state, parent = after.split()[:2]
            if state != "Z" and int(parent) == os.getpid():
                found[pid] = before.partition("(")[2]
    return found


def _child_pids() -> Iterator[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            yield from map(int, file.read().split())
    except FileNotFoundError:  # this kernel has no such file
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def send_signal(pid: int, number: int) -> None:
    """Signals a child. The child must not be reaped yet, so that its pid cannot be reused."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)  # a stopped process does not handle signals


def send_signal_to_group(pid: int, number: int) -> None:
    """Signals the process group that a child leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
        os.killpg(pid, signal.SIGCONT)


def threads() -> dict[int, str]:
    """Returns the threads of this process with their names, without the main thread."""
    names = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            names[int(task)] = file.read().strip()
    names.pop(os.getpid(), None)
    return names


def use_huge_pages() -> None:
    """Moves this process' private memory to huge pages if the kernel can. A fork copies one entry per page, so with
    huge pages a fork after `import torch` takes a quarter of the time. A write in a child still copies only 4 KiB.
    """
    with open("/proc/self/maps") as file:
        areas = [line.split() for line in file]
    for bounds, access, _, _, inode, *_ in areas:
        if access != "rw-p" or inode != "0":
            continue
        begin, end = (int(number, 16) for number in bounds.split("-"))
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if begin < end:
            _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def set_title(words: list[str]) -> None:
    """Sets the command line that ps shows. It overwrites the arguments of this process, and is cut to their length."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: 48 and 49 in proc(5)
    if begin == 0 or end <= begin:
        return
    room = end - begin - 1
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[:room]
    ctypes.memmove(begin, text.ljust(room, b"\0"), room)
