"""Tests `muster run` on several hosts, in network namespaces: a barrier through tiers, and the loss of a host."""

import secrets
from pathlib import Path

import pytest
from hosts import Host, hosts_on_a_switch, ip
from launching import Job, find_muster

BARRIER = 'exec "$0" store barrier start "$WORLD_SIZE"'


def start(host: Host, root: Host, secret: str, *words: str, code: str) -> Job:
    muster = str(find_muster())
    place = [f"--master-addr={root.address}", "--master-port=29517", *words]
    worker = ["--no-python", "/bin/sh", "-c", code, muster]
    return Job([muster, "run", *place, *worker], {"MUSTER_SECRET": secret}, popen=host.popen)


@pytest.mark.parametrize(("count", "tiers"), [(4, ()), (16, ("--enable-tiered-parallel-tcpstore", "--store-fanout=4"))])
def test_workers_of_many_hosts_complete_a_barrier(count: int, tiers: tuple[str, ...]) -> None:
    secret = secrets.token_hex(32)
    with hosts_on_a_switch(count) as hosts:
        jobs = []
        try:
            for rank, host in enumerate(hosts):
                words = (f"--nnodes={count}", f"--node-rank={rank}", "--nproc-per-node=2", *tiers)
                jobs.append(start(host, hosts[0], secret, *words, code=BARRIER))
            assert [job.finish() for job in jobs] == [0] * count, "".join(job.err for job in jobs)
        finally:
            for job in jobs:
                job.close()


def test_a_vanished_host_is_named_and_others_continue(tmp_path: Path) -> None:
    secret = secrets.token_hex(32)
    enough = tmp_path / "enough"
    code = f"echo rank $RANK of $WORLD_SIZE; [ -e {enough} ] || exec sleep 1000"
    words = ("--nnodes=2:3", "--rdzv-conf=last_call_timeout=60,heartbeat_timeout=3", "--nproc-per-node=1")
    with hosts_on_a_switch(3) as hosts:
        jobs = []
        try:
            for host in hosts:
                jobs.append(start(host, hosts[0], secret, *words, code=code))
            for job in jobs:
                job.expect(r"rank \d of 3")
            enough.touch()
            ip("-n", hosts[2].namespace, "link", "set", "veth0", "down")
            assert [job.finish() for job in jobs[:2]] == [0, 0], jobs[0].err
            for job in jobs[:2]:
                assert "no heartbeat for 3 s" in job.err
                assert " of 2" in job.out
            # The host that was cut off also gives up: it has lost the root.
            assert jobs[2].finish() == 1
            assert "lost the job's store at tcp://10.78.0.1:29517" in jobs[2].err
        finally:
            for job in jobs:
                job.close()
