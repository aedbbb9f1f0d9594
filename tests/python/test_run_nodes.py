"""Tests `muster run` on several nodes: launchers on this host that know only the root's port."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Job, Launch, find_muster, free_port

Node = Callable[..., Job]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """node(rank, words..., code=...) starts one node of this test's job. `rank` None means no --node-rank."""
    muster = find_muster()
    if muster is None:
        pytest.fail("there is no muster binary: build it, or name it with MUSTER_BIN")
    port, secret = free_port(), secrets.token_hex(32)
    jobs: list[Job] = []

    def start(
        rank: int | None,
        *words: str,
        code: str = "print('ran')",
        nnodes: int = 2,
        key: str = secret,
        master: str = "127.0.0.1",
    ) -> Job:
        script = tmp_path / f"script{len(jobs)}.py"
        script.write_text(f"import os, signal, sys\nrank = int(os.environ['RANK'])\n{code}\n")
        place = [] if rank is None else [f"--node-rank={rank}"]
        # A later option overrides an earlier one, so tests can pass their own timeout.
        options = [f"--nnodes={nnodes}", f"--master-addr={master}", f"--master-port={port}", *place, *words]
        env = {"MUSTER_PYTHON": sys.executable, "MUSTER_SECRET": key}
        jobs.append(Job([muster, "run", *options, script], env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


WAIT_FOREVER = "print('ready', os.getpid(), flush=True)\nwhile True: signal.pause()\n"


def the_first_to_end(one: Job, other: Job) -> tuple[Job, Job]:
    """Both jobs, beginning with the one that ended first."""
    while one.process.poll() is None and other.process.poll() is None:
        signal.sigtimedwait([], 0.01)
    return (one, other) if one.process.poll() is not None else (other, one)


def test_two_nodes_are_one_job(node: Node) -> None:
    code = "print(*(os.environ[n] for n in ('GROUP_RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')))"
    first = node(0, "--nproc-per-node=1", code=code)
    second = node(1, "--nproc-per-node=2", code=code)
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    assert first.out == "[rank 0] 0 0 3 1\n"
    assert sorted(second.out.splitlines()) == ["[rank 1] 1 0 3 2", "[rank 2] 1 1 3 2"]


def test_nodes_can_start_in_any_order(node: Node) -> None:
    second = node(1)
    second.expect("waiting for node 0")
    first = node(0)
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err


def test_nodes_without_a_rank_take_one_by_arrival(node: Node) -> None:
    jobs = [node(None, code="print('node', os.environ['GROUP_RANK'])", nnodes=3) for _ in range(3)]
    assert [job.finish() for job in jobs] == [0, 0, 0], "".join(job.err for job in jobs)
    assert sorted(job.out for job in jobs) == [f"[rank {i}] node {i}\n" for i in range(3)]


@pytest.mark.parametrize("words", [[], ["--reachable-master-addr"]], ids=["loopback", "reachable"])
def test_stock_torch_stores_of_two_nodes_connect(node: Node, words: list[str]) -> None:
    pytest.importorskip("torch")
    code = """
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False,
                 timeout=timedelta(seconds=100))
store.set(f'from-{rank}', str(rank + 1))
print('sum', sum(int(store.get(f'from-{i}')) for i in range(4)))
"""
    jobs = [node(rank, "--nproc-per-node=2", *words, code=code) for rank in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert "".join(job.out for job in jobs).count("sum 10") == 4


REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group('muster')
total = torch.full((100_001,), float(rank + 1))
dist.all_reduce(total)
print('sum', total.unique().tolist(), 'on', os.environ['MUSTER_INTERFACE'])
dist.destroy_process_group()
"""


def test_nodes_form_a_group_and_reduce_over_ipv6(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if not has_ipv6_loopback():
        pytest.skip("no IPv6 here")
    monkeypatch.delenv("MUSTER_INTERFACE", raising=False)
    monkeypatch.setenv("MUSTER_TRANSPORT", "tcp")
    jobs = [node(rank, code=REDUCE, master="::1") for rank in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert [job.out for job in jobs] == [f"[rank {rank}] sum [3.0] on ::1\n" for rank in range(2)]


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(("given", "got"), [(None, "127.0.0.1"), ("lo", "lo")])
def test_workers_listen_on_the_interface_to_the_root(
    node: Node, monkeypatch: pytest.MonkeyPatch, given: str | None, got: str
) -> None:
    monkeypatch.delenv("MUSTER_INTERFACE", raising=False)
    if given is not None:
        monkeypatch.setenv("MUSTER_INTERFACE", given)
    jobs = [node(rank, code="print(os.environ['MUSTER_INTERFACE'])") for rank in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert [job.out for job in jobs] == [f"[rank {rank}] {got}\n" for rank in range(2)]


def test_a_failing_node_ends_the_others_with_its_report(node: Node) -> None:
    first = node(0, code=WAIT_FOREVER)
    second = node(1, code="raise KeyError('only here')")
    assert (first.finish(), second.finish()) == (1, 1)
    for job in (first, second):
        assert re.search(r"muster: rank 1 \(host \S+, pid \d+\) exited with status 1", job.err), job.err
        assert "KeyError: 'only here'" in job.err
        assert job.left_behind() == []


def test_an_interrupt_on_one_node_ends_all(node: Node) -> None:
    jobs = [node(0, code=WAIT_FOREVER), node(1, code=WAIT_FOREVER)]
    for job in jobs:
        job.expect("ready")
    jobs[1].send(signal.SIGINT)
    assert [job.finish() for job in jobs] == [130, 130]
    for job in jobs:
        assert "SIGINT on host" in job.err
        assert job.left_behind() == []


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_a_lost_root_ends_the_job_with_a_clear_error(node: Node, victim: str) -> None:
    first, second = node(0, code=WAIT_FOREVER), node(1, code=WAIT_FOREVER)
    first.expect("ready")
    second.expect("ready")
    if victim == "launcher":
        # The root's agent sees the loss of its launcher, and has time to report it.
        os.kill(first.process.pid, signal.SIGKILL)
        assert second.finish() == 137
        assert "was killed on host" in second.err
    else:
        os.kill(first.agent(), signal.SIGKILL)
        assert second.finish() == 1
        assert "lost the job's store at tcp://127.0.0.1:" in second.err
    first.finish()
    for job in (first, second):
        assert job.left_behind() == []


def test_a_node_that_finished_waits_for_the_others(node: Node) -> None:
    first = node(0, code="print('over')")
    second = node(1, code="print('ready', flush=True)\nsignal.pause()")
    first.expect("over")
    second.expect("ready")
    assert first.process.poll() is None
    second.send(signal.SIGTERM)
    assert (first.finish(), second.finish()) == (143, 143)


def test_another_secret_is_refused(node: Node) -> None:
    first = node(0, "--timeout=100")
    wrong_secret = node(1, "--timeout=100", key="00" * 32)
    assert wrong_secret.finish() == 1
    assert "secret" in wrong_secret.err
    second = node(1)
    assert (first.finish(), second.finish()) == (0, 0)
    assert re.search(r"refused 127\.0\.0\.1:\d+: .*secret", first.err), first.err


def test_without_a_secret_the_user_is_warned(node: Node) -> None:
    jobs = [node(rank, key="") for rank in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert "no secret was given" in jobs[0].err


def test_a_node_rank_that_is_given_twice_is_refused(node: Node) -> None:
    first = node(0, nnodes=3)
    second, third = node(1, nnodes=3), node(1, nnodes=3)
    refused, kept = the_first_to_end(second, third)
    assert refused.finish() == 1
    assert re.search(rf"node rank 1 is taken by host {socket.gethostname()}", refused.err)
    last = node(2, nnodes=3)
    assert [job.finish() for job in (first, kept, last)] == [0, 0, 0]


def test_a_second_node_0_is_refused(node: Node) -> None:
    first = node(0)
    node_1 = node(1, code=WAIT_FOREVER)
    node_1.expect("ready")
    second = node(0)
    assert second.finish() == 1
    assert "does another node 0 run there" in second.err
    node_1.send(signal.SIGTERM)
    first.finish()


CLUSTERS = {
    "PyTorchJob": {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "2", "RANK": "{rank}"},
    "PyTorchJob's PET_*": {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "2", "PET_NODE_RANK": "{rank}",
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "{port}", "PET_NPROC_PER_NODE": "1",
    },
    "JobSet": {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "{rank}", "JOBSET_NAME": "train"},
    "Open MPI's mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{rank}", "PMIX_RANK": "{rank}"},
    "MPICH's mpirun": {"PMI_SIZE": "2", "PMI_RANK": "{rank}"},
    "PMIx": {"PMIX_RANK": "{rank}"},
    "Slurm": {
        "SLURM_JOB_ID": "{job}", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost,n[7-9]",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "{rank}", "MASTER_ADDR": "",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_clusters_environment_makes_two_agents_one_job(
    launch: Launch, script: Callable[[str], Path], name: str
) -> None:
    port, secret = free_port(), secrets.token_hex(32)
    path = script("print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'GROUP_RANK')))")
    words = ["--nnodes=2"] if name in ("JobSet", "PMIx") else []
    jobs = []
    for rank in range(2):
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}", **CLUSTERS[name]}
        env = {key: value.format(rank=rank, port=port, job=port) for key, value in given.items()}
        jobs.append(launch(*words, path, env={**env, "MUSTER_SECRET": secret}))
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert [job.out for job in jobs] == ["[rank 0] 0 2 0\n", "[rank 1] 1 2 1\n"]
    assert ("taken from" in jobs[0].err) == (name != "PyTorchJob's PET_*"), jobs[0].err
    for job in jobs:
        assert job.left_behind() == []


def test_nodes_that_disagree_about_their_number_are_refused(node: Node) -> None:
    first = node(0, "--timeout=100", nnodes=2)
    other = node(1, "--timeout=100", nnodes=3)
    refused, _ = the_first_to_end(first, other)
    assert refused.finish() == 1
    assert "--nnodes 2" in refused.err and "--nnodes 3" in refused.err


def test_the_configured_node_is_the_root(node: Node) -> None:
    # Both nodes could listen at the address. Without is_host, the first one to arrive would become the root.
    second = node(None, "--rdzv-conf=is_host=false", code="print('node', os.environ['GROUP_RANK'])")
    second.expect("waiting for node 0")
    first = node(None, "--rdzv-conf=is_host=true", code="print('node', os.environ['GROUP_RANK'])")
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    assert (first.out, second.out) == ("[rank 0] node 0\n", "[rank 1] node 1\n")


def test_a_node_without_keep_alive_is_lost(node: Node) -> None:
    words = ["--rdzv-conf=keep_alive_interval=0.5,keep_alive_max_attempt=4"]
    first, second = node(0, *words, code=WAIT_FOREVER), node(1, *words, code=WAIT_FOREVER)
    for job in (first, second):
        job.expect("ready")
    os.kill(second.agent(), signal.SIGSTOP)
    assert first.finish() == 1
    assert re.search(r"lost host \S+ \(agent's pid \d+\): no heartbeat for 2 s", first.err), first.err
    assert first.left_behind() == []


def test_the_root_waits_close_timeout_for_late_nodes(node: Node, tmp_path: Path) -> None:
    # The root's own command cannot run, and the other nodes must get that error.
    words = ["--rdzv-conf=close_timeout=1000", "--no-python", str(tmp_path / "missing")]
    first = node(0, *words)
    first.expect("missing")
    assert first.process.poll() is None
    second = node(1, *words)
    assert (first.finish(), second.finish()) == (127, 127), first.err + second.err


def test_nodes_missing_after_join_timeout_are_named(node: Node) -> None:
    first = node(0, "--rdzv-conf=join_timeout=1.5", nnodes=3)
    assert first.finish() == 1
    assert "of 3 nodes, nodes 1, 2 did not come within 1.5 s" in first.err


def test_missing_nodes_are_named(node: Node) -> None:
    first = node(0, "--timeout=1", nnodes=3)
    assert first.finish() == 1
    assert "of 3 nodes, nodes 1, 2 did not come" in first.err


def test_a_missing_root_is_named(node: Node) -> None:
    second = node(1, "--timeout=0.5")
    assert second.finish() == 1
    assert re.search(r"node 0 did not answer at tcp://127.0.0.1:\d+ within 0.5 s", second.err), second.err


def test_waiting_for_an_unknown_host_is_reported(node: Node) -> None:
    # libc rejects names under .invalid (RFC 6761) without asking the network. A cluster's name may become known later,
    # so the node keeps waiting.
    second = node(1, "--timeout=100", master="root.job.invalid")
    second.expect("--master-addr: host 'root.job.invalid' is unknown")
    second.send(signal.SIGINT)
    assert second.finish() != 0


def test_a_foreign_server_as_root_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "platform"]
        job = Job([str(find_muster()), "run", *words], {"MUSTER_PYTHON": sys.executable})
        try:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                assert job.finish() == 1
            assert "HTTP" in job.err, job.err
        finally:
            job.close()


def test_a_worker_that_cannot_start_on_one_node_ends_the_job(node: Node, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("#!/no/such/interpreter\n")
    bad.chmod(0o700)
    first = node(0, code=WAIT_FOREVER)
    # The script that the fixture adds is an argument of this program.
    second = node(1, "--no-python", str(bad))
    assert (first.finish(), second.finish()) == (127, 127)
    assert f"cannot start '{bad}'" in first.err


@pytest.fixture
def read_store() -> Path:
    """A program that prints a value from the job's store."""
    helper = Path(str(find_muster())).resolve().parents[3] / "tests/launch/read_store"
    if not helper.exists():
        pytest.skip("the binary in use is not that of a build folder with tests")
    return helper


@pytest.mark.parametrize("key", [secrets.token_hex(32), ""], ids=["secret", "none"])
def test_exits_can_be_read_in_the_store(node: Node, read_store: Path, key: str) -> None:
    code = f"os.execv({str(read_store)!r}, ['read_store', 'muster/run/none/exit/0/1'])"
    first, second = node(0, code=code, key=key), node(1, code="sys.exit(0)", key=key)
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    assert '"code":0' in first.out and '"signal":0' in first.out


def make_certificates(folder: Path) -> dict[str, str]:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=100)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=authority",
            "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")  # fmt: skip
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=node",
            "-keyout", "node.key", "-out", "node.csr")  # fmt: skip
    openssl("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", "node.pem", "-days", "2")  # fmt: skip
    files = {"CERT": "node.pem", "KEY": "node.key", "CA": "ca.pem"}
    return {f"MUSTER_TLS_{name}": str(folder / file) for name, file in files.items()}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_nodes_with_certificates_speak_tls(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    plain = node(1, "--timeout=100")
    plain.expect("waiting for node 0")
    for name, value in make_certificates(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MUSTER_TRANSPORT", "tcp")
    first = node(0, "--timeout=100", code=REDUCE)
    assert plain.finish() == 1, "a node without certificates got in"
    second = node(1, code=REDUCE)
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    assert "sum [3.0]" in first.out and "sum [3.0]" in second.out
