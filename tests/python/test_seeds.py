"""Runs the command lines of torch_npu_run's manual as they are written, with `muster run` as the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Host, two_hosts
from launching import find_muster, free_port

DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("muster")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 4) * dist.get_rank()).sum().backward()
    optimizer.step()
weights = [torch.zeros(1, 4) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.data)
assert all(torch.equal(weight, weights[0]) for weight in weights)
print("trained", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
"""
TIMEOUT = 200  # seconds: sixteen processes import torch on a loaded machine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ddp_test.py").write_text(DDP)
    return tmp_path


def command(line: str) -> list[str | Path]:
    muster = find_muster()
    assert muster is not None, "there is no muster binary: build it, or name it with MUSTER_BIN"
    return ["sh", "-c", line.replace("torch_npu_run", f"{muster} run")]


def environment(address: str, secret: str = "", port: int = 29517) -> dict[str, str]:
    names = {"MASTER_IP_ADDR": address, "MASTER_PORT": str(port), "MUSTER_PYTHON": sys.executable}
    # One thread for each worker, because both nodes share this machine's CPUs.
    return {**names, "MUSTER_SECRET": secret, "OMP_NUM_THREADS": "1"}


def all_ranks_trained(output: str, size: int) -> bool:
    return all(f"[rank {rank}] trained {rank} of {size}" in output for rank in range(size))


ONE_NODE = (
    "torch_npu_run --rdzv_backend=parallel --master_addr=$MASTER_IP_ADDR --master_port=$MASTER_PORT --nnodes=1"
    " --nproc_per_node=8 ddp_test.py"
)


def test_one_node_with_eight_workers(folder: Path) -> None:
    done = subprocess.run(
        command(ONE_NODE),
        cwd=folder, env={**os.environ, **environment("127.0.0.1", port=free_port())},
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all_ranks_trained(done.stdout, 8), done.stdout


TWO_NODES = (
    "torch_npu_run --rdzv_backend=parallel --master_addr=$MASTER_IP_ADDR --master_port=$MASTER_PORT --nnodes=2"
    " --node_rank {} --nproc_per_node=8 {} ddp_test.py"
)


@pytest.mark.parametrize("tiers", ["", "--enable_tiered_parallel_tcpstore=true"], ids=["plain", "tiered"])
def test_two_nodes_with_sixteen_workers(folder: Path, tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with two_hosts() as hosts:

        def start(rank: int, host: Host) -> "subprocess.Popen[str]":
            return host.start(command(TWO_NODES.format(rank, tiers)), environment(hosts[0].address, "ab" * 32))

        nodes = [start(rank, host) for rank, host in enumerate(hosts)]
        try:
            output = "".join(node.communicate(timeout=TIMEOUT)[0] for node in nodes)
        finally:
            for node in nodes:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], output
    assert all_ranks_trained(output, 16), output
