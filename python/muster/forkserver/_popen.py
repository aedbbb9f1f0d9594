"""The parent's side of a forked process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import weakref
from multiprocessing import connection, context, popen_fork, process, reduction, resource_tracker, spawn, util

from muster.forkserver._client import FORK_TIMEOUT, client, memory_file

MAX_DESCRIPTORS = 250  # in one message; the kernel takes 253
MORE = b"+"  # another message follows; the last one has the umask


class InheritedFd:
    """A descriptor that is pickled in the parent."""

    def __init__(self, index: int):
        self._index = index

    def detach(self) -> int:
        from muster.forkserver import _child

        return _child.inherited[self._index]


class Popen(popen_fork.Popen):
    method = "muster"
    DupFd = InheritedFd

    def __init__(self, process_obj: process.BaseProcess):
        self._fds: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj: process.BaseProcess) -> None:
        with memory_file() as data:
            self._pickle(process_obj, data)
            tracker = resource_tracker.getfd()
            assert tracker is not None
            # Our end shows the child that its parent lives. The other end is the child's standard input, which children
            # of multiprocessing close.
            link, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.ExitStack() as on_error, child_end:
                on_error.enter_context(link)
                self.pid, self._status, channel = client.fork(child_end.fileno())
                on_error.pop_all()
            self._link = link
            self.sentinel = self._status.fileno()
            self.finalizer = util.Finalize(self, _close, (self._status, link))
            _popens.add(self)
            # After an error, the child's exit code tells what happened.
            with channel, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                _send_all(link, [data, tracker, channel.fileno(), *self._fds])

    def _pickle(self, process_obj: process.BaseProcess, data: int) -> None:
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            with open(data, "wb", closefd=False) as file:
                reduction.dump(spawn.get_preparation_data(process_obj.name), file)
                reduction.dump(process_obj, file)
        finally:
            context.set_spawning_popen(None)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            if not connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            # Peeks, because several threads may poll.
            kind, _, status = self._status.recv(64, socket.MSG_PEEK).partition(b" ")
            if kind == b"ended":
                self.returncode = os.waitstatus_to_exitcode(int(status))
            else:
                self.returncode = -signal.SIGKILL
                print(
                    f"muster: the fork server has ended, and so process {self.pid} was killed. The next process starts "
                    "another one.",
                    file=sys.stderr,
                )
        return self.returncode

    def _send_signal(self, sig: int) -> None:
        if self.poll() is None:
            super()._send_signal(sig)  # type: ignore[misc]


_popens: weakref.WeakSet[Popen] = weakref.WeakSet()


def _umask() -> bytes:
    """os.umask() would change it for a moment, for all threads."""
    with open("/proc/self/status", "rb") as file:
        return next(line.split()[1] for line in file if line.startswith(b"Umask:"))


def _send_all(link: socket.socket, fds: list[int]) -> None:
    link.settimeout(FORK_TIMEOUT)
    while fds:
        part, fds = fds[:MAX_DESCRIPTORS], fds[MAX_DESCRIPTORS:]
        socket.send_fds(link, [MORE if fds else _umask()], part)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _after_fork() -> None:
    """A child made by os.fork() may start processes, but must not keep those of its parent alive."""
    client.reset_lock()
    for popen in list(_popens):
        _close(popen._status, popen._link)


os.register_at_fork(after_in_child=_after_fork)
