"""Store servers, each in a process that ends with its `with` block."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

from muster._programs import find_program
from muster.bench.report import BenchFailedError

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
# The load generator's clients come from 127.0.0.1 and the addresses after it.
_SOURCES = 16
_DESCRIPTORS = 1 << 18


LOAD = "muster-store-load"


@dataclass
class Server:
    """A process with one or more servers."""

    addresses: list[str]  # host:port, with PyTorch's protocol
    pid: int
    urls: list[str] = field(default_factory=list)  # with muster's protocol
    secret: str = ""


@contextlib.contextmanager
def muster_server(*options: str, secret: str = "") -> Iterator[Server]:
    """Runs the root of muster's store, or with `options` another server of `muster-store-load serve`."""
    command = [find_program(LOAD), "serve", *options]
    environment = os.environ | {"MUSTER_SECRET": secret}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            said = process.stdout.readline()
            if not said:
                raise BenchFailedError(f"muster's store server does not run: {process.stderr.read().strip()}")
            addresses = json.loads(said)
            yield Server(addresses["torch"], process.pid, addresses["muster"], secret)
        finally:
            process.kill()


@contextlib.contextmanager
def torch_server(*, resolvable: bool = True) -> Iterator[Server]:
    """Runs torch's libuv TCPStore.

    resolvable: gives the process a hosts file with the clients' addresses, because the server looks up the name of
    each client in its only thread. If that is impossible, a note is printed and the machine's resolver answers.
    """
    context = multiprocessing.get_context("fork")  # torch is imported already
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_torch, args=(theirs, resolvable), daemon=True)
    process.start()
    theirs.close()
    try:
        port = _receive(ours)
        assert process.pid is not None
        yield Server([f"127.0.0.1:{port}"], process.pid)
    finally:
        process.kill()
        process.join()


def _receive(pipe: Connection) -> int:
    try:
        if not pipe.poll(60):
            raise BenchFailedError("torch's TCPStore server did not start in time")
        port, problem = pipe.recv()
    except EOFError:
        raise BenchFailedError("torch's TCPStore server ended before it listened") from None
    if problem:
        print(f"note: {problem}", file=sys.stderr)
    return int(port)


def _serve_torch(pipe: Connection, resolvable: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel ends this process if the parent is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    from torch._C._distributed_c10d import TCPStore

    problem = ""
    if resolvable:
        try:
            see_names_of_loopback()
        except OSError as error:
            problem = f"torch's server may wait for name lookups: {error}"
    limit = timedelta(seconds=60)
    with contextlib.suppress(ValueError, OSError):  # for as many clients as muster's server takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=limit, wait_for_workers=False, use_libuv=True)
    pipe.send((store.port, problem))
    signal.pause()  # until the parent kills this process


def see_names_of_loopback() -> None:
    """Gives this process its own hosts file in a mount namespace. Existing threads do not see it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(status: int, what: str) -> None:
        if status != 0:
            raise OSError(ctypes.get_errno(), what)

    namespaces = _CLONE_NEWNS if os.geteuid() == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    check(libc.unshare(namespaces), "cannot make a mount namespace")
    check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "cannot make mounts private")
    with tempfile.NamedTemporaryFile("w", prefix="muster-bench-hosts-") as hosts:
        hosts.write("127.0.0.1 localhost\n::1 localhost\n")
        hosts.writelines(f"::ffff:127.0.0.{i} localhost\n" for i in range(1, 1 + _SOURCES))
        hosts.flush()
        bound = libc.mount(os.fsencode(hosts.name), b"/etc/hosts", None, _MS_BIND, None)
        check(bound, "cannot mount a hosts file")
