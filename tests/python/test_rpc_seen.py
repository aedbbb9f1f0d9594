"""What users see of remote calls from outside: `muster dump`, `muster rpc top`, `muster trace` and muster.dump()."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import find_muster, shown_on_a_terminal, wait_until
from rpc_workers import run_workers

import muster
from muster import rpc

# The worker "ps" hangs in train.pull for as long as the file "go" is missing. "trainer" calls it, and other functions.
PROGRAM = """
import sys, threading, time
from pathlib import Path
import torch.distributed as dist
from muster import rpc

name, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

def pull(rows):
    while not (folder / "go").exists():
        time.sleep(0.01)  # tidy: allow(sleep) this function hangs, by purpose
    return rows

def push(rows):
    return len(rows)

rpc.init_rpc(name, rank=rank, world_size=2, store=dist.FileStore(str(folder / "store")))
print("ready", flush=True)
if name == "trainer":
    pulled = rpc.rpc_async("ps", pull, ([1, 2, 3],))
    while not (folder / "go").exists():
        assert rpc.rpc_sync("ps", push, ([1],)) == 1
        time.sleep(0.001)  # tidy: allow(sleep) a load of about a thousand calls per second
    assert pulled.wait() == [1, 2, 3]
rpc.shutdown()
"""


class Hang:
    """The two processes of the program above."""

    def __init__(self, folder: Path) -> None:
        command = find_muster()
        assert command is not None
        self.muster, self.folder = command, folder
        script = folder / "train.py"
        script.write_text(PROGRAM)
        self.workers = [
            subprocess.Popen([sys.executable, script, name, str(rank), folder], stdout=subprocess.PIPE, cwd=folder)
            for rank, name in enumerate(["ps", "trainer"])
        ]
        self.pids = [str(worker.pid) for worker in self.workers]

    def run(self, *words: str) -> str:
        return subprocess.run([self.muster, *words, *self.pids], check=True, capture_output=True, text=True).stdout

    def calls(self) -> list[list[dict[str, Any]]]:
        """The calls of both workers that are under way, without those of push()."""
        workers = json.loads(self.run("dump", "--json"))
        running = [[call for call in worker["operations"] if call["state"] == "running"] for worker in workers]
        return [[call for call in calls if call["function"].endswith("pull")] for calls in running]


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Hang]:
    hang = Hang(tmp_path)
    try:
        for worker in hang.workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
        wait_until(lambda: [len(calls) for calls in hang.calls()] == [1, 1])
        yield hang
        (tmp_path / "go").touch()
        for worker in hang.workers:
            os.kill(worker.pid, signal.SIGCONT)
            assert worker.wait(60) == 0
    finally:
        for worker in hang.workers:
            worker.kill()
            worker.communicate()


def _waits(text: str) -> str:
    """The lines that say who waits for whom, with N for numbers of seconds and ids, which depend on the arrival."""
    lines = "\n".join(line for line in text.splitlines() if "has waited" in line)
    return re.sub(r"\bid \d", "id N", re.sub(r"\d+\.\d s", "N s", lines))


def test_dump_names_the_function_in_which_a_worker_hangs(hang: Hang) -> None:
    (served,), (call,) = hang.calls()
    assert (served["operation"], served["function"], served["peer"]) == ("function", "__main__:pull", "trainer")
    assert (call["operation"], call["function"], call["peer"]) == ("call", "__main__:pull", "ps")
    assert served["request"] == call["request"]
    wait_until(lambda: "has waited" in hang.run("dump"))
    host = os.uname().nodename
    ps, trainer = (
        f'worker "{name}" (id N, host {host}, pid {pid})'
        for name, pid in zip(["ps", "trainer"], hang.pids, strict=True)
    )
    start = f'RPC group "rpc": {trainer} has waited N s for "__main__:pull" at {ps}, which '
    text = hang.run("dump")
    assert _waits(text) == start + "has been in it for N s"
    assert re.search(r'running +\d+\.\d s  "__main__:pull" for worker "trainer" \(request \d+, \d+ bytes\)\n', text)
    hang.workers[0].send_signal(signal.SIGSTOP)
    os.waitpid(hang.workers[0].pid, os.WUNTRACED)
    text = hang.run("dump")
    assert start + "is stopped, by a signal or a debugger" in _waits(text)
    assert f'{ps}, RPC group "rpc" [stopped]: ' in re.sub(r"\bid \d", "id N", text)
    trace = hang.folder / "trace.json"
    hang.run("trace", "-o", str(trace))
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"call __main__:pull", "function __main__:pull", "call __main__:push", "request"} <= names


def test_top_shows_rates_and_latencies(hang: Hang) -> None:
    text = hang.run("rpc", "top", "--interval", "0.5", "--count", "1")
    assert "2 RPC workers" in text
    assert re.search(r"\n  serve __main__:pull +trainer +1 +0 ", text), text
    rate = re.search(r"\n  call  __main__:push +ps +[01] +([\d.]+) +0 +[\d.]+ [mu]s +[\d.]+ [mu]s ", text)
    assert rate is not None, text
    assert float(rate[1]) > 0
    lines = hang.run("rpc", "top", "--interval", "0.1", "--count", "2", "--json").splitlines()
    assert len(lines) == 2
    workers = {worker["worker"]: worker for worker in json.loads(lines[1])}
    (pulls,) = (one for one in workers["ps"]["functions"] if one["function"] == "__main__:pull")
    assert (pulls["side"], pulls["in_flight"], pulls["calls_per_second"]) == ("serve", 1, 0)
    (pushes,) = (one for one in workers["trainer"]["functions"] if one["function"] == "__main__:push")
    assert 0 < pushes["p50_us"] <= pushes["p90_us"] <= pushes["p99_us"]
    words = [hang.muster, "rpc", "top", "--interval", "0.1", "--count", "2", *hang.pids]
    assert shown_on_a_terminal(words, dict(os.environ)).count(b"\x1b[H\x1b[2J") == 2


def test_top_without_workers() -> None:
    command = find_muster()
    assert command is not None
    result = subprocess.run([command, "rpc", "top", str(os.getpid())], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"muster: rpc top: process {os.getpid()} has no worker of muster.rpc" in result.stderr


@rpc.export
def fail() -> None:
    raise ValueError("by purpose")


@rpc.export
class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def add(self, more: int) -> int:
        self.count += more
        return self.count


def _own_calls(rank: int) -> list[dict[str, Any]]:
    if rank == 1:
        with pytest.raises(ValueError, match="by purpose"):
            rpc.rpc_sync("w0", fail)
        counter = rpc.remote("w0", Counter, (1,))
        assert counter.rpc_sync().add(2) == 3
        assert counter.remote().add(3).to_here() == 6
    (worker,) = muster.dump()
    return list(worker["operations"])


def test_a_program_sees_its_own_calls() -> None:
    calls = {call["function"].rpartition(":")[2]: call for call in run_workers(2, _own_calls)[1]}
    fails = calls["fail"]
    assert (fails["operation"], fails["peer"]) == ("call", "w0")
    assert (fails["state"], fails["error"]) == ("failed", "internal error")
    assert fails["submitted"] <= fails["started"] <= fails["ended"]
    # References call functions of muster's own. What is shown are those of the user.
    assert calls["Counter"]["state"] == calls["method add"]["state"] == "done"
