"""The zygote of one run: forks workers for its agent, reports their ends, and ends what is left of them."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
from collections.abc import Sequence

from .preload import RefusedError, Tops, UnfitError, hidden_by, import_all, import_for
from .processes import PR_SET_PDEATHSIG, adopt_orphans, children, prctl, send, send_group
from .worker import THREADS_AT_IMPORT, Request, become, replace_environment, set_blas_threads, threads_wanted

MAX_MESSAGE = 64 << 10
MAX_PAYLOAD = 16 << 20
MAX_DESCRIPTORS = 8
KILL_PAUSE_MS = 10


def receive(channel: socket.socket) -> tuple[bytes, list[int], int]:
    """A message, its descriptors and flags. The descriptors are not inherited, as recv_fds() would have it."""
    data, fds, flags, _ = socket.recv_fds(channel, MAX_MESSAGE, MAX_DESCRIPTORS)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds, flags


class Server:
    """Everything below it is its own to end: when the agent's end of the channel closes, all of it dies."""

    def __init__(self, channel: socket.socket, tops: Tops):
        self._channel = channel
        self._tops = tops
        self._pid = os.getpid()
        self._workers: set[int] = set()
        self._told: set[int] = set()  # orphans that were asked to end
        self._mode = ""  # "term": orphans are asked to end as they appear; "kill": whatever appears is killed
        self._occupied = False  # there may be children, and "empty" was not said since
        self._closing = False
        self._blas_threads = THREADS_AT_IMPORT
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)

    def say(self, *words: object) -> None:
        try:
            self._channel.send(" ".join(map(str, words)).encode(errors="replace")[:MAX_MESSAGE])
        except OSError:
            self._closing = True

    def serve(self) -> Request | None:
        """Until the agent has gone and nothing is left: None. In a forked worker: what it is to be."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._channel, select.POLLIN)
        while self._occupied or not self._closing:
            killing = self._mode == "kill" and self._occupied
            ready = dict(poll.poll(KILL_PAUSE_MS if killing else None))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if self._channel.fileno() in ready:
                request = self._receive()
                if request is not None and self._start(request):
                    return request
            if self._closing and self._mode != "kill":
                poll.unregister(self._channel)
                self._mode = "kill"
            self._look_after()
        return None

    def _receive(self) -> Request | None:
        try:
            data, fds, flags = receive(self._channel)
        except ConnectionResetError:  # the agent has gone without having read all that was said to it
            data, fds, flags = b"", [], 0
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._closing = True
            return None
        verb, _, rest = data.decode(errors="replace").partition(" ")
        if verb == "start" and len(fds) == 4:
            with open(fds[0], "rb") as payload:
                payload.seek(0)
                return Request(rest, payload.read(MAX_PAYLOAD), fds[1:])
        for fd in fds:  # of no message that takes any
            os.close(fd)
        if verb in ("term", "kill"):
            self._occupied = True  # so that "empty" is said, also where there was nothing
            self._mode = verb
            self._told.clear()
            for pid in self._workers:
                send_group(pid, signal.SIGTERM if verb == "term" else signal.SIGKILL)
        elif verb == "left":
            self.say("left", *(f"{pid}\n{name}\n" for pid, name in children().items() if pid not in self._workers))
        return None

    def _start(self, request: Request) -> bool:
        """Forks; true in the child."""
        self._mode = ""
        pid = self._fork(request)
        if pid == 0:
            become(request, self._pid, [self._channel.detach(), self._wake, self._wake_end])
            return True
        for fd in request.stdio:
            os.close(fd)
        if pid < 0:
            return False
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too, for a signal may come before the child has done it
        self._occupied = True
        self._workers.add(pid)
        self.say("started", request.tag, pid)
        return False

    def _fork(self, request: Request) -> int:
        """As os.fork(); -1 where there is no child, and the agent was told why."""
        if not self._occupied and not self._prepare(request):
            return -1
        try:
            return os.fork()
        except OSError as error:
            self.say("failed", request.tag, f"cannot fork a worker: {error.strerror}")
            return -1

    def _prepare(self, request: Request) -> bool:
        if path := hidden_by(request.folder, self._tops.names):
            self.say("unfit", f"{path} comes before a module that the zygote has imported")
            return False
        wanted = threads_wanted(request.environment)
        if wanted not in (0, self._blas_threads):
            set_blas_threads(wanted)
            self._blas_threads = wanted
        if request.script and import_for(request.script):
            self._tops.look()
        replace_environment(request.environment)  # workers then change what differs
        gc.freeze()
        return True

    def _reap(self) -> bool:
        """False when no child is left. waitpid() goes by age: of those that ended since the last look, one that a
        signal ended is told of first, for it is likely to be why the others failed."""
        ended: list[tuple[int, int]] = []
        left = False
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0] != 0:
                self._told.discard(child[0])
                ended.append(child)
            left = True
        for pid, status in sorted(ended, key=lambda child: not os.WIFSIGNALED(child[1])):
            if pid in self._workers:
                self._workers.remove(pid)
                self.say("ended", pid, status)
        return left

    def _look_after(self) -> None:
        if self._mode == "kill":
            for pid in self._workers:
                send_group(pid, signal.SIGKILL)
            for pid in children():
                send(pid, signal.SIGKILL)
        if self._occupied and not self._reap():
            self._occupied = False
            self.say("empty")
        if self._mode == "term" and self._occupied:
            for pid in children():
                if pid not in self._workers and pid not in self._told:
                    self._told.add(pid)
                    send(pid, signal.SIGTERM)


def serve(channel: socket.socket, preload: Sequence[str] | None, tops: Tops) -> Request:
    """Returns in workers. `preload`: None where everything was imported before."""
    adopt_orphans()
    server = Server(channel, tops)
    if preload is not None:
        try:
            import_all(preload)
        except (RefusedError, UnfitError) as error:
            server.say("refused" if isinstance(error, RefusedError) else "unfit", error)
            os._exit(0)
        tops.look()
        prctl(PR_SET_PDEATHSIG, 0)  # from now on the channel tells of the agent's end, and there may be more to end
    server.say("ready", os.getpid())
    request = server.serve()
    if request is None:
        os._exit(0)
    return request
