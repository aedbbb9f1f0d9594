"""Tests users of c10d over muster: functional collectives, DTensor, FSDP2, tensor parallelism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZE = 4
functional: Any = _functional_collectives  # untyped, and accepts group.WORLD only at run time
wait = functional.wait_tensor


def tensor_of(rank: int, *shape: int) -> torch.Tensor:
    """A tensor that differs by rank. Every rank can compute those of all ranks."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape) + 100 * rank


def functional_collectives(rank: int) -> None:
    world = dist.group.WORLD
    mine = tensor_of(rank, 8, 3)
    all_ranks = [tensor_of(r, 8, 3) for r in range(SIZE)]
    total = torch.stack(all_ranks).sum(0)
    torch.testing.assert_close(wait(functional.all_reduce(mine, "sum", world)), total)
    torch.testing.assert_close(wait(functional.all_reduce(mine, "avg", world)), total / SIZE)
    torch.testing.assert_close(wait(functional.broadcast(mine, 2, world)), all_ranks[2])
    torch.testing.assert_close(wait(functional.all_gather_tensor(mine, 0, world)), torch.cat(all_ranks))
    torch.testing.assert_close(wait(functional.all_gather_tensor(mine, 1, world)), torch.cat(all_ranks, 1))
    part = total[2 * rank : 2 * rank + 2]
    torch.testing.assert_close(wait(functional.reduce_scatter_tensor(mine, "sum", 0, world)), part)
    swapped = wait(functional.all_to_all_single(mine, None, None, world))
    torch.testing.assert_close(swapped, torch.cat([t[2 * rank : 2 * rank + 2] for t in all_ranks]))
    for got, want in zip(
        functional.all_reduce_coalesced([mine, mine + 1], "sum", world), (total, total + SIZE), strict=True
    ):
        torch.testing.assert_close(wait(got), want)
    gathered = functional.all_gather_into_tensor_coalesced([mine, mine[:1].clone()], world)
    torch.testing.assert_close(wait(gathered[0]), torch.cat(all_ranks))
    torch.testing.assert_close(wait(gathered[1]), torch.cat([t[:1] for t in all_ranks]))
    scattered = functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], world)
    torch.testing.assert_close(wait(scattered[1]), part)


def uneven_all_to_all(rank: int) -> None:
    counts = [[(sender + receiver) % 3 for receiver in range(SIZE)] for sender in range(SIZE)]
    mine = torch.cat([torch.full((counts[rank][r],), float(10 * rank + r)) for r in range(SIZE)])
    got = functional.all_to_all_single(mine, [counts[s][rank] for s in range(SIZE)], counts[rank], dist.group.WORLD)
    want = torch.cat([torch.full((counts[s][rank],), float(10 * s + rank)) for s in range(SIZE)])
    torch.testing.assert_close(wait(got), want)


def compile_collectives(rank: int) -> None:
    """Dynamo captures these collectives by itself. The graph calls their functional forms."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    torch.testing.assert_close(step(tensor_of(rank, 5)), sum(tensor_of(r, 5) for r in range(SIZE)) * 2 + 1)


def redistribute_placements(rank: int) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)  # 7 rows on 4 ranks: the last rank has one row
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert rows.to_local().shape[0] == (2, 2, 2, 1)[rank]
    columns = rows.redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(columns.full_tensor(), whole)
    torch.testing.assert_close(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    partial = DTensor.from_local(tensor_of(rank, 8, 2), mesh, [Partial()], run_check=False)
    total = torch.stack([tensor_of(r, 8, 2) for r in range(SIZE)]).sum(0)
    torch.testing.assert_close(partial.redistribute(mesh, [Shard(0)]).to_local(), total[2 * rank : 2 * rank + 2])
    torch.testing.assert_close(partial.full_tensor(), total)
    product: Any = rows @ distribute_tensor(torch.ones(6, 3), mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), whole @ torch.ones(6, 3))


def two_dimensional_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert tensor.to_local().shape == (4, 4)
    torch.testing.assert_close(tensor.full_tensor(), whole)
    # The groups of a mesh dimension: "tp" has the groups of ranks 0, 1 and of ranks 2, 3.
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=mesh["tp"].get_group())
    assert value.item() == (1.0 if rank < 2 else 5.0)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 4))


def train(net: nn.Module, rank: int | None) -> list[float]:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(4):
        x, y = torch.randn(2 * SIZE, 10, generator=generator), torch.randn(2 * SIZE, 4, generator=generator)
        part = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[part]), y[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_sharded(rank: int, mesh_shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Trains with FSDP2, or its hybrid form on a mesh of two dimensions. Each rank uses its part of the batch."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, rank)
    return {name: value.full_tensor().numpy() for name, value in net.state_dict().items()}


def two_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))


def tensor_parallel(rank: int) -> list[float]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (SIZE,))
    return train(parallelize_module(two_layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), None)


@pytest.mark.parametrize(
    "body",
    [functional_collectives, uneven_all_to_all, compile_collectives, redistribute_placements, two_dimensional_mesh],
    ids=lambda f: f.__name__,
)
def test_parallel_apis_match_their_definitions(body: Any) -> None:
    run_ranks(SIZE, body)


@pytest.mark.parametrize("mesh_shape", [(SIZE,), (2, 2)], ids=["fsdp", "hybrid"])
def test_sharded_training_equals_training_on_the_whole_batch(mesh_shape: tuple[int, ...]) -> None:
    states = run_ranks(SIZE, train_sharded, mesh_shape)
    whole = model()
    train(whole, None)
    for name, value in whole.state_dict().items():
        for state in states:
            np.testing.assert_array_equal(state[name], states[0][name])
        np.testing.assert_allclose(states[0][name], value.numpy(), rtol=1e-4, atol=1e-5)


def test_tensor_parallel_training_matches_one_process() -> None:
    expected = train(two_layers(), None)
    for losses in run_ranks(SIZE, tensor_parallel):
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
