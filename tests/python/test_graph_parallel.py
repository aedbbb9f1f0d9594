"""Models that are split among ranks, in one graph: muster.nn.fully_shard, and tensor parallelism with DTensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import muster.nn
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
SIDE = 64


class Model(nn.Module):
    """Layers with one weight, a number of rows that is no multiple of the ranks, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIDE, SIDE), nn.LayerNorm(SIDE), nn.Linear(SIDE, SIDE))
        self.layers[2].weight = self.layers[0].weight  # type: ignore[assignment]
        self.last = nn.Linear(SIDE, 7)
        self.scale = nn.Parameter(torch.full((7,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.layers(x))) * self.scale


def model() -> Model:
    torch.manual_seed(dist.get_rank())  # rank 0's values go to all
    return Model()


def whole(gradient: Any) -> Tensor | None:
    return None if gradient is None else gradient.full_tensor()


def compare_sharded(backend: str | None, mesh: Any, **options: Any) -> None:
    """Trains a sharded model beside a replicated one."""
    torch._dynamo.reset()
    replicated, sharded = muster.nn.DistributedDataParallel(model()), muster.nn.fully_shard(model(), mesh, **options)
    run: Any = torch.compile(sharded, backend=backend, fullgraph=True) if backend else sharded
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (replicated, sharded)]
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(6, SIDE)
        for each, optimizer in zip((replicated, run), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
        assert all(isinstance(each, DTensor) for each in sharded.parameters())
        expected = {name: each.grad for name, each in replicated.module.named_parameters()}
        found = {name: whole(each.grad) for name, each in sharded.named_parameters()}
        torch.testing.assert_close(found, expected)
        for optimizer in optimizers:
            optimizer.step()


def shard(rank: int) -> None:
    torch.set_num_threads(1)
    for backend in (None, "aot_eager", "muster"):
        compare_sharded(backend, None)
    compare_sharded("aot_eager", None, reshard_after_forward=False)


def test_sharded_parameters_get_the_gradients_of_whole_ones() -> None:
    run_ranks(2, shard, timeout=TIMEOUT)


def shard_replicas(rank: int) -> None:
    torch.set_num_threads(1)
    compare_sharded("aot_eager", init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def test_replicas_may_be_sharded() -> None:
    run_ranks(4, shard_replicas, timeout=TIMEOUT)


def prefetch(rank: int) -> list[str]:
    torch.set_num_threads(1)
    layers = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(3)])
    config = muster.graph.Config(buckets=False)
    run: Any = torch.compile(muster.nn.fully_shard(layers), backend=muster.graph.backend(config), fullgraph=True)

    def step() -> None:
        run(torch.ones(6, SIDE, requires_grad=True)).sum().backward()

    _, codes = run_and_get_code(step)
    letters = {"all_gather_into_tensor": "g", "reduce_scatter_tensor": "r", "wait_tensor": "w", "mm": "m"}
    pattern = rf"\.({'|'.join(letters)})(?:\.default)?\("
    return ["".join(letters[each] for each in re.findall(pattern, code)) for code in codes]


def test_parameters_are_gathered_before_they_are_needed(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    for forward, backward in run_ranks(2, prefetch, env=env, timeout=TIMEOUT):
        assert forward == "gggwmwmwm"
        assert backward.startswith("ggg"), "they are gathered again in backward"
        assert backward.count("r") == 3
        assert backward[: backward.rindex("m")].count("w") == 3, "gradients are awaited when all are computed"
        assert backward.endswith("www")


def save_and_load(rank: int, folder: str) -> None:
    saved, loaded = muster.nn.fully_shard(model()), muster.nn.fully_shard(model())
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(1)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    x = torch.ones(2, SIDE)
    torch.testing.assert_close(loaded(x), saved(x))


def test_checkpoints_hold_the_parts(tmp_path: Path) -> None:
    run_ranks(2, save_and_load, str(tmp_path), timeout=TIMEOUT)


def refuse(rank: int) -> None:
    with pytest.raises(TypeError, match="the parameter scale is a DTensor already"):
        muster.nn.fully_shard(muster.nn.fully_shard(model()))
    with pytest.raises(ValueError, match="one or two dimensions, not of 3"):
        muster.nn.fully_shard(model(), init_device_mesh("cpu", (1, 1, 2)))


def test_what_cannot_be_sharded_is_refused() -> None:
    run_ranks(2, refuse, timeout=TIMEOUT)


def split_tensors(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel(), "5": RowwiseParallel()}

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(SIDE, 2 * SIDE), nn.GELU(), nn.Linear(2 * SIDE, SIDE)]
        return nn.Sequential(*layers, nn.Linear(SIDE, 2 * SIDE), nn.GELU(), nn.Linear(2 * SIDE, SIDE))

    torch.manual_seed(0)
    x = torch.randn(6, SIDE)
    unsplit = make()
    expected = unsplit(x)
    expected.square().mean().backward()
    for backend in ("aot_eager", "muster"):
        split = parallelize_module(make(), mesh, plan)
        result = torch.compile(split, backend=backend, fullgraph=True)(x)
        result.square().mean().backward()
        torch.testing.assert_close(result, expected)
        for parameter, reference in zip(split.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad)  # type: ignore[union-attr]


def test_tensor_parallel_plans_compile_whole() -> None:
    run_ranks(2, split_tensors, timeout=TIMEOUT)
