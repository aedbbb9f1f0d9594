"""Starts `muster run` for tests, follows its output, and finds processes that it left behind."""

import contextlib
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120.0  # seconds; long enough for a loaded machine
START_TIMEOUT = 5 * TIMEOUT  # for workers that import torch while other programs run


def find_muster() -> str | None:
    """The binary in MUSTER_BIN, in the build directory in use, or on PATH."""
    build = Path(os.environ.get("MUSTER_BUILD_DIR", ROOT / "build/release"))
    for candidate in (os.environ.get("MUSTER_BIN"), build / "src/muster/cli/muster", shutil.which("muster")):
        if candidate and Path(candidate).exists():
            return str(candidate)
    return None


def marked_processes(mark: str) -> list[int]:
    """The running processes that have `mark` in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def free_port() -> int:
    """A port that is free now, for programs that do not accept 0. It is below the system's ephemeral ports."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(10000, 20000))) as free:
            return int(free.getsockname()[1])


def wait_until(done: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # tidy: allow(sleep) no event says that it is done


def write_module_that_opens_a_device(folder: Path) -> Path:
    """Makes opens_a_device.py and returns the device: a file, which the module makes the only one that is checked."""
    device = folder / "nvidia0"
    device.touch()
    (folder / "opens_a_device.py").write_text(
        f"import os, sys\nos.open({str(device)!r}, os.O_RDWR)\n"
        "(checks,) = [m for name, m in sys.modules.items() if name.endswith('zygote.preload')]\n"
        f"checks.DEVICES = ({str(folder / 'nvidia')!r},)\n"
    )
    return device


def call_warm(muster: str, settings: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [muster, "warm", *words]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=TIMEOUT)


@contextlib.contextmanager
def warm_zygote(muster: str, settings: dict[str, str]) -> Iterator[None]:
    started = call_warm(muster, settings)
    assert started.returncode == 0, started.stderr
    yield
    call_warm(muster, settings, "stop")
    wait_until(lambda: call_warm(muster, settings, "status").returncode == 1)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def shown_on_a_terminal(command: Sequence[str | Path], env: dict[str, str]) -> bytes:
    """Runs a program on a terminal, and returns its output. The program must succeed."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        timeout = threading.Timer(TIMEOUT, process.kill)
        timeout.start()
        with contextlib.suppress(OSError):  # a terminal reports its end as an error
            while chunk := os.read(ours, 4096):
                shown += chunk
    timeout.cancel()
    os.close(ours)
    assert process.returncode == 0, shown.decode(errors="replace")
    return shown


class Job:
    """One `muster run`, followed line by line."""

    def __init__(
        self,
        command: Sequence[str | Path],
        env: dict[str, str] | None = None,
        stdin: int | None = None,
        popen: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen,
    ):
        self.mark = f"MUSTER_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self.process = popen(
            [str(word) for word in command],
            # Most programs here need no torch, so they need no process that imports it for them.
            env={**os.environ, name: value, "PET_START_METHOD": "spawn", **(env or {})},
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._news = threading.Condition()
        self._text = {"out": b"", "err": b""}
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        while chunk := os.read(pipe.fileno(), 65536):
            with self._news:
                self._text[name] += chunk
                self._news.notify_all()

    @property
    def out(self) -> str:
        return self._text["out"].decode(errors="replace")

    @property
    def err(self) -> str:
        return self._text["err"].decode(errors="replace")

    @property
    def raw_out(self) -> bytes:
        return self._text["out"]

    def expect(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Waits until `pattern` has appeared `count` times, on stdout or stderr."""
        deadline = time.monotonic() + TIMEOUT
        with self._news:
            while len(found := list(re.finditer(pattern, self.out + self.err))) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"no {pattern!r} x {count} in:\n{self.out}\n{self.err}"
                self._news.wait(left)
        return found

    def agent(self) -> int:
        """The pid of the agent: the only child of the process that was started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self) -> int:
        """Waits for the process and for the end of its output. Returns the exit status (negative: a signal)."""
        status = self.process.wait(TIMEOUT)
        for reader in self._readers:
            reader.join(TIMEOUT)
        return status

    def left_behind(self) -> list[int]:
        """The job's processes that are still there after a long time. Returns at once when there are none."""
        deadline = time.monotonic() + TIMEOUT / 2
        while (left := marked_processes(self.mark)) and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return left

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in marked_processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Launch = Callable[..., Job]
