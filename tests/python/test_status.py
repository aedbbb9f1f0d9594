"""Tests `muster status`, which shows the running jobs."""

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import TIMEOUT, Job, find_muster, free_port, wait_until


def status(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [str(find_muster()), "status", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not in pytest's own directories, because muster skips a path that is too long for sockets.
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_status_shows_only_running_jobs(runtime: Path) -> None:
    assert status().returncode == 1
    assert status("absent").stdout == "no job absent of this user runs on this host\n"
    words = ["--standalone", "--rdzv-id=shown", "--nproc-per-node=2", "--max-restarts=1"]
    code = (
        "echo generation $MUSTER_GENERATION pid $$; "
        "[ $MUSTER_GENERATION = 1 ] || [ $RANK = 0 ] || exit 3; exec sleep 1000"
    )
    job = Job([str(find_muster()), "run", *words, "--no-python", "/bin/sh", "-c", code])
    try:
        pids = sorted(int(match[1]) for match in job.expect(r"\] generation 1 pid (\d+)\n", count=2))
        entry = ask(lambda entry: entry.get("generation") == 1 and len(printed_pids(entry)) == 2, "shown")
        (shown,) = entry["nodes"]
        assert entry["restarts"] == 1
        assert shown["state"] == "running" and shown["workers"] == 2
        assert sorted(shown["pids"]) == pids
        text = status().stdout
        assert "job shown" in text and "ranks 0-1" in text and "operations/s" in text, text
        assert status("another").returncode == 1
        os.kill(job.agent(), signal.SIGKILL)
        job.finish()
        assert not (runtime / "muster").exists(), "no one requested the status since"
        assert json.loads(status("--json").stdout) == [], "a dead agent's job is shown"
    finally:
        job.close()


def ask(done: Callable[[dict[str, Any]], bool], *words: str) -> dict[str, Any]:
    """The only job in the status, once `done` accepts it."""
    entry: dict[str, Any] = {}

    def looks_right() -> bool:
        nonlocal entry
        (entry,) = json.loads(status("--json", *words).stdout) or [{}]
        return done(entry)

    wait_until(looks_right)
    return entry


def printed_pids(entry: dict[str, Any]) -> list[int]:
    return [pid for node in entry.get("nodes", []) for pid in node.get("pids", []) if pid != 0]


def test_status_watch_follows_the_job(runtime: Path) -> None:
    words = ["--standalone", "--rdzv-id=watched", "--nproc-per-node=2", "--max-restarts=1"]
    code = "echo generation $MUSTER_GENERATION pid $$; [ $MUSTER_GENERATION = 1 ] || exit 3; exec sleep 1000"
    job = Job([str(find_muster()), "run", *words, "--no-python", "/bin/sh", "-c", code])
    pids = sorted(int(match[1]) for match in job.expect(r"\] generation 1 pid (\d+)\n", 2))
    command = [str(find_muster()), "status", "--watch", "--json", "watched"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        timeout = threading.Timer(TIMEOUT, watcher.kill)
        timeout.start()
        try:
            assert watcher.stdout
            last: dict[str, Any] = {}
            for line in watcher.stdout:
                shown = json.loads(line)
                if not last and shown and shown[0].get("generation") == 1 and len(printed_pids(shown[0])) == 2:
                    last = shown[0]
                    job.send(signal.SIGTERM)
            assert watcher.wait() == 1
            assert job.finish() == 143
        finally:
            timeout.cancel()
            job.close()
    assert shown == [], "it goes on until there is no job"
    assert (last["generation"], last["restarts"], last["nodes"][0]["node_rank"]) == (1, 1, 0)
    assert sorted(last["nodes"][0]["pids"]) == pids


def test_status_shows_missing_and_present_nodes(runtime: Path) -> None:
    words = ["--nnodes=2", "--rdzv-id=both", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    env = {"MUSTER_SECRET": secrets.token_hex(32)}

    def start(rank: int) -> Job:
        place = [f"--node-rank={rank}", f"--nproc-per-node={rank + 1}"]
        command = [str(find_muster()), "run", *words, *place, "--no-python", "/bin/sh", "-c"]
        return Job([*command, "echo pid $$; exec sleep 1000"], env)

    jobs = [start(0)]
    try:
        waiting = ask(lambda entry: "nodes" in entry and entry["nodes"] != [])
        assert waiting["progress"] == "1 of 2 nodes are here; missing: 1"
        assert (waiting["generation"], waiting["nodes"][0]["node_rank"]) == (-1, -1)
        assert "job both" in status().stdout and "waiting for nodes, 1 of 2" in status().stdout
        jobs.append(start(1))
        pids = [[int(match[1]) for match in job.expect(r"pid (\d+)\n", rank + 1)] for rank, job in enumerate(jobs)]
        entry = ask(lambda entry: len(printed_pids(entry)) == 3)
        shown = sorted(entry["nodes"], key=lambda node: int(node["node_rank"]))
        assert [sorted(node["pids"]) for node in shown] == [sorted(of_node) for of_node in pids]
        assert [node["pid"] for node in shown] == [job.agent() for job in jobs]
        text = status().stdout
        assert text.count("job both") == 1, text
        assert "node 0" in text and "ranks 0-0" in text and "node 1" in text and "ranks 1-2" in text, text
    finally:
        for job in jobs:
            job.close()


def test_a_health_check_port_answers_while_a_job_runs() -> None:
    port = free_port()
    words = ["run", "--standalone", "--nproc-per-node=1", "--no-python", "/bin/sh", "-c", "echo up; exec sleep 1000"]
    job = Job([str(find_muster()), *words], {"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    try:
        job.expect("up")
        assert [health(port), health(port)] == [(200, b"ok\n")] * 2
        job.send(signal.SIGTERM)
        job.finish()
        with pytest.raises(OSError):
            health(port)
    finally:
        job.close()
    wrong = Job([str(find_muster()), *words], {"TORCHELASTIC_HEALTH_CHECK_PORT": "http"})
    try:
        assert wrong.finish() == 2
        assert "TORCHELASTIC_HEALTH_CHECK_PORT='http' is not a port from 1 to 65535" in wrong.err
    finally:
        wrong.close()


def health(port: int) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, answer.read()
