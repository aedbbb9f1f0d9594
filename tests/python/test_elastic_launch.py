"""Tests muster.elastic_launch(): a function in the processes of a job."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import TIMEOUT, free_port, is_gone, wait_until
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig

import muster
from muster import _launch


@pytest.fixture(autouse=True)
def program(muster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_BIN", muster)


def config(ranks: int = 2, **fields: Any) -> LaunchConfig:
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, **{"max_restarts": 0, **fields})


def sum_up(base: torch.Tensor, name: str) -> tuple[str, torch.Tensor]:
    dist.init_process_group("muster")
    data = base + dist.get_rank()
    dist.all_reduce(data)
    dist.destroy_process_group()
    return f"{name} {os.environ['RANK']}", data


def test_results_come_back_by_rank() -> None:
    results = muster.elastic_launch(config(3), sum_up)(torch.full((2,), 10.0), "rank")
    assert list(results) == [0, 1, 2]
    for rank, (text, data) in results.items():
        assert text == f"rank {rank}"
        assert data.tolist() == [33.0, 33.0]


ON_TWO_NODES = """
import os, sys, muster
from torch.distributed.launcher.api import LaunchConfig

def place(word):
    return word, os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]

if __name__ == "__main__":
    config = LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=2, run_id="job", rdzv_backend="c10d",
        rdzv_endpoint=sys.argv[1], local_addr="127.0.0.1", max_restarts=0)
    for rank, result in muster.elastic_launch(config, place)("node").items():
        print(rank, *result)
"""


def test_each_node_gets_the_results_of_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "nodes.py"
    script.write_text(ON_TWO_NODES)
    command = [sys.executable, str(script), f"127.0.0.1:{free_port()}"]
    env = {**os.environ, "MUSTER_SECRET": secrets.token_hex(32)}
    nodes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = sorted(node.communicate(timeout=TIMEOUT)[0] for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert outputs == [f"{2 * node} node {node} 0 4\n{2 * node + 1} node {node} 1 4\n" for node in range(2)]


def raise_at_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("told so")
    signal.pause()


def test_the_traceback_of_a_rank_comes_back() -> None:
    with pytest.raises(muster.LaunchError, match=r"(?s)^rank 1 failed:\nTraceback.*ValueError: told so") as caught:
        muster.elastic_launch(config(), raise_at_one)()
    assert caught.value.status == 1
    assert list(caught.value.failures) == [1]
    assert "in raise_at_one" in caught.value.failures[1]
    assert "_launch_worker" not in caught.value.failures[1]


def kill_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(muster.LaunchError, match=r"rank 1 .*SIGKILL") as caught:
        muster.elastic_launch(config(), kill_one)()
    assert (caught.value.status, caught.value.failures) == (128 + signal.SIGKILL, {})


def fail_once() -> str:
    generation = os.environ["MUSTER_GENERATION"]
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first time")
    return generation


def test_results_are_those_of_the_last_restart() -> None:
    results = muster.elastic_launch(config(max_restarts=1), fail_once)()
    assert list(results) == [0, 1]
    assert len(set(results.values())) == 1


def fail_and_die() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first time")
    kill_one()


def test_failures_are_those_of_the_last_restart() -> None:
    with pytest.raises(muster.LaunchError, match="SIGKILL") as caught:
        muster.elastic_launch(config(max_restarts=1), fail_and_die)()
    assert caught.value.failures == {}


def test_what_cannot_be_called_is_refused() -> None:
    unpicklable: Any = lambda: 1  # noqa: E731
    with pytest.raises(TypeError, match=r"by pickle, which refuses them: Can't .*<lambda>"):
        muster.elastic_launch(config(), unpicklable)()
    program: Any = "train.py"
    with pytest.raises(TypeError, match=r"entrypoint must be a function, got 'train\.py'"):
        muster.elastic_launch(config(), program)


SCRIPT = """
import os, signal, sys
from torch.distributed.launcher.api import LaunchConfig
import muster

def double(number, wait):
    if wait:
        signal.signal(signal.SIGTERM, lambda *_: None)  # only SIGKILL ends it
        print("pid", os.getpid(), flush=True)
        while True:
            signal.pause()
    return 2 * number

if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=0)
    config.shutdown_timeout = 1
    print(muster.elastic_launch(config, double)(21, len(sys.argv) > 1))
"""


def test_the_function_may_be_in_the_script(run: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    assert run([sys.executable, script]) == "{0: 42, 1: 42}\n"


def test_the_job_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script, "wait"], stdout=subprocess.PIPE, text=True) as process:
        workers = pids_of_two(process)
        process.kill()
    wait_until(lambda: all(map(is_gone, workers)))


def test_an_interrupted_call_ends_when_its_job_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script, "wait"], stdout=subprocess.PIPE, text=True) as process:
        workers = pids_of_two(process)
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT)
        assert all(map(is_gone, workers))
    assert process.returncode != 0


def pids_of_two(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    return [int(re.findall(r"pid (\d+)", line)[0]) for line in lines]


def test_the_fields_of_a_config_become_options(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), redirects={0: Std.ALL, 1: Std.OUT}, tee=Std.ERR, local_ranks_filter={1, 0})
    several = LaunchConfig(
        min_nodes=2,
        max_nodes=4,
        nproc_per_node=8,
        logs_specs=logs,
        run_id="job",
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint="host:29400",
        rdzv_configs={"timeout": 60, "is_host": True},
        max_restarts=5,
        local_addr="10.0.0.1",
    )
    options = _launch.options_of(several)
    for expected in [
        "--nnodes=2:4",
        "--nproc-per-node=8",
        "--role=trainer",
        "--max-restarts=5",
        "--local-addr=10.0.0.1",
        f"--log-dir={tmp_path}",
        "--redirects=0:3,1:1",
        "--tee=2",
        "--local-ranks-filter=0,1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=host:29400",
        "--rdzv-id=job",
        "--rdzv-conf=timeout=60,is_host=True",
    ]:
        assert expected in options
    assert "--standalone" in _launch.options_of(config())
    assert not any("rdzv" in option for option in _launch.options_of(config()))
