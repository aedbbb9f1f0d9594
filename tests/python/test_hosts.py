"""Tests one job on two hosts, with two agents: gradients go over TCP."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import SECRET, Host, ip, run_on, two_hosts, two_lossy_hosts
from launching import START_TIMEOUT, TIMEOUT, wait_until
from lossy_training import Training


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def test_the_demo_trains_across_two_hosts(
    hosts: tuple[Host, Host], root: Path, release_build: Path, tmp_path: Path
) -> None:
    script: list[str | Path] = [root / "examples/python/digits.py", "--plot", tmp_path / "digits.png"]
    (status, output), (other_status, other_output) = run_on(hosts, release_build / "src/muster/cli/muster", script)
    assert (status, other_status) == (0, 0), output + other_output
    accuracies = [float(number) for number in re.findall(r"held-out accuracy +([\d.]+)%", output)]
    assert accuracies and accuracies[-1] >= 97, output
    assert "with 4 ranks" in output


REPORT = """
import os, torch, torch.distributed as dist
dist.init_process_group("muster")
total = torch.full((100_001,), float(dist.get_rank() + 1))
dist.all_reduce(total)
size = dist.get_world_size()
assert total.eq(size * (size + 1) / 2).all(), total
listening = [line.split()[1] for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
ports = sum(not address.startswith("0100007F") for address in listening)
print(f"sum ok; {ports} ports open to the network", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_only_documented_ports_stay_open(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    (status, output), (other_status, other_output) = run_on(hosts, release_build / "src/muster/cli/muster", [script])
    assert (status, other_status) == (0, 0), output + other_output
    # Each rank has one port, to which other ranks may connect to send it messages. Unauthenticated peers fail there as
    # at any other port.
    assert output.count("sum ok; 3 ports open") == 2, output
    assert other_output.count("sum ok; 2 ports open") == 2, other_output


def test_hosts_rendezvous_in_a_shared_file(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    meeting = f"file://{tmp_path}/meeting"
    ended = run_on(hosts, release_build / "src/muster/cli/muster", [script], 1, ("--timeout", "30"), meeting)
    assert [status for status, _ in ended] == [0, 0], ended
    assert all("sum ok" in output for _, output in ended), ended


def test_the_named_interface_carries_the_job(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT + "print('on', os.environ['MUSTER_INTERFACE'], flush=True)\n")
    binary = release_build / "src/muster/cli/muster"
    reports = run_on(hosts, binary, [script], nproc=1, options=("--interface", "veth0"))
    for status, output in reports:
        assert status == 0, output
        assert "sum ok" in output and "on veth0" in output, output


def test_a_node_with_another_secret_is_refused(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    binary = release_build / "src/muster/cli/muster"
    common = ["--nnodes", "2", "--timeout", "60", "--nproc-per-node", "1"]
    common += ["--master-addr", hosts[0].address, "--master-port", "29500", str(script)]
    root = hosts[0].start(
        [binary, "run", "--node-rank", "0", *common],
        env={"MUSTER_SECRET": SECRET},
    )
    wrong_secret = hosts[1].start(
        [binary, "run", "--node-rank", "1", *common],
        env={"MUSTER_SECRET": SECRET[::-1]},
    )
    try:
        output = wrong_secret.communicate(timeout=90)[0]
        assert wrong_secret.returncode != 0
        assert "its job secret differs" in output, output
        assert root.poll() is None  # it goes on waiting for the real one
    finally:
        root.kill()
        wrong_secret.kill()
        root.wait(timeout=30)


PARTED = """
import json, os, signal, sys, torch, torch.distributed as dist, muster
from datetime import timedelta
dist.init_process_group("muster")
data = torch.ones(300_001)
dist.all_reduce(data)
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))  # not before: ranks come late to form it
open(sys.argv[1] + f"/running.{dist.get_rank()}", "w").close()
try:
    while True:
        dist.all_reduce(data)
except muster.Error as error:
    path = sys.argv[1] + f"/error.{dist.get_rank()}"
    with open(path + ".part", "w") as file:
        json.dump({"kind": type(error).__name__, "rank": error.rank, "text": str(error)}, file)
    os.rename(path + ".part", path)
    signal.pause()  # the test ends all
"""


def test_partitioned_ranks_fail_at_their_deadline(
    hosts: tuple[Host, Host], release_build: Path, tmp_path: Path
) -> None:
    script = tmp_path / "parted.py"
    script.write_text(PARTED)
    binary = release_build / "src/muster/cli/muster"
    agents = []
    for node, host in enumerate(hosts):
        command = [binary, "run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
        command += ["--master-addr", hosts[0].address, "--master-port", "29500", script, tmp_path]
        agents.append(host.start(command, env={"MUSTER_SECRET": SECRET}))

    def all_written(what: str) -> bool:
        return all((tmp_path / f"{what}.{rank}").exists() for rank in range(4))

    try:
        wait_until(lambda: all_written("running"))
        ip("-n", hosts[1].namespace, "link", "set", "veth0", "down")
        wait_until(lambda: all_written("error"))
        errors = [json.loads((tmp_path / f"error.{rank}").read_text()) for rank in range(4)]
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.communicate(timeout=TIMEOUT)
    for rank, error in enumerate(errors):
        assert error["kind"] in ("TimeoutError", "PeerLostError"), error
        assert error["rank"] // 2 != rank // 2, f"the other host is to blame: {error}"
        assert f"rank {error['rank']} " in error["text"], error


def test_a_long_partition_names_the_other_side(release_build: Path, tmp_path: Path) -> None:
    with two_lossy_hosts(seed=1, loss=0.01, delay=0.02, jitter=0.01, reorder=0.05) as (hosts, network):
        training = Training(hosts, release_build / "src/muster/cli/muster", tmp_path, 1, timeout=8)
        try:
            training.wait_for_rounds(2)
            network.cut(10 * TIMEOUT)
            training.wait_until(lambda: len(training.errors()) == 4, errors_expected=True)
        finally:
            training.close()
    for rank, error in enumerate(training.errors()):
        assert error["kind"] in ("TimeoutError", "PeerLostError", "DistBackendError"), error
        named = re.search(r"rank (\d)", str(error["text"]))
        assert named and int(named[1]) // 2 != rank // 2, f"the other side is lost: {error}"
        assert error["rank"] in (int(named[1]), None), error
        assert (error["rank"] is None) == (error["kind"] == "DistBackendError"), error


TRACED = """
import sys, time, torch, torch.distributed as dist, muster
dist.init_process_group("muster")
data = torch.ones(1000)
for round in range(20):
    dist.all_reduce(data)
muster.trace(sys.argv[1], dist.group.WORLD)
print(f"clock {time.monotonic_ns()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="another clock takes util-linux's unshare")
def test_trace_corrects_clocks_of_hosts(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    script, trace = tmp_path / "traced.py", tmp_path / "trace.json"
    script.write_text(TRACED)
    agents = []
    for node, host in enumerate(hosts):
        ahead = ["unshare", "--time", "--fork", "--monotonic", "100000"] if node == 1 else []
        command = [
            *ahead,
            release_build / "src/muster/cli/muster",
            "run",
            "--nnodes",
            "2",
            "--node-rank",
            str(node),
        ]
        command += ["--master-addr", hosts[0].address, "--master-port", "29500", script, trace]
        agents.append(host.start(command, env={"MUSTER_SECRET": SECRET}))
    try:
        outputs = [agent.communicate(timeout=TIMEOUT)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    clocks = [int(re.findall(r"clock (\d+)", text)[0]) for text in outputs]
    assert clocks[1] - clocks[0] > 50_000e9, "the clocks do differ"
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    calls = [[event for event in events if event["pid"] >> 16 == rank and event["ts"] >= 0] for rank in range(2)]
    both = list(zip(*([e for e in each if e["name"] == "muster:all_reduce"] for each in calls), strict=True))
    assert len(both) >= 20
    for mine, theirs in both:  # neither ends before the other begins, within the error of the clock estimate
        assert mine["ts"] < theirs["ts"] + theirs["dur"] + 1e6
        assert theirs["ts"] < mine["ts"] + mine["dur"] + 1e6


WATCHED = """
import os, sys, time, torch, torch.distributed as dist
folder, rank = sys.argv[1], int(os.environ["RANK"])
def report(what):
    with open(f"{folder}/{what}.{rank}.part", "w") as file: file.write(str(os.getpid()))
    os.rename(f"{folder}/{what}.{rank}.part", f"{folder}/{what}.{rank}")
def wait_for(what):
    while not os.path.exists(f"{folder}/{what}"): os.sched_yield()
report("pid")
wait_for("numbers_taken")
dist.init_process_group("muster")
size, data, message = dist.get_world_size(), torch.ones(1000), torch.ones(1)
def call():
    data.fill_(1)
    dist.all_reduce(data)
    assert data.eq(size).all()
    for peer in sorted(set(range(size)) - {rank}):
        sent, got = dist.isend(message, peer), torch.zeros(1)
        dist.recv(got, peer)
        sent.wait()
        assert got.item() == 1
call()
report("formed")
wait_for("others_ended")
# The death of a peer is acted upon half a second later, so that its last message can be read.
deadline, left = time.monotonic() + 2, torch.ones(1)
while left.item():
    call()
    left.fill_(time.monotonic() < deadline)
    dist.all_reduce(left)
dist.barrier()
dist.destroy_process_group()
print("all is well", flush=True)
"""


def test_a_local_pid_equal_to_a_remote_ranks_may_exit(
    hosts: tuple[Host, Host], release_build: Path, tmp_path: Path
) -> None:
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    binary = release_build / "src/muster/cli/muster"
    agents: list[subprocess.Popen[str]] = []
    others: list[subprocess.Popen[str]] = []

    def all_written(what: str) -> bool:
        assert all(agent.poll() is None for agent in agents)
        return all((tmp_path / f"{what}.{rank}").exists() for rank in range(4))

    try:
        for node, host in enumerate(hosts):
            host.next_pid(1000 * (node + 1))  # so that the pids of one host's ranks are free on the other host
            command = [
                binary,
                "run",
                "--nnodes",
                "2",
                "--node-rank",
                str(node),
                "--nproc-per-node",
                "2",
            ]
            command += ["--master-addr", hosts[0].address, "--master-port", "29500", script, tmp_path]
            agents.append(host.start(command, env={"MUSTER_SECRET": SECRET}))
        wait_until(lambda: all_written("pid"), START_TIMEOUT)
        pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(4)]
        others += [hosts[1 - rank // 2].occupy(pid) for rank, pid in enumerate(pids)]
        (tmp_path / "numbers_taken").touch()
        wait_until(lambda: all_written("formed"))
        for process in others:
            process.kill()
            process.wait(TIMEOUT)
        (tmp_path / "others_ended").touch()
        outputs = [agent.communicate(timeout=TIMEOUT)[0] for agent in agents]
    finally:
        for process in (*agents, *others):
            process.kill()
            process.wait(TIMEOUT)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert all(text.count("all is well") == 2 for text in outputs), outputs


# Rank 0 listens at MASTER_ADDR. Stock clients and Gloo use the job's store there.
OWN_SERVER = """
import os, torch, torch.distributed as dist
from datetime import timedelta
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port, minute = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(minutes=1)
store = dist.TCPStore(address, port, is_master=False, timeout=minute)
own = dist.TCPStore(address, port + 1, size, is_master=rank == 0, timeout=minute)
own.set(f"from-{rank}", str(rank + 1))
total = sum(int(own.get(f"from-{i}")) for i in range(size))
print("node 0 at", os.environ["MUSTER_NODE0_ADDR"], "own server at", address, "sum", total, "store at", store.host)
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def test_a_script_may_listen_at_a_reachable_master_addr(
    hosts: tuple[Host, Host], release_build: Path, tmp_path: Path
) -> None:
    script = tmp_path / "server.py"
    script.write_text(OWN_SERVER)
    options = ("--reachable-master-addr",)
    ended = run_on(hosts, release_build / "src/muster/cli/muster", [script], options=options)
    text = "".join(output for _, output in ended)
    assert [status for status, _ in ended] == [0, 0], text
    first = re.escape(hosts[0].address)
    expected = rf"node 0 at {first} own server at {first} sum 10 store at 127\.0\.0\.1\n"
    assert len(re.findall(expected, text)) == 4, text


def test_hosts_look_like_separate_machines(hosts: tuple[Host, Host]) -> None:
    """Checks what the other tests assume."""
    look = "import os; print(os.getpid(), os.stat('/proc/self/ns/pid').st_ino, os.uname().nodename,"
    look += " open('/proc/sys/kernel/random/boot_id').read())"
    first, second = (host.start([sys.executable, "-c", look]).communicate(timeout=TIMEOUT)[0].split() for host in hosts)
    assert first[:2] == second[:2]  # the pid and the number of the PID namespace are equal
    assert first[2] != second[2]
    assert first[3] != second[3]
