"""The zygote that `muster warm` keeps between runs. It forks another zygote for each run, and a fork server for each
program that uses muster.forkserver.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence

from .forks import ForkServer
from .preload import COMMON_MODULES, ImportedPackages, RefusedError, UnfitError, import_all
from .processes import PR_SET_CHILD_SUBREAPER, adopt_orphans, children, prctl, send_signal, set_title, use_huge_pages
from .server import Server, receive, serve
from .worker import Request

CLIENT_TIMEOUT = 2.0  # for a client to send its request
# The clients that get a forked zygote, by their request: the agent of a run, and a program of muster.forkserver.
SERVERS = {b"run": Server, b"fork": ForkServer}
# Properties that must be equal in the agent and in the zygote, because a fork passes them to the workers.
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
STATUS = ("Uid:", "Gid:", "Groups:", "CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:")


class Fingerprint:
    """The modification times of the imported files and of the directories in which modules are searched."""

    def __init__(self) -> None:
        self._states = {path: _state(path) for path in self._paths()}

    def is_current(self) -> bool:
        return all(_state(path) == state for path, state in self._states.items())

    @staticmethod
    def _paths() -> set[str]:
        paths = {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
        for folder in filter(os.path.isdir, sys.path):
            paths.add(folder)
            paths.update(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))
        return {*paths, os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")}


def _state(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size


class WarmZygote:
    def __init__(self, listener: socket.socket, inode: int, idle: float, preload: Sequence[str]):
        self._listener = listener
        self._path = listener.getsockname()
        self._inode = inode
        self._idle = idle
        self._preload = preload
        self._runs: set[int] = set()
        self._served = 0  # runs since the imports, with those that have ended
        self._ends_at = time.monotonic() + idle
        self._stopping = False
        self._fingerprint: Fingerprint | None = None
        self._failure = ""
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)

    def warm_up(self) -> None:
        try:
            import_all(self._preload, COMMON_MODULES)
            self._fingerprint = Fingerprint()
            use_huge_pages()
        except (RefusedError, UnfitError) as error:
            self._failure = str(error)
            self._stopping = True  # stops after the client that started this zygote has read the failure
        self._ends_at = time.monotonic() + self._idle

    def serve_clients(self) -> tuple[socket.socket, type[Server]] | None:
        """Returns None when it was stopped or idle. In a forked zygote, returns the channel to its client and what it
        serves there.
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        if self._failure and poll.poll(CLIENT_TIMEOUT * 1e3):
            self._serve_client()
        while self._runs or not self._stopping:
            if self._runs:
                self._ends_at = time.monotonic() + self._idle
            left = max(0.0, self._ends_at - time.monotonic())
            ready = dict(poll.poll(None if self._runs else left * 1e3 + 1))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            self._reap()
            if self._listener.fileno() in ready:
                forked = self._serve_client()
                if forked is not None:
                    return forked
            elif not self._runs and time.monotonic() >= self._ends_at:
                self._stop()
            if self._stopping and self._listener.fileno() >= 0:
                poll.unregister(self._listener)
                self._stop_listening()
        self._stop_listening()
        return None

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            with contextlib.suppress(OSError):
                if os.lstat(self._path).st_ino == self._inode:  # otherwise the path belongs to a successor
                    os.unlink(self._path)
                    _remove_if_unused(os.path.dirname(self._path))
            self._listener.close()

    def _reap(self) -> None:
        """Reaps the zygotes of runs, and kills the orphans of killed zygotes."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._runs.discard(pid)
        for pid in children():
            if pid not in self._runs:
                send_signal(pid, signal.SIGKILL)

    def _serve_client(self) -> tuple[socket.socket, type[Server]] | None:
        client, _ = self._listener.accept()
        with client:
            pid, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid():
                return None
            client.settimeout(CLIENT_TIMEOUT)
            try:
                data, fds, _ = receive(client)
                if data in SERVERS and len(fds) == 2:
                    channel = socket.socket(fileno=fds[0])
                    return (channel, SERVERS[data]) if self._fork(pid, SERVERS[data], channel, fds[1]) else None
                for fd in fds:
                    os.close(fd)
                if data == b"stop":
                    self._stopping = True
                client.send(self._status_text().encode(errors="replace"))
            except OSError:
                pass  # the client has closed the connection
        return None

    def _status_text(self) -> str:
        """Returns one line with a name and a value for each fact."""
        facts = {
            "pid": os.getpid(),
            "python": sys.executable,
            "preload": ",".join(self._preload),
            "runs": len(self._runs),
            "served": self._served,
            "left": round(max(0.0, self._ends_at - time.monotonic())),
            "failure": self._failure,
        }
        return "".join(f"{name} {value}\n" for name, value in facts.items())

    def _fork(self, client: int, server: type[Server], channel: socket.socket, output: int) -> bool:
        """Forks a zygote for the client. Returns True in the child."""
        pid = -1
        if self._failure:
            _refuse(channel, self._failure)
        elif self._fingerprint is None or not self._fingerprint.is_current():
            _refuse(channel, "a module that the warm zygote imported has changed; it restarts")
            if not self._runs:
                self._start_again()
        elif reason := _incompatibility(client):
            _refuse(channel, reason)
        else:
            pid = os.fork()
        if pid == 0:
            try:
                self._adopt_context(client, output)
                set_title([f"muster: {_title(client, server)}"])
            except (OSError, ValueError) as error:
                _refuse(channel, f"the warm zygote cannot take over the run's settings: {error}")
                os._exit(0)
            return True
        if pid > 0:
            self._runs.add(pid)
            self._served += 1
        channel.close()
        os.close(output)
        return False

    def _adopt_context(self, client: int, output: int) -> None:
        """Applies the state that a child of the client would have inherited."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in (self._wake, self._wake_end, self._listener.detach()):
            os.close(fd)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.chdir(f"/proc/{client}/cwd")
        os.umask(int(_status(client)["Umask:"], 8))
        for name in dir(resource):
            if name.startswith("RLIMIT_"):
                kind = getattr(resource, name)
                resource.setrlimit(kind, resource.prlimit(client, kind))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, client))
        os.sched_setaffinity(0, os.sched_getaffinity(client))
        _enter_cgroup(client)

    def _start_again(self) -> None:
        """Restarts the interpreter in this process. During the restart, new clients wait in the listener's queue."""
        text = os.memfd_create("muster-zygote")
        os.write(text, sys.modules[str(__package__)].TEXT.encode())
        os.lseek(text, 0, os.SEEK_SET)
        socket_copy = os.dup(self._listener.fileno())
        os.dup2(text, 3)
        os.dup2(socket_copy, 4)
        os.execv(sys.executable, sys.orig_argv)


def _remove_if_unused(folder: str) -> None:
    """Does what remove_user_directory() in private_directories.h does. Raises OSError if the directory stays."""
    import fcntl

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # `muster warm` may be about to use it
        os.rmdir(folder)
    finally:
        os.close(fd)


def _refuse(channel: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        channel.send(f"unfit {reason}".encode(errors="replace"))


def _status(pid: int | str) -> dict[str, str]:
    with open(f"/proc/{pid}/status", errors="replace") as file:
        return {words[0]: " ".join(words[1:]) for words in map(str.split, file) if words}


def _title(client: int, server: type[Server]) -> str:
    # The client of a fork server is `muster warm attach`, a child of the program.
    return f"fork server of {_status(client)['PPid:']}" if server is ForkServer else f"zygote of the run of {client}"


def _incompatibility(agent: int) -> str:
    """Returns why a fork of this process cannot replace a child of the agent, or an empty string."""
    try:
        for name in NAMESPACES:
            if os.readlink(f"/proc/self/ns/{name}") != os.readlink(f"/proc/{agent}/ns/{name}"):
                return f"the warm zygote is in another {name} namespace"
        own, other = _status("self"), _status(agent)
        for name in STATUS:
            if own.get(name) != other.get(name):
                return f"the warm zygote has other rights ({name.strip(':')} in /proc/PID/status)"
        if os.readlink("/proc/self/root") != os.readlink(f"/proc/{agent}/root"):
            return "the warm zygote has another root directory"
    except OSError as error:
        return f"the warm zygote cannot see the run: {error}"
    return ""


def _cgroup(pid: int | str) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read()


def _enter_cgroup(agent: int) -> None:
    """Applies the limits and accounting of the run's cgroup. Ignores differences between a user's own sessions."""
    own, other = _cgroup("self"), _cgroup(agent)
    if own == other:
        return
    path = next((line[3:].strip() for line in other.splitlines() if line.startswith("0::")), "")
    try:
        with open(f"/sys/fs/cgroup{path}/cgroup.procs", "w") as file:
            file.write("0")
    except OSError:
        if "/user.slice/" not in own or "/user.slice/" not in other:
            raise


keep_alive: list[WarmZygote] = []  # never freed, because in a worker this would copy thousands of shared pages


def serve_runs(listener: socket.socket, words: Sequence[str], packages: ImportedPackages) -> Request:
    """Returns only in workers. `words`: the idle timeout in seconds, the inode of the listener's path when it was
    bound, then the modules to preload.
    """
    adopt_orphans()
    idle, inode, *preload = words
    os.chdir("/")
    warm = WarmZygote(listener, int(inode), float(idle), preload)
    keep_alive.append(warm)
    set_title(["muster: warm zygote", sys.executable, *preload])
    warm.warm_up()
    packages.update()
    forked = warm.serve_clients()
    if forked is None:
        os._exit(0)
    prctl(PR_SET_CHILD_SUBREAPER, 0)
    channel, server = forked
    return serve(channel, None, packages, server)
