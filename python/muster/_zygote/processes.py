"""Processes and their threads, as the kernel shows them."""

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
    """From now on a descendant whose parent dies becomes this process' child."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """The kernel kills this process when `parent`, which forked it, dies."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # it died before the line above took effect


def skip_destructors() -> None:
    """When this process exits, the static destructors of what is loaded by now are left out: libtorch's take 0.15 s, to
    free what the kernel frees anyway. Those of later libraries still run, and C's streams are flushed."""
    if hasattr(_LIBC, "on_exit") and "LD_PRELOAD" not in os.environ:  # a profiler may write its file in one
        _LIBC.on_exit(_LIBC._exit, None)
        _LIBC.on_exit(_LIBC.fcloseall, None)  # the last one is called first


def children() -> dict[int, str]:
    """This process' children that still run, with their names."""
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
    except FileNotFoundError:  # a kernel without it
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def send(pid: int, number: int) -> None:
    """To a child that is not reaped: nobody else can have its number."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)  # a stopped process would never see it


def send_group(pid: int, number: int) -> None:
    """To the group that a child leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
        os.killpg(pid, signal.SIGCONT)


def threads() -> dict[int, str]:
    """The threads of this process beside its first, with their names."""
    names = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            names[int(task)] = file.read().strip()
    names.pop(os.getpid(), None)
    return names


def use_huge_pages() -> None:
    """Lays this process' own memory in huge pages where the kernel can: a fork copies an entry for each page, and one
    of a process that has imported torch then takes a quarter of the time. A child's write still copies 4 KiB only."""
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
    """What ps shows: takes the place of this process' arguments, as far as they reach."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: 48 and 49 in proc(5)
    if begin == 0 or end <= begin:
        return
    room = end - begin - 1
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[:room]
    ctypes.memmove(begin, text.ljust(room, b"\0"), room)
