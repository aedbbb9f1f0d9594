"""The demo across two hosts: two agents, one job, gradients over TCP."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, two_hosts

SECRET = "00112233445566778899aabbccddeeff"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def run_on(
    hosts: tuple[Host, Host],
    binary: Path,
    script: list[str | Path],
    nproc: int = 2,
    options: tuple[str, ...] = (),
) -> list[tuple[int, str]]:
    """Starts one agent a host; their exit statuses and outputs."""
    agents = []
    for node, host in enumerate(hosts):
        command = [binary, "run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(nproc)]
        command += ["--master-addr", hosts[0].address, "--master-port", "29500", *options, *script]
        agents.append(host.start(command, env={"MUSTER_SECRET": SECRET}))
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


def test_the_demo_trains_across_two_hosts(
    hosts: tuple[Host, Host], root: Path, release_build: Path, tmp_path: Path
) -> None:
    script: list[str | Path] = [root / "examples/python/digits.py", "--plot", tmp_path / "digits.png"]
    (status, said), (other_status, other_said) = run_on(hosts, release_build / "src/muster/launch/muster", script)
    assert (status, other_status) == (0, 0), said + other_said
    accuracies = [float(number) for number in re.findall(r"held-out accuracy +([\d.]+)%", said)]
    assert accuracies and accuracies[-1] >= 97, said
    assert "with 4 ranks" in said


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


def test_no_ports_but_the_roots_and_those_for_messages_stay_open_to_the_network(
    hosts: tuple[Host, Host], release_build: Path, tmp_path: Path
) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    (status, said), (other_status, other_said) = run_on(hosts, release_build / "src/muster/launch/muster", [script])
    assert (status, other_status) == (0, 0), said + other_said
    # One for each rank, where others may dial to send it a message; strangers fail there as everywhere.
    assert said.count("sum ok; 3 ports open") == 2, said
    assert other_said.count("sum ok; 2 ports open") == 2, other_said


def test_the_named_interface_carries_the_job(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT + "print('on', os.environ['MUSTER_INTERFACE'], flush=True)\n")
    binary = release_build / "src/muster/launch/muster"
    reports = run_on(hosts, binary, [script], nproc=1, options=("--interface", "veth0"))
    for status, said in reports:
        assert status == 0, said
        assert "sum ok" in said and "on veth0" in said, said


def test_a_node_with_another_secret_is_refused(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    binary = release_build / "src/muster/launch/muster"
    common = ["--nnodes", "2", "--timeout", "60", "--nproc-per-node", "1"]
    common += ["--master-addr", hosts[0].address, "--master-port", "29500", str(script)]
    root = hosts[0].start(
        [binary, "run", "--node-rank", "0", *common],
        env={"MUSTER_SECRET": SECRET},
    )
    stranger = hosts[1].start(
        [binary, "run", "--node-rank", "1", *common],
        env={"MUSTER_SECRET": SECRET[::-1]},
    )
    try:
        said = stranger.communicate(timeout=90)[0]
        assert stranger.returncode != 0
        assert "its job secret is another one" in said, said
        assert root.poll() is None  # it goes on waiting for the real one
    finally:
        root.kill()
        stranger.kill()
        root.wait(timeout=30)
