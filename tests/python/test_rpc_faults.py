"""A worker is cut off, stopped or killed in the middle of a call, of a call with a reference, of remote() and of a
backward. What needs it fails, nothing is kept, and the rest goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hosts import Host, hosts_on_a_switch, ip
from launching import Job, free_port

PROGRAM = """
import sys
import threading
import time

import torch
import muster
from muster import rpc
from muster.rpc import _agent, autograd

me, there, meeting = sys.argv[1:]
released, ended = threading.Event(), threading.Event()


@rpc.export
def wait(*kept):
    print("waits", flush=True)
    released.wait(60)


@rpc.export
def release():
    released.set()


@rpc.export
def end():
    ended.set()


@rpc.export
def prepare():
    released.clear()


@rpc.export
def counts():
    agent = _agent.current().agent
    return [*agent.ref_counts(), agent.context_count()]


class Waiting(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        wait()
        return gradient


@rpc.export
def apply(x):
    return Waiting.apply(x)


def a_call():
    rpc.rpc_sync(there, wait)


def a_fork():
    rpc.rpc_sync(there, wait, (rpc.RRef(torch.ones(3)),))


def a_remote():
    rpc.remote(there, wait).to_here()


def a_backward():
    with autograd.context() as context:
        output = rpc.rpc_sync(there, apply, (torch.ones(3, requires_grad=True),))
        autograd.backward(context, [output.sum()])


def answers(function):
    try:
        return rpc.rpc_sync(there, function, timeout=2) or True
    except (muster.PeerLostError, muster.TimeoutError):
        return None


def until(condition):
    deadline = time.monotonic() + 60
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # tidy: allow(sleep) the other host tells nothing
    return result


options = rpc.Options(heartbeat_timeout=1, lease=2, init_method=meeting)
rpc.init_rpc(me, rank=int(me == "second"), world_size=0, rpc_backend_options=options)
if me == "first":
    for case in (a_call, a_fork, a_remote, a_backward):
        rpc.rpc_sync(there, prepare)
        try:
            case()
        except muster.Error as error:
            print(case.__name__, "|", type(error).__name__, "|", str(error).partition(chr(10))[0], flush=True)
        until(lambda: answers(release))
        print(case.__name__, "healed", flush=True)
    until(lambda: counts() == [0, 0, 0])
    until(lambda: answers(counts) == [0, 0, 0])
    print("nothing is kept", flush=True)
    rpc.rpc_sync(there, end)
else:
    ended.wait(600)
rpc.shutdown()
"""


CASES = ("a_call", "a_fork", "a_remote", "a_backward")


def worker(name: str, there: str, meeting: str, script: Path, host: Host | None = None) -> Job:
    return Job([sys.executable, script, name, there, meeting], popen=host.popen if host else subprocess.Popen)


@contextmanager
def closing(*jobs: Job) -> Iterator[None]:
    try:
        yield
    finally:
        for job in jobs:
            job.close()


def expect_failure(first: Job, case: str, reason: str) -> None:
    # A line may come in pieces, and expect() searches stderr after stdout.
    (failure,) = first.expect(rf"{case} \| (\w+) \| (peer lost: .+)\n")
    assert failure[1] == "PeerLostError"
    assert 'worker "second"' in failure[2] and reason in failure[2], failure[2]


def expect_clean_end(first: Job, second: Job) -> None:
    first.expect("nothing is kept")
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err


def silence_in_each_case(first: Job, second: Job, silence: Callable[[], None], heal: Callable[[], None]) -> None:
    """silence() makes the second worker unreachable, and heal() ends that."""
    for done, case in enumerate(CASES, start=1):
        second.expect("waits", done)
        silence()
        expect_failure(first, case, "has not answered a ping for 1 s")
        heal()
        first.expect(f"{case} healed")
    expect_clean_end(first, second)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_cut_network_fails_what_needs_it(script: Path) -> None:
    with hosts_on_a_switch(2) as hosts, ExitStack() as stack:
        first = worker("first", "second", f"tcp://{hosts[0].address}:29500", script, hosts[0])
        second = worker("second", "first", f"tcp://{hosts[0].address}:29500", script, hosts[1])
        stack.enter_context(closing(first, second))
        port = ["-n", hosts[0].namespace.replace("h1", "switch"), "link", "set", "p1"]
        silence_in_each_case(first, second, lambda: ip(*port, "nomaster"), lambda: ip(*port, "master", "br0"))


def test_a_stopped_worker_fails_what_needs_it(script: Path) -> None:
    meeting = f"tcp://127.0.0.1:{free_port()}"
    first, second = worker("first", "second", meeting, script), worker("second", "first", meeting, script)
    with closing(first, second):
        pid = second.process.pid
        silence_in_each_case(first, second, lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT))


def test_a_killed_worker_fails_what_needs_it(script: Path) -> None:
    meeting = f"tcp://127.0.0.1:{free_port()}"
    first, second = worker("first", "second", meeting, script), worker("second", "first", meeting, script)
    with ExitStack() as stack:
        stack.enter_context(closing(first, second))
        for case in CASES:
            second.expect("waits")
            os.kill(second.process.pid, signal.SIGKILL)
            expect_failure(first, case, "")
            second = worker("second", "first", meeting, script)  # another one with this name
            stack.enter_context(closing(second))
            first.expect(f"{case} healed")
        expect_clean_end(first, second)
