"""Kills any process of a job at any step: the job must end, say why, and leave nothing behind."""

import contextlib
import os
import pty
import re
import secrets
import select
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import TIMEOUT, Job, Launch, find_muster, free_port, is_gone, marked_processes, wait_until

IGNORE_SIGTERM = "trap '' TERM\necho ready $$\nwhile :; do sleep 1000 & wait; done\n"
FAIL_ON_REQUEST = 'while [ ! -e "$(dirname "$0")/fail" ]; do sleep 0.05; done\nexit 3\n'


@pytest.fixture
def start(launch: Launch, tmp_path: Path) -> Launch:
    """start(words..., code=...) starts one node of this test's job. `code` is a shell script."""
    secret = secrets.token_hex(32)

    def start_node(*words: str, code: str = IGNORE_SIGTERM) -> Job:
        script = tmp_path / secrets.token_hex(4)
        script.write_text("#!/bin/sh\n" + code)
        script.chmod(0o700)
        return launch("--shutdown-timeout=0.2", *words, "--no-python", script, env={"MUSTER_SECRET": secret})

    return start_node


@pytest.fixture
def two_nodes() -> list[str]:
    """The options of a job of two nodes."""
    return ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]


def end(job: Job, victim: str) -> None:
    os.kill(job.agent() if victim == "agent" else job.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["agent", "launcher"])
def test_death_while_waiting_for_the_root(start: Launch, two_nodes: list[str], victim: str) -> None:
    job = start(*two_nodes, "--node-rank=1")
    job.expect("waiting for node 0")
    end(job, victim)
    assert job.finish() in (137, -9)
    assert job.left_behind() == []


@pytest.mark.parametrize("victim", ["agent", "launcher"])
def test_death_while_the_root_waits_for_nodes(start: Launch, two_nodes: list[str], victim: str) -> None:
    root = start(*two_nodes, "--node-rank=0")
    root.expect("1 of 2 nodes")
    end(root, victim)
    assert root.finish() in (137, -9)
    assert root.left_behind() == []
    # The address is free again: the job can be restarted there.
    jobs = [start(*two_nodes, f"--node-rank={rank}", code="exit 0\n") for rank in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err


@pytest.mark.parametrize("victim", ["agent", "launcher"])
def test_death_while_stopping_stubborn_workers(start: Launch, victim: str) -> None:
    job = start("--nproc-per-node=2", "--shutdown-timeout=1000")
    pids = [int(found[1]) for found in job.expect(r"ready (\d+)", 2)]
    job.send(signal.SIGTERM)
    job.expect("stopping the workers")
    end(job, victim)
    assert job.finish() in (137, -9)
    wait_until(lambda: all(map(is_gone, pids)))
    assert job.left_behind() == []


def test_a_node_is_lost_during_failure_handling(start: Launch, two_nodes: list[str], tmp_path: Path) -> None:
    words = [*two_nodes, "--max-restarts=3", "--timeout=5"]
    first = start(*words, "--node-rank=0", code=FAIL_ON_REQUEST)
    # Its workers do not end by themselves, so the restart after the failure on the first node waits for this node.
    second = start(*words, "--node-rank=1", "--shutdown-timeout=1000")
    second.expect(r"ready \d+")  # its worker now ignores SIGTERM
    (tmp_path / "fail").touch()
    second.expect("exited with status 3")
    os.kill(second.agent(), signal.SIGKILL)
    assert first.finish() == 1
    assert "of 2 nodes, node 1 did not come within 5 s" in first.err, first.err
    second.finish()
    for job in (first, second):
        assert job.left_behind() == []


def test_the_root_dies_in_a_restart(start: Launch, two_nodes: list[str]) -> None:
    words = [*two_nodes, "--max-restarts=1000"]
    root = start(*words, "--node-rank=0", code="exit 3\n")
    other = start(*words, "--node-rank=1", "--shutdown-timeout=1")
    other.expect("exited with status 3")
    end(root, "agent")
    assert other.finish() == 1
    assert "lost the job's store" in other.err
    root.finish()
    for job in (root, other):
        assert job.left_behind() == []


def test_a_node_lost_in_a_barrier_is_replaced(start: Launch, two_nodes: list[str]) -> None:
    # The heartbeat timeout does not pass: the agent's monitor reports the death, and the wait of its worker is
    # canceled.
    tiers = ["--enable-tiered-parallel-tcpstore", "--rdzv-conf=heartbeat_timeout=1000", "--max-restarts=1"]
    code = f"echo ready $RANK\nexec {find_muster()} store barrier b $((3 - MUSTER_GENERATION))\n"
    root = start(*two_nodes, *tiers, code=code)
    lost = start(*two_nodes, *tiers, "--node-rank=1", code=code)
    for job in (root, lost):
        job.expect("ready")
    end(lost, "agent")
    root.expect("lost host .*: its agent was killed")
    replacement = start(*two_nodes, *tiers, "--node-rank=1", code=code)
    assert [root.finish(), replacement.finish()] == [0, 0], root.err + replacement.err
    assert lost.finish() == 137
    for job in (root, lost, replacement):
        assert job.left_behind() == []


def test_files_of_a_killed_job_are_removed_by_the_next(
    start: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "temporary"
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    lasting, killed = (start(code="echo ready\nexec sleep 1000\n") for _ in range(2))
    for job in (lasting, killed):
        job.expect("ready")
    agent = killed.agent()
    os.kill(agent, signal.SIGSTOP)  # otherwise it would shut down when its launcher is gone
    end(killed, "launcher")
    killed.process.wait()
    os.kill(agent, signal.SIGKILL)
    assert killed.left_behind() == []
    assert len(list(folders.iterdir())) == 2
    assert start(code="exit 0\n").finish() == 0
    assert len(list(folders.iterdir())) == 1, "that of the job which is still there"
    lasting.send(signal.SIGTERM)
    assert lasting.finish() == 143
    assert list(folders.iterdir()) == []


@pytest.fixture
def chain(two_nodes: list[str]) -> list[str]:
    """The options of a job of three nodes. The third node's proxy connects to the second node's, not to the first's."""
    tiers = ["--enable-tiered-parallel-tcpstore", "--store-fanout=1", "--rdzv-conf=heartbeat_timeout=3"]
    return ["--nnodes=3", "--max-restarts=1", *two_nodes[1:], *tiers]


def test_middle_proxies_die_at_start_and_end(start: Launch, chain: list[str]) -> None:
    root = start(*chain, "--node-rank=0")
    root.expect("1 of 3 nodes")  # otherwise the next node, which has no rank, could take the root's address
    middle = start(*chain)
    root.expect("2 of 3 nodes")
    end(middle, "agent")
    # The next node finds that its middle proxy is dead and reports to the root. It then becomes the middle proxy of the
    # last node.
    replacement = start(*chain, "--shutdown-timeout=1000")  # its agent runs until it is killed
    replacement.expect("of 3 nodes|ready")
    last = start(*chain, "--shutdown-timeout=1")
    last.expect(r"ready \d+")
    root.send(signal.SIGTERM)
    last.expect("SIGTERM on host")
    end(replacement, "agent")
    assert [root.finish(), last.finish()] == [143, 143], root.err + last.err
    for job in (middle, replacement):
        job.finish()
    for job in (root, middle, replacement, last):
        assert job.left_behind() == []


@pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "by_arrival"])
def test_the_root_dies_above_a_middle_proxy(start: Launch, chain: list[str], ranked: bool) -> None:
    # No node replaces the root, although another node could listen at its address. No node waits as long as for a first
    # root.
    jobs = []
    for rank in range(3):
        two_nodes = [f"--node-rank={rank}"] if ranked or rank == 0 else []
        jobs.append(start(*chain, *two_nodes, "--timeout=1000"))
        jobs[0].expect(f"{rank + 1} of 3 nodes|ready")
    for job in jobs:
        job.expect(r"ready \d+")
    end(jobs[0], "agent")
    assert [job.finish() for job in jobs] == [137, 1, 1]
    for job in jobs[1:]:
        assert re.search(r"lost the job's store at tcp://127\.0\.0\.1:\d+: the `muster run` there", job.err), job.err
        assert "begins" not in job.err
    for job in jobs:
        assert job.left_behind() == []


# The worker's actions before the root's agent is killed.
STEPS = {
    "barrier": f"echo ready $$\n[ $RANK = 0 ] || exec {find_muster()} store barrier b 2\n",
    "end": "trap 'echo ending' TERM\necho ready $$\n",
}


@pytest.mark.parametrize("tiers", [[], ["--enable-tiered-parallel-tcpstore"]], ids=["plain", "tiered"])
@pytest.mark.parametrize("step", ["barrier", "end"])
def test_the_root_dies_while_workers_run(start: Launch, two_nodes: list[str], step: str, tiers: list[str]) -> None:
    code = STEPS[step] + "while :; do sleep 1000 & wait; done\n"
    # The root's workers ignore SIGTERM, so that its agent runs until it is killed.
    times = ["--shutdown-timeout=1000", "--shutdown-timeout=1"]
    root, other = (start(*two_nodes, *tiers, f"--node-rank={rank}", times[rank], code=code) for rank in range(2))
    pids = [int(job.expect(r"ready (\d+)")[0][1]) for job in (root, other)]
    if step == "end":
        other.send(signal.SIGTERM)
        for job in (root, other):
            job.expect("ending")
    else:
        wait_until(lambda: b"barrier" in Path(f"/proc/{pids[1]}/cmdline").read_bytes())
    end(root, "agent")
    assert root.finish() == 137
    # If the worker in the barrier notices the loss first, its status becomes the status of the job.
    assert other.finish() in ((143,) if step == "end" else (1, 3))
    assert ("SIGTERM on host" if step == "end" else "lost the job's store at tcp://") in other.err, other.err
    for job in (root, other):
        assert job.left_behind() == []


IMPORT_FOREVER = "import os, signal\nos.write(2, b'importing %d\\n' % os.getpid())\nwhile True: signal.pause()\n"


@pytest.mark.parametrize("victim", ["zygote", "every_zygote", "agent"])
def test_death_while_the_zygote_imports(
    launch: Launch, script: Callable[[str], Path], tmp_path: Path, victim: str
) -> None:
    pytest.importorskip("torch")
    module = tmp_path / "long_import.py"
    module.write_text(IMPORT_UNTIL_RESUMED if victim == "zygote" else IMPORT_FOREVER)
    words = ["--no-warm", "--preload=long_import", "--nproc-per-node=2"]
    env = {"PYTHONPATH": str(tmp_path), "PET_START_METHOD": "zygote"}
    job = launch(*words, script("print('child of', os.getppid())"), env=env)
    zygotes = [int(job.expect(r"importing (\d+)")[0][1])]
    agent = job.agent()
    if victim == "agent":
        end(job, victim)
        assert job.finish() == 137
    else:
        # A zygote is replaced once. If zygotes continue to die, the workers are started without one.
        for number in range(1 if victim == "zygote" else 3):
            zygotes.append(int(job.expect(r"importing (\d+)", number + 1)[number][1]))
            os.kill(zygotes[-1], signal.SIGKILL)
        if victim == "zygote":
            zygotes.append(int(job.expect(r"importing (\d+)", 2)[1][1]))
            module.with_name(module.name + ".resumed").touch()
        assert job.finish() == 0, job.err
        parent = zygotes[-1] if victim == "zygote" else agent
        assert job.out.count(f"child of {parent}\n") == 2, job.out
    wait_until(lambda: all(map(is_gone, zygotes)))
    assert job.left_behind() == []


IMPORT_UNTIL_RESUMED = """import os
os.write(2, b'importing %d\\n' % os.getpid())
while not os.path.exists(__file__ + '.resumed'): os.sched_yield()
"""


@pytest.mark.parametrize("victim", ["root", "member", "replaced_member"])
def test_one_agent_dies_while_zygotes_import(
    launch: Launch, script: Callable[[str], Path], two_nodes: list[str], tmp_path: Path, victim: str
) -> None:
    pytest.importorskip("torch")
    module = tmp_path / "long_import.py"
    module.write_text(IMPORT_UNTIL_RESUMED)
    restarts = int(victim == "replaced_member")
    words = ["--no-warm", "--preload=long_import", f"--max-restarts={restarts}", *two_nodes, script("print('ran')")]
    env = {"PYTHONPATH": str(tmp_path), "PET_START_METHOD": "zygote", "MUSTER_SECRET": secrets.token_hex(32)}

    def start(rank: int) -> Job:
        return launch(f"--node-rank={rank}", *words, env={**env, "PET_EVENT_LOG_HANDLER": "console"})

    jobs = [start(rank) for rank in range(2)]
    zygotes = [int(job.expect(r"importing (\d+)")[0][1]) for job in jobs]
    for job in jobs:
        job.expect("generation_began")
    lost, kept = jobs if victim == "root" else reversed(jobs)
    end(lost, "agent")
    if restarts:
        kept.expect("its agent was killed")
        jobs.append(start(1))
        zygotes.append(int(jobs[2].expect(r"importing (\d+)")[0][1]))
        module.with_name(module.name + ".resumed").touch()
        assert [kept.finish(), jobs[2].finish()] == [0, 0], kept.err + jobs[2].err
        assert "[rank 0] ran" in kept.out and "[rank 1] ran" in jobs[2].out
    else:
        assert kept.finish() == 1
        assert ("lost the job's store at tcp://" if victim == "root" else "its agent was killed") in kept.err, kept.err
    assert lost.finish() == 137
    wait_until(lambda: all(map(is_gone, zygotes)))
    for job in jobs:
        assert job.left_behind() == []


@pytest.mark.parametrize("before", [[], ["sh", "-c", '"$0" "$@"; echo over']], ids=["alone", "under_a_shell"])
def test_closing_the_terminal_ends_the_job(muster: str, before: list[str]) -> None:
    ours, theirs = pty.openpty()
    mark = f"MUSTER_TEST_MARK={uuid.uuid4().hex}"
    child = "trap '' HUP; sleep 1000 & setsid sleep 1001 & while :; do echo ready; sleep 0.1; done"
    command = [*before, muster, "run", "--nproc-per-node=2", "--shutdown-timeout=0.2", "--no-python", "sh", "-c", child]
    command = ["env", mark, "setsid", "--ctty", *command]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        shown = b""
        while shown.count(b"ready") < 4:
            assert select.select([ours], [], [], TIMEOUT)[0], shown
            shown += os.read(ours, 4096)
        assert marked_processes(mark) != []
        os.close(ours)
        process.wait(TIMEOUT)
        wait_until(lambda: marked_processes(mark) == [])
    finally:
        process.kill()
        process.wait()
        for pid in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
