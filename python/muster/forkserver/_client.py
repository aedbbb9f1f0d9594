"""The side of a program that asks its fork server for processes. python/muster/_zygote/forks.py is the other side."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import spawn, util
from pathlib import Path

from muster._programs import find_beside

IMPORT_TIMEOUT = 300.0  # seconds, for a fork server to import torch
WARM_TIMEOUT = 2.0  # for a warm zygote to answer, which takes it milliseconds
FORK_TIMEOUT = 60.0
# Imports the zygote's package alone: nothing of muster, and nothing from the current directory.
_LOAD = """import sys
at_start = frozenset(sys.modules)
if not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)
sys.path.append({folder!r})
from _zygote.main import main
sys.path[:] = {path!r}
main({words!r}, at_start, {fd})
"""
# The words of a forked process, as `ps` shows them. The program's sys.path follows them.
_COMMAND = [sys.executable, "-u", "-c", "from muster.forkserver._child import main; main()", "--multiprocessing-fork"]


class ForkServerError(RuntimeError):
    """The fork server cannot start, or cannot fork a process."""


class RefusedError(ForkServerError):
    """The fork server cannot fork this process."""


class LostError(ForkServerError):
    """The fork server has ended."""


class Client:
    """A program's connection to its fork server. Thread-safe."""

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._pid = 0  # of the server, or of `muster warm attach`; 0 in a process that it has forked
        self._channel: socket.socket | None = None
        self._link: socket.socket | None = None  # `muster warm attach` ends when it is closed; None: no warm zygote
        self._ready = False
        self._has_forked = False  # this server has forked a process
        self._may_attach = True
        self.reset_lock()

    def reset_lock(self) -> None:
        self._lock = threading.Lock()  # guards everything above

    def preload(self, modules: Iterable[str]) -> None:
        with self._lock:
            new = [name for name in modules if name not in self._modules]
            if new and self._channel is not None:
                raise ForkServerError(f"the fork server runs already, without {', '.join(new)}: call preload() earlier")
            self._modules += new

    def adopt(self, channel: int) -> None:
        """Uses the server that has forked this process."""
        self._channel = socket.socket(fileno=channel)
        self._ready = True

    def ensure_running(self) -> None:
        with self._lock:
            self._ensure_running()

    def fork(self, stdin: int) -> tuple[int, socket.socket, socket.socket]:
        """Returns the pid of a new process, its status socket, which is readable when the process has ended, and a
        socket with which the process can ask for processes, too.
        """
        try:
            return self._fork(stdin)
        except LostError:  # it was killed, perhaps long ago
            return self._fork(stdin)
        except RefusedError:
            if not self._leave_warm():
                raise
            return self._fork(stdin)

    def _fork(self, stdin: int) -> tuple[int, socket.socket, socket.socket]:
        status, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_error, server_end, memory_file(_payload()) as payload, _outputs() as outputs:
            on_error.enter_context(status)
            channel, duplicate = self._send([payload, stdin, *outputs, server_end.fileno()])
            on_error.enter_context(duplicate)
            server_end.close()
            try:
                kind, _, text = self._answer(status, "fork a process", FORK_TIMEOUT).partition(" ")
            except LostError:
                duplicate.close()
                with self._lock:
                    self._forget(channel)
                raise
            if kind != "started":
                raise RefusedError(f'the fork server refuses: {text}. The start method "spawn" needs no fork server')
            with self._lock:
                self._has_forked = True
            on_error.pop_all()
        return int(text), status, duplicate

    def _send(self, fds: list[int]) -> tuple[socket.socket, socket.socket]:
        """Returns the channel, and a duplicate that stays open if another thread closes the channel."""
        with self._lock:
            channel = self._ensure_running()
            try:
                if not self._ready:
                    self._await_ready(channel)
                channel.settimeout(FORK_TIMEOUT)
                socket.send_fds(channel, [b"fork"], fds)
            except TimeoutError:
                raise ForkServerError(f"{self} took no request within {FORK_TIMEOUT:.0f} s") from None
            except (LostError, BrokenPipeError, ConnectionResetError):
                self._forget(channel)
                raise LostError(f"{self} has ended") from None
            return channel, channel.dup()

    def _ensure_running(self) -> socket.socket:
        if self._channel is None and not self._attach():
            self._start()
        assert self._channel is not None
        return self._channel

    def _attach(self) -> bool:
        """Gets a fork server from the zygote that `muster warm` keeps, if there is one with the same modules."""
        # An agent waits for all processes of its workers, so these must be its descendants.
        is_worker = "MUSTER_RUN_ID" in os.environ
        program = find_beside("muster")
        if program is None or is_worker or _has_options() or not self._may_attach:
            return False
        from muster._zygote.preload import COMMON_MODULES  # not at the top: processes have none of these modules

        self._link, theirs = socket.socketpair()
        with theirs, self._new_channel() as (channel, server_end):
            fds = [theirs.fileno(), channel.fileno(), server_end.fileno()]
            modules = [name for name in self._modules if name not in COMMON_MODULES]
            words = [program, "warm", "attach", *map(str, fds), sys.executable, *modules]
            self._pid = util.spawnv_passfds(os.fsencode(program), words, fds)
        try:
            self._await_ready(channel, WARM_TIMEOUT)
        except ForkServerError:
            self._forget(channel)
            return False
        return True

    def _leave_warm(self) -> bool:
        """Returns False if the server is not that of a warm zygote, or has forked processes, which would be killed."""
        with self._lock:
            if self._link is None or self._has_forked or self._channel is None:
                return False
            self._may_attach = False
            self._forget(self._channel)
            return True

    def _start(self) -> None:
        path = spawn.get_preparation_data("")["sys_path"]
        modules = ["fork", "muster.forkserver._child", *self._modules]
        with self._new_channel() as (_, server_end):
            code = _LOAD.format(folder=str(Path(__file__).parents[1]), path=path, words=modules, fd=server_end.fileno())
            words = [sys.executable, *util._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
            self._pid = util.spawnv_passfds(os.fsencode(sys.executable), words, [server_end.fileno()])

    @contextlib.contextmanager
    def _new_channel(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        channel, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_error, server_end:
            on_error.enter_context(channel)
            yield channel, server_end
            on_error.pop_all()
        self._channel, self._ready, self._has_forked = channel, False, False

    def _await_ready(self, channel: socket.socket, timeout: float = IMPORT_TIMEOUT) -> None:
        # Peeks, because copies of this process, made by os.fork(), wait for the same message. It is the only one here.
        kind, _, text = self._answer(channel, "import torch", timeout, socket.MSG_PEEK).partition(" ")
        if kind != "ready":
            self._forget(channel)
            raise ForkServerError(f"the fork server cannot start: {text.replace('--preload', 'the module')}")
        self._ready = True

    def _answer(self, channel: socket.socket, doing: str, timeout: float, flags: int = 0) -> str:
        channel.settimeout(timeout)
        try:
            data = channel.recv(4096, flags)
        except TimeoutError:
            raise ForkServerError(f"{self} did not {doing} within {timeout:.0f} s") from None
        except ConnectionResetError:
            data = b""
        if not data:
            raise LostError(f"{self} has ended")
        return data.decode(errors="replace")

    def _forget(self, channel: socket.socket) -> None:
        if self._channel is channel:
            self._channel = None
            channel.close()
            if self._link is not None:
                self._link.close()
                self._link = None
            if self._pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._pid, 0)  # it ends: the channel is closed

    def __str__(self) -> str:
        return f"the fork server (pid {self._pid})" if self._pid else "the fork server"


def _has_options() -> bool:
    """True if the interpreter was called with an option. A warm zygote is called with -u alone."""
    options = itertools.takewhile(lambda word: word.startswith("-") and word not in ("-c", "-m"), sys.orig_argv[1:])
    return not {*options} <= {"-u"}


def _payload() -> bytes:
    """What a worker of a zygote gets: CPUs, the number of words, the words, and the environment."""
    path = [word or str(Path.cwd()) for word in sys.path]
    words = [",".join(map(str, os.sched_getaffinity(0))), str(len(_COMMAND) + len(path)), *_COMMAND, *path]
    entries = [name + b"=" + value for name, value in os.environb.items()]
    return b"".join(word + b"\0" for word in [*map(os.fsencode, words), *entries])


@contextlib.contextmanager
def memory_file(content: bytes = b"") -> Iterator[int]:
    fd = os.memfd_create("muster-fork")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _outputs() -> Iterator[list[int]]:
    """Standard output and error. /dev/null replaces one that is closed."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        yield [fd if _is_open(fd) else null for fd in (1, 2)]
    finally:
        os.close(null)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


client = Client()
