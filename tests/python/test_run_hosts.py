"""Tests `muster run` on several hosts, in network namespaces: a barrier through tiers, and the loss of a host."""

import secrets
import signal
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


@pytest.mark.parametrize("tiers", [(), ("--enable-tiered-parallel-tcpstore", "--store-fanout=1")])
def test_the_root_of_an_elastic_job_hands_over_twice(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    secret = secrets.token_hex(32)
    enough = tmp_path / "enough"
    wait = f"while [ ! -e {enough} ]; do sleep 0.05; done"
    code = f"echo generation $MUSTER_GENERATION of $WORLD_SIZE; {BARRIER.replace('exec ', '')} && {wait}"
    words = ("--nnodes=2:3", "--rdzv-conf=last_call_timeout=1000,heartbeat_timeout=1000", "--nproc-per-node=1", *tiers)
    with hosts_on_a_switch(3) as hosts:
        jobs = []

        def join(host: Host) -> Job:
            jobs.append(start(host, hosts[0], secret, *words, code=code))
            return jobs[-1]

        try:
            first, second, third = map(join, hosts)
            for job in (first, second, third):
                job.expect("generation 0 of 3")
            first.send(signal.SIGTERM)
            for job in (second, third):
                job.expect("generation 1 of 2")
            assert first.finish() == 143
            again = join(hosts[0])  # it knows only the address where the root was
            for job in (second, third, again):
                job.expect("generation 2 of 3")
            assert "this node runs the job's root now" not in again.err
            (root,) = (job for job in (second, third) if "this node runs the job's root now" in job.err)
            root.send(signal.SIGTERM)
            rest = [job for job in (second, third, again) if job is not root]
            for job in rest:
                job.expect("generation 3 of 2")
            assert root.finish() == 143
            enough.touch()
            assert [job.finish() for job in rest] == [0, 0], rest[0].err + rest[1].err
            for job in jobs:
                assert "restart 1" not in job.err
                assert job.left_behind() == []
        finally:
            for job in jobs:
                job.close()
