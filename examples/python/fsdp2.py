"""FSDP2 over muster: each rank keeps a shard of every parameter, gradient and optimizer state.

    muster run --nproc-per-node 2 examples/python/fsdp2.py

The script itself is plain PyTorch: only the name of the backend is muster's.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS = 30

dist.init_process_group("muster")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same model at all ranks
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
mesh = init_device_mesh("cpu", (size,))
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(1 + rank)  # other data at each rank
inputs = torch.randn(64, 32)
targets = inputs.sum(dim=1, keepdim=True)
for step in range(STEPS):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if rank == 0 and step in (0, STEPS - 1):
        print(f"step {step + 1}/{STEPS}: loss {loss.item():.3f}")
shard = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
print(f"rank {rank} keeps {shard} of {sum(parameter.numel() for parameter in model.parameters())} elements")
dist.destroy_process_group()
