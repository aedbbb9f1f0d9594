"""Remote calls, references and a backward between two hosts whose network is cut in the middle of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts import Host, hosts_on_a_switch, ip
from launching import Job

PROGRAM = """
import sys
import threading
import time

import torch
import muster
from muster import rpc
from muster.rpc import _agent, autograd

me, there = sys.argv[1:]
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


options = rpc.Options(heartbeat_timeout=1, lease=2, init_method="tcp://10.78.0.1:29500")
rpc.init_rpc(me, rank=int(me == "second"), world_size=2, rpc_backend_options=options)
if me == "first":
    for case in (a_call, a_fork, a_remote, a_backward):
        rpc.rpc_sync(there, prepare)
        began = time.monotonic()
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
    ended.wait(600)  # shutdown() would fail: it waits for workers that must not be lost
rpc.shutdown()
"""


@contextmanager
def worker(host: Host, name: str, there: str, script: Path) -> Iterator[Job]:
    job = Job([sys.executable, script, name, there], popen=host.popen)
    try:
        yield job
    finally:
        job.close()


def test_what_is_cut_off_fails_and_the_rest_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with (
        hosts_on_a_switch(2) as (one, other),
        worker(one, "first", "second", script) as first,
        worker(other, "second", "first", script) as second,
    ):
        switch = one.namespace.replace("h1", "switch")
        for done, case in enumerate(("a_call", "a_fork", "a_remote", "a_backward"), start=1):
            second.expect("waits", done)
            ip("-n", switch, "link", "set", "p1", "nomaster")
            (failure,) = first.expect(rf"{case} \| (\w+) \| (.*)")
            print(failure[0])
            assert failure[1] == "PeerLostError"
            assert 'worker "second"' in failure[2] and "has not answered a ping for 1 s" in failure[2]
            ip("-n", switch, "link", "set", "p1", "master", "br0")
            first.expect(f"{case} healed")
        first.expect("nothing is kept")
        assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
