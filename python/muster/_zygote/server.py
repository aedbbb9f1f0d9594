"""The zygote of one run: forks workers for its agent, reports their exits, and ends their orphans."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence

from .preload import ImportedPackages, RefusedError, UnfitError, freeze, import_all, import_for, shadowing_module
from .processes import PR_SET_PDEATHSIG, adopt_orphans, children, prctl, send_signal, send_signal_to_group
from .worker import (
    FORWARDED_SIGNALS,
    THREADS_AT_IMPORT,
    Request,
    become_worker,
    replace_environment,
    set_blas_threads,
    threads_wanted,
)

MAX_MESSAGE = 64 << 10
MAX_PAYLOAD = 16 << 20
MAX_DESCRIPTORS = 8
KILL_PAUSE_MS = 10


def receive(channel: socket.socket) -> tuple[bytes, list[int], int]:
    """Returns a message, its descriptors and flags. Unlike recv_fds(), makes the descriptors non-inheritable."""
    data, fds, flags, _ = socket.recv_fds(channel, MAX_MESSAGE, MAX_DESCRIPTORS)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds, flags


def read_request(tag: str, fds: Sequence[int]) -> Request:
    """`fds`: a file with the payload, then standard input, output and error."""
    with open(fds[0], "rb") as payload:
        payload.seek(0)
        return Request(tag, payload.read(MAX_PAYLOAD), fds[1:4])


class Server:
    """Forks the workers of one run. Kills all of its descendants when the agent closes its end of the channel."""

    ignored_signals: tuple[signal.Signals, ...] = FORWARDED_SIGNALS  # a scheduler may send them to a whole job

    def __init__(self, channel: socket.socket, packages: ImportedPackages):
        self._channel = channel
        self._packages = packages
        self._pid = os.getpid()
        self.signals_before: set[int] = set()  # those that were blocked before a fork
        self._workers: set[int] = set()
        self._asked_to_end: set[int] = set()  # orphans that got SIGTERM
        self._mode = ""  # "term": SIGTERM for each new orphan; "kill": SIGKILL for all children
        self._has_children = False  # there may be children, and "empty" has not been reported since
        self._closing = False
        self._blas_threads = THREADS_AT_IMPORT
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in self.ignored_signals:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(self._channel, select.POLLIN)

    def report(self, *words: object) -> None:
        try:
            self._channel.send(" ".join(map(str, words)).encode(errors="replace")[:MAX_MESSAGE])
        except OSError:
            self._closing = True

    def serve(self) -> Request | None:
        """Returns None after the agent has gone and no child is left. In a forked worker, returns the worker's
        request.
        """
        while self._has_children or not self._closing:
            killing = self._mode == "kill" and self._has_children
            ready = dict(self._poll.poll(KILL_PAUSE_MS if killing else None))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if self._channel.fileno() in ready:
                request = self._receive()
                if request is not None and self._start(request):
                    return request
            self._on_poll(ready)
            if self._closing and self._mode != "kill":
                self._poll.unregister(self._channel)
                self._mode = "kill"
            self._check_children()
        return None

    def on_imported(self) -> None:
        """Called before the first fork."""

    def _on_poll(self, ready: dict[int, int]) -> None:
        """For other descriptors that a subclass polls."""

    def _receive(self) -> Request | None:
        try:
            data, fds, flags = receive(self._channel)
        except ConnectionResetError:  # the agent closed the channel before it read all reports
            data, fds, flags = b"", [], 0
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._closing = True
            return None
        verb, _, rest = data.decode(errors="replace").partition(" ")
        request = self._read_request(verb, rest, fds)
        if request is not None:
            return request
        for fd in fds:  # this message takes no descriptors
            os.close(fd)
        if verb in ("term", "kill"):
            self._has_children = True  # so that "empty" is reported in any case
            self._mode = verb
            self._asked_to_end.clear()
        if verb in ("signal", "term", "kill"):
            self._signal_workers(int(rest or signal.SIGKILL))
        elif verb == "left":
            self.report("left", *(f"{pid}\n{name}\n" for pid, name in children().items() if pid not in self._workers))
        return None

    def _signal_workers(self, number: int) -> None:
        send = send_signal_to_group if number in (signal.SIGTERM, signal.SIGKILL) else os.kill
        for pid in self._workers:
            send(pid, number)

    def _read_request(self, verb: str, rest: str, fds: list[int]) -> Request | None:
        return read_request(rest, fds) if verb == "start" and len(fds) == 4 else None

    def _start(self, request: Request) -> bool:
        """Forks a worker. Returns True in the child."""
        self._mode = ""
        pid = self._fork(request)
        if pid == 0:
            become_worker(request, self._pid, [self._channel.detach(), self._wake, self._wake_end])
            signal.pthread_sigmask(signal.SIG_SETMASK, self.signals_before)
            return True
        for fd in request.stdio:
            os.close(fd)
        if pid < 0:
            return False
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here as well, because a signal may come before the child has called it
        self._has_children = True
        self._workers.add(pid)
        self.report("started", request.tag, pid)
        return False

    def _fork(self, request: Request) -> int:
        """Like os.fork(), but reports a failure to the agent and then returns -1. In the child, the signals that this
        process ignores are blocked: they wait until the child has handlers of its own and unblocks them.
        """
        if not self._has_children and not self._prepare(request):
            return -1
        self.signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, self.ignored_signals)
        pid = -1
        try:
            pid = os.fork()
        except OSError as error:
            self.report("failed", request.tag, f"cannot fork a worker: {error.strerror}")
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.signals_before)
        return pid

    def _prepare(self, request: Request) -> bool:
        if path := shadowing_module(request.folder, self._packages.names):
            self.report("unfit", f"{path} comes before a module that the zygote has imported")
            return False
        self._adapt(request)
        return True

    def _adapt(self, request: Request) -> None:
        """Does once what every worker would have to do."""
        wanted = threads_wanted(request.environment, request.cpus)
        if wanted != self._blas_threads:
            set_blas_threads(wanted)
            self._blas_threads = wanted
        if request.script and import_for(request.script):
            self._packages.update()
        replace_environment(request.environment)  # so that workers change little of it
        freeze()

    def _reap(self) -> bool:
        """Returns False when no child is left. waitpid() reports the oldest child first. Here children that a signal
        killed come first, because their death is probably the reason why the others failed.
        """
        ended: list[tuple[int, int]] = []
        left = False
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0] != 0:
                self._asked_to_end.discard(child[0])
                ended.append(child)
            left = True
        for pid, status in sorted(ended, key=lambda child: not os.WIFSIGNALED(child[1])):
            if pid in self._workers:
                self._workers.remove(pid)
                self.report("ended", pid, status)
        return left

    def _check_children(self) -> None:
        if self._mode == "kill":
            for pid in self._workers:
                send_signal_to_group(pid, signal.SIGKILL)
            for pid in children():
                send_signal(pid, signal.SIGKILL)
        if self._has_children and not self._reap():
            self._has_children = False
            self.report("empty")
        if self._mode == "term" and self._has_children:
            for pid in children():
                if pid not in self._workers and pid not in self._asked_to_end:
                    self._asked_to_end.add(pid)
                    send_signal(pid, signal.SIGTERM)


def serve(
    channel: socket.socket, preload: Sequence[str] | None, packages: ImportedPackages, kind: type[Server] = Server
) -> Request:
    """Returns only in workers. `preload`: None if all modules are imported already."""
    adopt_orphans()
    server = kind(channel, packages)
    if preload is not None:
        try:
            import_all(preload)
        except (RefusedError, UnfitError) as error:
            server.report("refused" if isinstance(error, RefusedError) else "unfit", error)
            os._exit(0)
        packages.update()
        server.on_imported()
        prctl(PR_SET_PDEATHSIG, 0)  # from now on the channel shows the agent's death, and there may be children to end
    server.report("ready", os.getpid())
    request = server.serve()
    if request is None:
        os._exit(0)
    return request
