"""Train on GPUs, with a process for each: torch's FSDP2 over NCCL, sharded checkpoints, and restarts.

    muster run --nproc-per-node auto --max-restarts 3 examples/python/gpus.py --checkpoint out/gpus

--fail-at makes the last rank die after that epoch, once. The launcher restarts all ranks, and they continue from the
last checkpoint. Other devices of torch (torch.accelerator) work in the same way.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DATA = Path(__file__).resolve().parent.parent / "data" / "digits.csv.gz"
EPOCHS = 4


def own_device() -> torch.device:
    """The GPU of this process, as its current one."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "torch has found no GPU"
    device = torch.device(kind.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)
    return device


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "epoch": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with FSDP2 on GPUs.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a directory that all nodes share")
    parser.add_argument("--fail-at", type=int, help="the epoch after which the last rank dies, once")
    arguments = parser.parse_args()

    device = own_device()
    backend = dist.get_default_backend_for_device(device)  # "nccl" for CUDA
    dist.init_process_group(f"cpu:muster,{device.type}:{backend}")
    rank, size = dist.get_rank(), dist.get_world_size()

    table = torch.from_numpy(np.loadtxt(DATA, delimiter=",", dtype=np.float32))
    images = TensorDataset(table[:, :64] / 16, table[:, 64].long())
    sampler: DistributedSampler[Any] = DistributedSampler(images, seed=0)
    batches = DataLoader(images, batch_size=max(1, 64 // size), sampler=sampler)

    torch.manual_seed(0)  # the same model at all ranks
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
    mesh = init_device_mesh(device.type, (size,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    done = 0
    newest = arguments.checkpoint / "newest"
    if newest.exists():
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=arguments.checkpoint / newest.read_text())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        done = state["epoch"]
    if rank == 0:
        print(f"begins after epoch {done}", flush=True)
    for epoch in range(done + 1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        right = torch.zeros((), dtype=torch.int64, device=device)
        for pixels, digits in batches:
            optimizer.zero_grad()
            scores, expected = model(pixels.to(device)), digits.to(device)
            F.cross_entropy(scores, expected).backward()
            optimizer.step()
            right += (scores.argmax(dim=1) == expected).sum()
        dist.all_reduce(right)  # over NCCL
        dcp.save({**state_of(model, optimizer), "epoch": epoch}, checkpoint_id=arguments.checkpoint / f"epoch{epoch}")
        if rank == 0:
            newest.with_suffix(".new").write_text(f"epoch{epoch}")
            newest.with_suffix(".new").replace(newest)
            print(f"epoch {epoch}: accuracy {right.item() / (size * len(sampler)):.2%}", flush=True)
        dist.barrier()  # no rank is an epoch ahead of the checkpoint
        if epoch == arguments.fail_at and rank == size - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
