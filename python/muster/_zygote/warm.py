"""The zygote that `muster warm` keeps between runs: for each run it forks one of its own, which serves that run."""

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

from .preload import RefusedError, Tops, UnfitError, import_all
from .processes import PR_SET_CHILD_SUBREAPER, adopt_orphans, children, prctl, send, set_title, use_huge_pages
from .server import receive, serve
from .worker import Request

CLIENT_TIMEOUT = 2.0  # for one of the user's own processes to say what it wants
# What a training script is likely to import next, and what nobody waits for here.
ALSO = ("torch._dynamo", "torch.utils.data", "torch.distributed.fsdp", "torch.distributed.tensor")
# What must be alike in whoever asks and in the zygote: a fork gives it to the workers.
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
STATUS = ("Uid:", "Gid:", "Groups:", "CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:")


class Fingerprint:
    """What was imported, and where more would be looked for, with their times of change."""

    def __init__(self) -> None:
        self._seen = {path: _state(path) for path in self._paths()}

    def holds(self) -> bool:
        return all(_state(path) == state for path, state in self._seen.items())

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


class Warm:
    def __init__(self, listener: socket.socket, inode: int, idle: float, preload: Sequence[str]):
        self._listener = listener
        self._path = listener.getsockname()
        self._inode = inode
        self._idle = idle
        self._preload = preload
        self._runs: set[int] = set()
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
            import_all(self._preload, ALSO)
            self._fingerprint = Fingerprint()
            use_huge_pages()
        except (RefusedError, UnfitError) as error:
            self._failure = str(error)
            self._stopping = True  # once whoever started this has been told
        self._ends_at = time.monotonic() + self._idle

    def keep(self) -> socket.socket | None:
        """Until it is no longer wanted: None. In a forked zygote: its channel to the agent of its run."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        if self._failure and poll.poll(CLIENT_TIMEOUT * 1e3):
            self._answer()
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
                channel = self._answer()
                if channel is not None:
                    return channel
            elif not self._runs and time.monotonic() >= self._ends_at:
                self._stop()
            if self._stopping and self._listener.fileno() >= 0:
                poll.unregister(self._listener)
                self._leave()
        self._leave()
        return None

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _leave(self) -> None:
        if self._listener.fileno() >= 0:
            with contextlib.suppress(OSError):
                if os.lstat(self._path).st_ino == self._inode:  # else it is that of a successor
                    os.unlink(self._path)
            self._listener.close()

    def _reap(self) -> None:
        """A run's zygote ends what it forked; what is left of one that was killed itself ends here."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._runs.discard(pid)
        for pid in children():
            if pid not in self._runs:
                send(pid, signal.SIGKILL)

    def _answer(self) -> socket.socket | None:
        client, _ = self._listener.accept()
        with client:
            pid, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid():
                return None
            client.settimeout(CLIENT_TIMEOUT)
            try:
                data, fds, _ = receive(client)
                if data == b"run" and len(fds) == 2:
                    return self._run(pid, socket.socket(fileno=fds[0]), fds[1])
                for fd in fds:
                    os.close(fd)
                if data == b"stop":
                    self._stopping = True
                client.send(self._describe().encode(errors="replace"))
            except OSError:
                pass  # it went away
        return None

    def _describe(self) -> str:
        """Lines of a name and a value."""
        facts = {
            "pid": os.getpid(),
            "python": sys.executable,
            "preload": ",".join(self._preload),
            "runs": len(self._runs),
            "left": round(max(0.0, self._ends_at - time.monotonic())),
            "failure": self._failure,
        }
        return "".join(f"{name} {value}\n" for name, value in facts.items())

    def _run(self, agent: int, channel: socket.socket, output: int) -> socket.socket | None:
        """Forks a zygote for the run; its channel in the child."""
        pid = -1
        if self._failure:
            _refuse(channel, self._failure)
        elif self._fingerprint is None or not self._fingerprint.holds():
            _refuse(channel, "what the warm zygote imported has changed since; it is made anew")
            if not self._runs:
                self._start_again()
        elif reason := _difference(agent):
            _refuse(channel, reason)
        else:
            pid = os.fork()
        if pid == 0:
            try:
                self._become_run(agent, output)
            except (OSError, ValueError) as error:
                _refuse(channel, f"the warm zygote cannot be what the run is: {error}")
                os._exit(0)
            return channel
        if pid > 0:
            self._runs.add(pid)
        channel.close()
        os.close(output)
        return None

    def _become_run(self, agent: int, output: int) -> None:
        """Takes from the agent what its own child would have inherited."""
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
        os.chdir(f"/proc/{agent}/cwd")
        os.umask(int(_status(agent)["Umask:"], 8))
        for name in dir(resource):
            if name.startswith("RLIMIT_"):
                kind = getattr(resource, name)
                resource.setrlimit(kind, resource.prlimit(agent, kind))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, agent))
        os.sched_setaffinity(0, os.sched_getaffinity(agent))
        _enter_cgroup(agent)
        set_title([f"muster: zygote of the run of {agent}"])

    def _start_again(self) -> None:
        """The same process with a fresh interpreter; whoever connects meanwhile waits in the listener's queue."""
        text = os.memfd_create("muster-zygote")
        os.write(text, sys.modules[str(__package__)].TEXT.encode())
        os.lseek(text, 0, os.SEEK_SET)
        socket_copy = os.dup(self._listener.fileno())
        os.dup2(text, 3)
        os.dup2(socket_copy, 4)
        os.execv(sys.executable, sys.orig_argv)


def _refuse(channel: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        channel.send(f"unfit {reason}".encode(errors="replace"))


def _status(pid: int | str) -> dict[str, str]:
    with open(f"/proc/{pid}/status", errors="replace") as file:
        return {words[0]: " ".join(words[1:]) for words in map(str.split, file) if words}


def _difference(agent: int) -> str:
    """Why a fork of this process would not be what a child of the agent is; empty when it would."""
    try:
        for name in NAMESPACES:
            if os.readlink(f"/proc/self/ns/{name}") != os.readlink(f"/proc/{agent}/ns/{name}"):
                return f"the warm zygote is in another {name} namespace"
        own, other = _status("self"), _status(agent)
        for name in STATUS:
            if own.get(name) != other.get(name):
                return f"the warm zygote has other rights ({name.strip(':')} in /proc/PID/status)"
        if os.readlink("/proc/self/root") != os.readlink(f"/proc/{agent}/root"):
            return "the warm zygote has another root folder"
    except OSError as error:
        return f"the warm zygote cannot see the run: {error}"
    return ""


def _cgroup(pid: int | str) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read()


def _enter_cgroup(agent: int) -> None:
    """The run's limits and accounts hold for its workers too. The user's own sessions may differ."""
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


kept: list[Warm] = []  # never freed: in a worker that would copy thousands of the pages that it shares


def keep(listener: socket.socket, words: Sequence[str], tops: Tops) -> Request:
    """`words`: seconds without a run after which it ends, the inode of the listener's path when it was bound, then the
    modules to preload. Returns in workers only."""
    adopt_orphans()
    idle, inode, *preload = words
    os.chdir("/")
    warm = Warm(listener, int(inode), float(idle), preload)
    kept.append(warm)
    set_title(["muster: warm zygote", sys.executable, *preload])
    warm.warm_up()
    tops.look()
    channel = warm.keep()
    if channel is None:
        os._exit(0)
    prctl(PR_SET_CHILD_SUBREAPER, 0)
    return serve(channel, None, tops)
