"""Tests what users see of operations, with the calling lines: in the program, from the shell, and in errors."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launching import find_muster, wait_until
from muster.nn import DistributedDataParallel
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d

import muster

HERE = os.path.relpath(__file__)


def _line() -> int:
    """The number of the caller's line."""
    return sys._getframe(1).f_lineno


def _site(line: int) -> str:
    return f"{HERE}:{line}"


def _record(rank: int, path: str) -> tuple[list[dict[str, Any]], int]:
    dist.all_reduce(torch.ones(3))
    line = _line() + 1
    work = dist.broadcast(torch.ones(2, dtype=torch.int64), src=1, async_op=True)
    work.wait()
    (group,) = muster.dump(2)
    muster.trace(f"{path}/{rank}.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about its deprecated names, which would confuse users
        muster.trace(f"{path}/all.json", dist.group.WORLD)
    return group["operations"], line


def test_operations_are_recorded_with_call_sites(tmp_path: Path) -> None:
    for operations, line in run_ranks(2, _record, str(tmp_path)):
        reduce, broadcast = operations
        assert (reduce["operation"], reduce["dtype"], reduce["count"], reduce["op"]) == (
            "all_reduce",
            "float32",
            3,
            "sum",
        )
        assert (reduce["sequence"], reduce["state"], reduce["site"]) == (1, "done", _site(line - 2))
        assert (broadcast["text"], broadcast["site"]) == ("broadcast #2 (int64[2], root 1)", _site(line))
        assert broadcast["submitted"] <= broadcast["started"] <= broadcast["ended"]
    one = [event for event in json.loads((tmp_path / "1.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in one] == ["muster:all_reduce", "muster:broadcast"]
    everyone = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in everyone}) == 2
    # Both ranks were in the call at the same time, so their times must overlap on a common clock.
    reduces = [event for event in everyone if event["name"] == "muster:all_reduce"]
    assert len(reduces) == 2
    assert max(r["ts"] for r in reduces) <= min(r["ts"] + r["dur"] for r in reduces)


def _refuse_pickles(rank: int, path: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with mock.patch.object(c10d, "_unpickler", side_effect=AssertionError("a pickle that arrived was read")):
        muster.trace(f"{path}/trace.json", dist.group.WORLD)
        muster.step_report(model).save(f"{path}/step.json", dist.group.WORLD)
        # The first rank of a smaller group need not be rank 0.
        part = dist.new_group([2, 1])
        if rank > 0:
            muster.trace(f"{path}/part.json", part)


def test_traces_are_never_unpickled(tmp_path: Path) -> None:
    run_ranks(3, _refuse_pickles, str(tmp_path))
    for name, ranks in (("trace", 3), ("step", 3), ("part", 2)):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert len({event["pid"] >> 16 for event in events}) == ranks


def _disagree(rank: int) -> tuple[str, int]:
    line = _line() + 3
    with pytest.raises(muster.MismatchError) as caught:
        if rank == 0:
            dist.all_reduce(torch.ones(12))
        else:
            dist.broadcast(torch.ones(10), src=0)
    return str(caught.value), line


def test_a_mismatch_names_both_lines() -> None:
    for text, line in run_ranks(2, _disagree):
        assert (
            f"rank 1 is at broadcast #1 (float32[10], root 0) at {_site(line + 2)}, rank 0 at all_reduce #1 "
            f"(float32[12], sum) at {_site(line)}; all ranks must make the same calls in the same order" in text
        )


# Rank 1 stops itself between two calls, so that rank 0 hangs in the second call.
HANG = """
import os, signal, sys
import torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("muster", store=dist.FileStore(store, 2), rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
print("calling", flush=True)
dist.all_reduce(torch.ones(5))
"""


def test_dump_shows_a_hang(tmp_path: Path) -> None:
    command = find_muster()
    assert command is not None
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, cwd=tmp_path
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()
        os.waitpid(ranks[1].pid, os.WUNTRACED)
        pids = [str(rank.pid) for rank in ranks]

        def dumped() -> list[dict[str, Any]]:
            text = subprocess.run([command, "dump", "--json", *pids], check=True, capture_output=True, text=True).stdout
            return list(json.loads(text))

        def runs_the_second() -> bool:  # rank 0 has printed a line and will make the call soon
            entry = dumped()[0]["operations"][-1]
            return (entry["operation"], entry["state"]) == ("all_reduce", "running")

        wait_until(runs_the_second)
        last = [group["operations"][-1] for group in dumped()]
        assert [(entry["text"], entry["state"], entry["site"]) for entry in last] == [
            ("all_reduce #2 (float32[5], sum)", "running", "hang.py:11"),
            ("barrier #1", "done", "hang.py:6"),
        ]
        text = subprocess.run([command, "dump", *pids], check=True, capture_output=True, text=True).stdout
        host = os.uname().nodename
        assert (
            f"rank 0 is at all_reduce #2 (float32[5], sum) at hang.py:11; rank 1 (host {host}, pid {pids[1]}) is "
            "stopped, by a signal or a debugger, last seen at barrier #1 at hang.py:6\n" in text
        )
        trace = tmp_path / "trace.json"
        subprocess.run([command, "trace", "-o", trace, *pids], check=True, capture_output=True)
        assert len({event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}) == 2
        picture = subprocess.run([command, "trace", "-o", "step.png", *pids], capture_output=True, text=True)
        assert picture.returncode == 1 and "no rank has averaged gradients" in picture.stderr
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()


def test_dump_of_a_process_without_groups() -> None:
    command = find_muster()
    assert command is not None
    result = subprocess.run([command, "dump", str(os.getpid())], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"muster: dump: process {os.getpid()} has no muster group or RPC worker" in result.stderr
    result = subprocess.run([command, "trace", "--job", "absent"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "no process of this user on this host has a muster group or RPC worker in the job absent" in result.stderr
