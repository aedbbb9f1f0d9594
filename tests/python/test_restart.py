"""Tests generations of `muster run`: restarts after failures, and nodes that join, leave and are lost."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from launching import TIMEOUT, Job, Launch, find_muster, free_port, wait_until

Node = Callable[..., Job]

# A short worker: it prints its generation, then runs the test's lines.
PRINT_GENERATION = (
    'echo "generation $MUSTER_GENERATION restart $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE"\n'
)
WAIT_FOR_END = 'while [ ! -e "$(dirname "$0")/enough" ]; do sleep 0.05; done\n'


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """node(words..., code=...) starts one node of this test's job. `code` is a shell script."""
    port, secret = free_port(), secrets.token_hex(32)
    jobs: list[Job] = []

    def start(*words: str, code: str = WAIT_FOR_END, endpoint: bool = True) -> Job:
        script = tmp_path / f"worker{len(jobs)}"
        script.write_text("#!/bin/sh\n" + PRINT_GENERATION + code)
        script.chmod(0o700)
        place = ["--master-addr=127.0.0.1", f"--master-port={port}"] if endpoint else []
        command = [str(find_muster()), "run", *place, *words, "--no-python", str(script)]
        jobs.append(Job(command, {"MUSTER_SECRET": secret}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


FAIL_ONCE = "if [ $MUSTER_GENERATION = 0 ]; then [ $RANK != 1 ] || exit 3; exec sleep 1000; fi\n"


def test_a_failed_worker_restarts_the_job(node: Node) -> None:
    job = node("--standalone", "--nproc-per-node=3", "--max-restarts=2", code=FAIL_ONCE, endpoint=False)
    assert job.finish() == 0, job.err
    assert job.out.count("generation 1 restart 1") == 3
    assert re.search(r"rank 1 \(host \S+, pid \d+\) exited with status 3", job.err), job.err
    assert "generation 1 begins: 1 node, 3 workers, restart 1 of 2" in job.err
    assert job.left_behind() == []


def test_the_last_failure_is_reported(node: Node) -> None:
    code = "exit $((7 + MUSTER_GENERATION))\n"
    job = node("--standalone", "--nproc-per-node=1", "--max-restarts=2", code=code, endpoint=False)
    assert job.finish() == 9
    assert [job.err.count(f"exited with status {status}") for status in (7, 8, 9)] == [1, 1, 1], job.err


def test_a_job_that_fails_again_and_again_restarts_after_a_pause(node: Node) -> None:
    job = node("--standalone", "--max-restarts=3", "--restart-delay=1", code="exit 3\n", endpoint=False)
    assert job.finish() == 3
    pauses = re.findall(r"(\d) failures in a row: restarting in (\S+) s", job.err)
    assert pauses == [("2", "1"), ("3", "1")], job.err


TIMERS = """
from torch.distributed.elastic import timer

timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=1000, scope="other"):
    if os.environ["MUSTER_GENERATION"] == "0" and rank == 1:
        with timer.expires(after=0.01, scope="step 3"):
            signal.pause()
"""


def test_a_worker_whose_timer_expires_is_killed(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", f"--event-log-handler={tmp_path}/events"]
    job = launch(*options, script(TIMERS), env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert job.finish() == 0, job.err
    assert re.search(r"process \d+ on host \S+: its timer 'step 3' has expired", job.err), job.err
    assert "rank 1" in job.err and "was ended by signal 9 (SIGKILL): its timer 'step 3' has expired" in job.err
    assert "generation 1 begins: 1 node, 2 workers, restart 1 of 1" in job.err
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["scope"] for event in events if event["event"] == "timer_expired"] == ["step 3"]
    assert job.left_behind() == []


def test_failures_on_two_nodes_at_once_are_one_restart(node: Node) -> None:
    code = "if [ $MUSTER_GENERATION = 0 ]; then exit 3; fi\n"
    jobs = [node("--nnodes=2", f"--node-rank={rank}", "--max-restarts=1", code=code) for rank in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    for job in jobs:
        assert "generation 1 restart 1" in job.out


def test_an_interrupted_job_does_not_restart(node: Node) -> None:
    jobs = [node("--nnodes=2", f"--node-rank={rank}", "--max-restarts=5") for rank in range(2)]
    for job in jobs:
        job.expect("generation 0")
    jobs[1].send(signal.SIGINT)
    assert [job.finish() for job in jobs] == [130, 130]
    for job in jobs:
        assert "generation 1" not in job.out + job.err
        assert job.left_behind() == []


def test_restarted_stores_start_empty(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, signal
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=100))
seen = store.compare_set("address", "", os.environ["MUSTER_GENERATION"]).decode()
print("seen", seen, "keys", store.num_keys(), flush=True)
if os.environ["MUSTER_GENERATION"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    words = ["--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    job = Job([str(find_muster()), "run", *words, script], {"MUSTER_PYTHON": sys.executable})
    try:
        assert job.finish() == 0, job.err
        assert "seen 0" in job.out and "seen 1" in job.out, job.out
    finally:
        job.close()


GLOO = """
import os, signal
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
generation = os.environ["MUSTER_GENERATION"]
print("generation", generation, "sum", total.item(), flush=True)
if generation == "0":
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("nnodes", "tiers"), [(1, []), (2, []), (2, ["--enable-tiered-parallel-tcpstore"])], ids=["one", "two", "tiered"]
)
def test_gloo_connects_only_within_a_generation(tmp_path: Path, nnodes: int, tiers: list[str]) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(GLOO)
    words = [f"--nnodes={nnodes}", "--nproc-per-node=2", "--max-restarts=1", *tiers]
    if nnodes > 1:
        words += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    env = {
        "MUSTER_PYTHON": sys.executable, "MUSTER_SECRET": secrets.token_hex(32), "PET_START_METHOD": "zygote",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    jobs = [Job([str(find_muster()), "run", *words, script], env) for _ in range(nnodes)]
    try:
        assert [job.finish() for job in jobs] == [0] * nnodes, "".join(job.err for job in jobs)
        total = float(sum(range(2 * nnodes + 1)))
        for job in jobs:
            assert job.out.count(f"generation 1 sum {total}") == 2, job.out
        assert "was ended by signal 9 (SIGKILL)" in jobs[0].err
    finally:
        for job in jobs:
            job.close()


ELASTIC = ("--nnodes=1:3", "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=2")


def test_nodes_join_leave_and_fail_during_a_job(node: Node, tmp_path: Path) -> None:
    first = node(*ELASTIC)
    first.expect("generation 0 restart 0 rank 0 of 1")
    second = node(*ELASTIC)
    second.expect(r"generation \d+ restart 0 rank 1 of 2")
    third = node(*ELASTIC)
    third.expect("rank 2 of 3")
    os.kill(second.agent(), signal.SIGKILL)
    first.expect("lost host .*: its agent was killed")
    third.expect("rank 1 of 2")
    third.send(signal.SIGTERM)
    assert third.finish() == 143
    fourth = node(*ELASTIC)
    fourth.expect("rank 1 of 2")
    (tmp_path / "enough").touch()
    assert (fourth.finish(), first.finish()) == (0, 0), first.err
    second.finish()
    for job in (first, second, third, fourth):
        assert job.left_behind() == []


def test_nodes_that_join_together_cause_one_restart(node: Node, tmp_path: Path) -> None:
    words = ("--nnodes=1:4", "--rdzv-conf=last_call_timeout=3")
    first = node(*words)
    first.expect("generation 0 restart 0 rank 0 of 1")
    jobs = [first, *(node(*words) for _ in range(2))]
    for job in jobs:
        job.expect(r"generation 1 restart 0 rank \d of 3")
    (tmp_path / "enough").touch()
    assert [job.finish() for job in jobs] == [0, 0, 0], first.err
    assert "2 nodes join the job" in first.err


def test_a_node_takes_over_the_root_address(node: Node, tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(TIMEOUT)
        port = other.getsockname()[1]
        job = node(*ELASTIC, "--master-addr=127.0.0.1", f"--master-port={port}", endpoint=False)
        newcomer, _ = other.accept()
    with newcomer:  # the newcomer gets no answer
        assert job.finish() == 0, job.err
    assert "generation 0 restart 0 rank 0 of 1" in job.out


def test_too_few_nodes_end_with_a_clear_error(node: Node) -> None:
    job = node("--nnodes=2:3", "--timeout=1")
    assert job.finish() == 1
    assert "of at least 2 nodes (--nnodes 2:3) only 1 came within 1 s" in job.err


def test_a_missing_program_on_one_node_ends_the_job(node: Node, tmp_path: Path) -> None:
    first = node("--nnodes=2", "--node-rank=0")
    missing = tmp_path / "missing"
    second = node("--nnodes=2", "--node-rank=1", "--no-python", str(missing))
    assert (first.finish(), second.finish()) == (127, 127), first.err
    assert f"cannot start '{missing}': no such file" in first.err


def server_words(kind: str, port: int, folder: Path) -> list[str]:
    if kind == "redis":
        return ["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", str(folder)]
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    return [
        "etcd", "--log-level=error", f"--data-dir={folder}/{port}", f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]  # fmt: skip


ExternalServer = tuple[list[str], "subprocess.Popen[bytes]"]


@pytest.fixture(params=["redis", "etcd"])
def external_server(request: pytest.FixtureRequest, server_folder: Path) -> Iterator[ExternalServer]:
    """The options of a rendezvous in a real Redis or etcd server outside the job, and that server."""
    port = free_port()
    words = server_words(request.param, port, server_folder)
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                signal.sigtimedwait([], 0.01)
        yield [f"--rdzv-backend={request.param}", f"--rdzv-endpoint=127.0.0.1:{port}"], process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def external_store(external_server: ExternalServer) -> list[str]:
    return external_server[0]


def start_three(node: Node, words: Sequence[str]) -> tuple[Job, list[Job], list[int]]:
    """Returns the root, the two other nodes, and how often each of these has printed a world size of 2."""
    root = node(*words, endpoint=False)
    root.expect("generation 0")
    others = [node(*words, endpoint=False) for _ in range(2)]
    for job in (root, *others):
        job.expect(r"rank \d of 3")
    return root, others, [job.out.count(" of 2") for job in others]


@pytest.mark.parametrize(
    "tiers", [[], ["--enable-tiered-parallel-tcpstore", "--store-fanout=1"]], ids=["plain", "tiered"]
)
def test_a_job_survives_its_root_with_an_external_store(
    node: Node, external_store: list[str], tmp_path: Path, tiers: list[str]
) -> None:
    words = ("--nnodes=1:3", "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=2", *external_store, *tiers)
    root, others, before = start_three(node, words)
    os.kill(root.agent(), signal.SIGKILL)
    for job, count in zip(others, before, strict=True):
        job.expect("lost the job's root at tcp://")
        job.expect(r"rank \d of 2", count=count + 1)
    last = node(*words, endpoint=False)
    last.expect("of 3")
    (tmp_path / "enough").touch()
    assert [job.finish() for job in (*others, last)] == [0, 0, 0], others[0].err
    root.finish()
    for job in (root, *others, last):
        assert job.left_behind() == []


def test_a_root_that_gets_sigterm_hands_over(node: Node, external_store: list[str], tmp_path: Path) -> None:
    words = ("--nnodes=1:3", "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=1000", *external_store)
    root, others, before = start_three(node, words)
    root.send(signal.SIGTERM)
    assert root.finish() == 143
    assert "this node leaves the job" in root.err
    for job, count in zip(others, before, strict=True):
        job.expect(r"rank \d of 2", count=count + 1)
    (tmp_path / "enough").touch()
    assert [job.finish() for job in others] == [0, 0], others[0].err
    for job in (root, *others):
        assert "restart 1" not in job.out + job.err
        assert job.left_behind() == []


def test_a_root_that_gets_sigterm_before_the_start_ends_the_job(node: Node, external_store: list[str]) -> None:
    words = ("--nnodes=2:3", "--rdzv-conf=last_call_timeout=100", *external_store)
    root = node(*words, endpoint=False)
    root.expect("1 of at least 2 nodes are here")
    other = node(*words, endpoint=False)
    other.expect("2 of at most 3 nodes are here")
    root.send(signal.SIGTERM)
    assert [root.finish(), other.finish()] == [143, 143], other.err


def test_the_last_node_that_gets_sigterm_ends_the_job(node: Node, external_store: list[str]) -> None:
    words = ("--nnodes=2:3", "--rdzv-conf=last_call_timeout=0", *external_store)
    jobs = [node(*words, endpoint=False) for _ in range(2)]
    for job in jobs:
        job.expect(r"rank \d of 2")
    jobs[0].send(signal.SIGTERM)
    assert [job.finish() for job in jobs] == [143, 143], "one node would be left"
    for job in jobs:
        assert job.left_behind() == []


def generations_seen(jobs: Sequence[Job]) -> dict[int, list[tuple[int, int]]]:
    """By generation, the (rank, world size) that each worker printed."""
    found: dict[int, list[tuple[int, int]]] = {}
    for job in jobs:
        for generation, rank, size in re.findall(r"generation (\d+) restart \d+ rank (\d+) of (\d+)", job.out):
            found.setdefault(int(generation), []).append((int(rank), int(size)))
    return found


def test_exactly_one_node_becomes_the_root(node: Node, external_store: list[str], tmp_path: Path) -> None:
    jobs = [node("--nnodes=4", *external_store, endpoint=False) for _ in range(4)]
    for job in jobs:
        job.expect("of 4")
    (tmp_path / "enough").touch()
    assert [job.finish() for job in jobs] == [0] * 4, "".join(job.err for job in jobs)
    assert {number: sorted(ranks) for number, ranks in generations_seen(jobs).items()} == {
        0: [(i, 4) for i in range(4)]
    }
    for job in jobs:
        assert job.left_behind() == []


def test_a_resumed_root_makes_no_decisions(node: Node, external_store: list[str], tmp_path: Path) -> None:
    words = ("--nnodes=1:3", "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=2", *external_store)
    root, others, before = start_three(node, words)
    agent = root.agent()
    os.kill(agent, signal.SIGSTOP)  # its workers continue, and no node notices at once
    for job, count in zip(others, before, strict=True):
        job.expect(r"rank \d of 2", count=count + 1)
    jobs = (root, *others)
    known = [job.out.count(" of 3") for job in jobs]
    os.kill(agent, signal.SIGCONT)
    root.expect("could not renew its claim to be the job's root")

    def is_one_of_three() -> bool:
        return all(job.out.count(" of 3") > count for job, count in zip(jobs, known, strict=True))

    wait_until(lambda: is_one_of_three() or root.process.poll() is not None)
    (tmp_path / "enough").touch()
    assert [job.finish() for job in others] == [0, 0], others[0].err
    root.finish()
    for number, ranks in generations_seen(jobs).items():
        assert len(set(ranks)) == len(ranks), f"two roots began generation {number}: {ranks}"
        assert len({size for _, size in ranks}) == 1, f"two roots began generation {number}: {ranks}"
    for job in jobs:
        assert job.left_behind() == []


def test_a_lost_rendezvous_is_the_reported_reason(node: Node, external_server: ExternalServer) -> None:
    words, server = external_server
    jobs = [node("--nnodes=2", "--rdzv-conf=heartbeat_timeout=1", *words, endpoint=False) for _ in range(2)]
    for job in jobs:
        job.expect(r"rank \d of 2")
    server.kill()
    server.wait()
    assert [job.finish() for job in jobs] == [1, 1]
    for job in jobs:
        assert re.search(rf"muster: --rdzv-endpoint: .*{words[1].partition('=')[2]}", job.err), job.err
        assert "lost the job's store" not in job.err
        assert job.left_behind() == []


def test_a_stopped_rendezvous_is_waited_for(node: Node, external_server: ExternalServer, tmp_path: Path) -> None:
    words, server = external_server
    jobs = [node("--nnodes=2", "--rdzv-conf=heartbeat_timeout=1", *words, endpoint=False) for _ in range(2)]
    for job in jobs:
        job.expect(r"rank \d of 2")
    server.send_signal(signal.SIGSTOP)
    for job in jobs:
        job.expect("lost the job's root at")
    server.send_signal(signal.SIGCONT)
    for job in jobs:
        job.expect(r"generation [1-9] restart 0 rank \d of 2")
    (tmp_path / "enough").touch()
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err


@pytest.mark.parametrize("kind", ["redis", "etcd"])
def test_a_refusing_rendezvous_is_named_at_once(node: Node, kind: str) -> None:
    if shutil.which(server_words(kind, 0, Path())[0]) is None:
        pytest.skip("this build may have no client for it")
    place = f"127.0.0.1:{free_port()}"
    words = (f"--rdzv-backend={kind}", f"--rdzv-endpoint={place}", "--timeout=1000")
    job = node("--nnodes=2", *words, endpoint=False)
    assert job.finish() == 1
    assert re.search(rf"muster: --rdzv-endpoint: .*{place}", job.err), job.err


@pytest.mark.parametrize("kind", ["redis", "etcd"])
def test_signals_work_while_the_rendezvous_is_silent(node: Node, kind: str) -> None:
    if shutil.which(server_words(kind, 0, Path())[0]) is None:
        pytest.skip("this build may have no client for it")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(TIMEOUT)
        endpoint = f"--rdzv-endpoint=127.0.0.1:{silent.getsockname()[1]}"
        job = node("--nnodes=2", f"--rdzv-backend={kind}", endpoint, "--timeout=300", endpoint=False)
        with silent.accept()[0]:
            job.send(signal.SIGINT)
            assert job.finish() == 130, job.err
    assert "SIGINT on host" in job.err


def test_root_death_with_a_file_ends_with_a_clear_error(node: Node, tmp_path: Path) -> None:
    meeting = tmp_path / "rendezvous"
    words = ("--nnodes=2", f"--rdzv-endpoint=file://{meeting}", "--rdzv-conf=heartbeat_timeout=2")
    root = node(*words, endpoint=False)
    wait_until(lambda: meeting.exists() and b"tcp://" in meeting.read_bytes())
    other = node(*words, endpoint=False)
    for job in (root, other):
        job.expect(r"rank \d of 2")
    os.kill(root.agent(), signal.SIGKILL)
    assert other.finish() == 1
    assert "lost the job's store at tcp://" in other.err, other.err
    root.finish()
    for job in (root, other):
        assert job.left_behind() == []


def test_torchrun_store_type_file_works(node: Node, tmp_path: Path) -> None:
    meeting = tmp_path / "rendezvous"
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={meeting}")
    jobs = [node(*words, code="exit 0\n", endpoint=False) for _ in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].err
    assert sorted(re.findall(r"rank \d of 2", jobs[0].out + jobs[1].out)) == ["rank 0 of 2", "rank 1 of 2"]
    assert meeting.exists()


@pytest.mark.parametrize("external_server", ["etcd"], indirect=True)
def test_an_etcd_prefix_separates_jobs_of_one_name(node: Node, external_store: list[str], tmp_path: Path) -> None:
    prefixes = [f"--rdzv-conf=last_call_timeout=0,etcd_prefix=/team-{team}" for team in range(2)]
    jobs = [node("--nnodes=1:2", prefix, *external_store, endpoint=False) for prefix in prefixes]
    for job in jobs:
        job.expect("generation 0 restart 0 rank 0 of 1")
    (tmp_path / "enough").touch()
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert "of 2" not in jobs[0].out + jobs[1].out


def test_a_rendezvous_file_can_be_reused(node: Node, tmp_path: Path) -> None:
    for _ in range(2):
        jobs = [
            node("--nnodes=2", f"--rdzv-endpoint=file://{tmp_path}/rendezvous", code="exit 0\n", endpoint=False)
            for _ in range(2)
        ]
        assert [job.finish() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
