"""Runs programs of tutorials as they are: DistributedDataParallel and remote calls, under mp.spawn, the fork server and
the launcher.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from launching import Job, find_muster, free_port

pytest.importorskip("torch")

# The program of PyTorch's overview of DistributedDataParallel, on CPUs and with the `import os` that it lacks.
TUTORIAL = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


def example(rank, world_size):
    # create default process group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    # create local model
    model = nn.Linear(10, 10)
    # construct DDP model
    ddp_model = DDP(model)
    # define loss function and optimizer
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    # forward pass
    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 10)
    # backward pass
    loss_fn(outputs, labels).backward()
    # update parameters
    optimizer.step()
    weights = [torch.empty(10, 10) for _ in range(world_size)]
    dist.all_gather(weights, model.weight.data)
    assert torch.equal(*weights)
    backend = dist.group.WORLD._get_backend(torch.device("cpu")).name()
    print(f"trained over {backend}", flush=True)  # one write, because the other rank prints, too

def main():
    world_size = 2
    spawn = mp.spawn
    if sys.argv[1] == "muster":
        from muster.forkserver import spawn
    spawn(example,
        args=(world_size,),
        nprocs=world_size,
        join=True)

if __name__=="__main__":
    # Environment variables which need to be
    # set when using c10d's default "env"
    # initialization mode.
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[2]
    main()
"""


@pytest.mark.parametrize("replace", [{}, {"MUSTER_REPLACE": "gloo"}], ids=["gloo", "replaced"])
@pytest.mark.parametrize("method", ["spawn", "muster"])
def test_the_tutorial_of_ddp(tmp_path: Path, method: str, replace: dict[str, str]) -> None:
    path = tmp_path / "tutorial.py"
    path.write_text(TUTORIAL)
    job = Job([sys.executable, path, method, str(free_port())], env={"GLOO_SOCKET_IFNAME": "lo", **replace})
    with contextlib.closing(job):
        assert job.finish() == 0, job.err
        assert job.out.count(f"trained over {'muster' if replace else 'gloo'}") == 2
        assert job.left_behind() == []


# A tutorial of torch.distributed.rpc. Only its import was changed, and the port.
REMOTE_CALL = """
import os
import muster.rpc as rpc
import torch.multiprocessing as mp

def remote_square(x):
    print(f"Received {x} from caller. Computing its square...")
    return x * x

def worker(rank, world_size):
    rpc.init_rpc(
        name=f"worker{rank}",
        rank=rank,
        world_size=world_size
    )
    rpc.shutdown()

def caller(rank, world_size):
    rpc.init_rpc(
        name=f"caller{rank}",
        rank=rank,
        world_size=world_size
    )

    response = rpc.rpc_sync(to="worker1", func=remote_square, args=(5,))
    print(f"Caller received: {response}")

    rpc.shutdown()

def main(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29502"

    if rank == 0:
        caller(rank, world_size)
    else:
        worker(rank, world_size)

if __name__ == "__main__":
    world_size = 2
    mp.spawn(main, args=(world_size,), nprocs=world_size)
"""


@pytest.mark.parametrize("launched", [False, True])
def test_the_tutorial_of_remote_calls(tmp_path: Path, launched: bool) -> None:
    path = tmp_path / "remote_call.py"
    path.write_text(REMOTE_CALL.replace("29502", str(free_port())))
    job = Job([*([find_muster(), "run"] if launched else [sys.executable]), path])
    with contextlib.closing(job):
        assert job.finish() == 0, job.err
        assert "Received 5 from caller." in job.out and "Caller received: 25" in job.out, job.out
        assert job.left_behind() == []
