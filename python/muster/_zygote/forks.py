"""The server of muster.forkserver: forks processes for one program and its descendants.

The program and all processes forked for it send requests over one SOCK_SEQPACKET socket, the channel. When the server
is ready, it sends nothing more over the channel. Each process has a status socket of its own:

    to the server, over the channel                    to the process's parent, over its status socket
    fork   with descriptors (below)                    started PID
                                                       failed TEXT      it could not be started
                                                       ended STATUS     as waitpid() reports it

A fork has the descriptors of `start` (src/muster/launch/workers/zygote.cpp), then the server's end of the status
socket. The words of its command after the fifth are the program's sys.path. A process is killed when the other end of
its status socket is closed: its parent has ended. When the channel is closed, the server kills what is left, and ends.

A warm zygote forks such a server, too. The processes of that server are in another session than the program. When the
program's process group gets a signal, `muster warm attach` sends `signal N` over the channel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import weakref
from collections.abc import Sequence

from .preload import ImportedPackages, shadowing_module
from .processes import send_signal, set_title, use_huge_pages
from .server import Server, read_request, serve
from .worker import FORWARDED_SIGNALS, Request, become_worker

COMMAND_WORDS = 5


class ForkServer(Server):
    # A terminal or a batch system sends these to all processes of a program. The program decides when the server ends.
    ignored_signals = (signal.SIGINT, signal.SIGTERM, *FORWARDED_SIGNALS)

    def __init__(self, channel: socket.socket, packages: ImportedPackages):
        self._handlers = {number: signal.getsignal(number) for number in self.ignored_signals}
        super().__init__(channel, packages)
        self._statuses: dict[int, int] = {}  # pid: the status socket

    def on_imported(self) -> None:
        use_huge_pages()

    def report(self, *words: object) -> None:
        if words[0] == "ended":
            pid, status = words[1:]
            fd = self._statuses.get(int(str(pid)))
            if fd is not None:
                _send(fd, f"ended {status}")
                self._drop_status(int(str(pid)))
        elif words[0] == "failed":
            _send(int(str(words[1])), f"failed {words[2]}")
        elif words[0] != "empty":
            super().report(*words)

    def _on_poll(self, ready: dict[int, int]) -> None:
        for pid, fd in list(self._statuses.items()):
            if fd in ready:
                send_signal(pid, signal.SIGKILL)
                self._drop_status(pid)

    def _drop_status(self, pid: int) -> None:
        fd = self._statuses.pop(pid)
        self._poll.unregister(fd)
        os.close(fd)

    def _signal_workers(self, number: int) -> None:
        os.killpg(0, number)  # also the processes that they have started; this one ignores the signal

    def _read_request(self, verb: str, rest: str, fds: list[int]) -> Request | None:
        return read_request(str(fds.pop()), fds) if verb == "fork" and len(fds) == 5 else None

    def _prepare(self, request: Request) -> bool:
        self._adapt(request)
        # Processes skip the finalizers of the server's objects, such as torch's operators: at exit they take 30 ms.
        for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
            finalizer.atexit = False
        return True

    def _start(self, request: Request) -> bool:
        """Forks a process. Returns True in the child."""
        status = int(request.tag)
        folders = set(request.command[COMMAND_WORDS:]) - set(sys.path)
        del request.command[COMMAND_WORDS:]
        shadows = (shadowing_module(folder, self._packages.names) for folder in folders)
        path = next(filter(None, shadows), "")
        if path:
            self.report("failed", status, f"{path} comes before a module that the fork server has imported")
        pid = -1 if path else self._fork(request)
        if pid == 0:
            unwanted = [self._channel.detach(), self._wake, self._wake_end, status, *self._statuses.values()]
            become_worker(request, self._pid, unwanted, own_group=False)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.signals_before)
            return True
        for fd in request.stdio:
            os.close(fd)
        if pid < 0:
            os.close(status)
            return False
        self._has_children = True
        self._workers.add(pid)
        self._statuses[pid] = status
        self._poll.register(status, 0)  # for POLLHUP
        _send(status, f"started {pid}")
        return False


def _send(status: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the parent has ended
        os.write(status, text.encode(errors="replace"))


def serve_program(channel: socket.socket, preload: Sequence[str], packages: ImportedPackages) -> Request:
    """Returns only in forked processes."""
    set_title([f"muster: fork server of {os.getppid()}"])
    return serve(channel, preload, packages, ForkServer)
