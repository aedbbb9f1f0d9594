"""muster.nn.DistributedDataParallel under torch.compile: one graph, and the gradients that it has without a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import muster.nn
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
STEPS = 3


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


class Tied(nn.Module):
    """Two layers with one weight, a frozen parameter, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


class Broken(nn.Module):
    """The compiler ends its graph in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def pair(make: Callable[[], nn.Module], **options: Any) -> list[Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())  # rank 0's values go to all
        models.append(muster.nn.DistributedDataParallel(make(), **options))
    return models


def compare(eager: nn.Module, compiled: nn.Module) -> None:
    gradients = [{name: each.grad for name, each in model.named_parameters()} for model in (eager, compiled)]
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(dict(compiled.named_buffers()), dict(eager.named_buffers()))


def train(make: Callable[[], nn.Module], backend: Any, local_steps: int = 0, **options: Any) -> Any:
    """Trains a model with a graph and one without. Both must have the same gradients after each step. Returns the
    compiled one.
    """
    torch._dynamo.reset()
    eager, model = pair(make, **options)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=local_steps == 0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, model)]
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        xs = [torch.randn(6, 8) for _ in range(local_steps + 1)]
        for run, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            for index, x in enumerate(xs):
                owner = eager if run is eager else model
                with owner.no_sync() if index < local_steps else contextlib.nullcontext():
                    run(x).square().mean().backward()
        compare(eager, model)
        for optimizer in optimizers:
            optimizer.step()
    return model


def train_forms(rank: int) -> None:
    torch.set_num_threads(1)
    for make in (perceptron, normalized):
        train(make, "aot_eager")
    train(Tied, "aot_eager", find_unused_parameters=True, static_graph=True)
    train(perceptron, "aot_eager", local_steps=2)
    group = dist.new_group([0, 1])
    train(perceptron, "aot_eager", process_group=group)


def test_gradients_and_buffers_are_those_without_a_graph() -> None:
    run_ranks(2, train_forms, timeout=TIMEOUT)


def count_graphs(rank: int) -> None:
    backend = AotEagerAndRecordGraphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(perceptron, backend)
    (forward,), (backward,) = backend.fw_graphs, backend.bw_graphs
    assert "all_reduce" not in forward.code
    assert backward.code.count("_c10d_functional.all_reduce.default") == 6


def test_forward_and_backward_are_one_graph_each() -> None:
    run_ranks(2, count_graphs, timeout=TIMEOUT)


def break_graphs(rank: int) -> None:
    eager, model = pair(Broken)
    compiled: Any = torch.compile(model, backend="aot_eager")
    torch.manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(6, 8)
        for run in (eager, compiled):
            run.zero_grad()
            run(x).square().mean().backward()
        compare(eager, model)
    assert model._has_graph_breaks
    assert muster.step_report(model).step >= STEPS, "the reducer has averaged"


def test_a_module_with_graph_breaks_keeps_the_reducer() -> None:
    run_ranks(2, break_graphs, timeout=TIMEOUT)


def keep_hooks(rank: int) -> None:
    eager, model = pair(perceptron)
    for each in (eager, model):
        each.register_comm_hook(None, muster.hooks.bf16())
    compiled: Any = torch.compile(model, backend="aot_eager")
    torch.manual_seed(rank)
    x = torch.randn(6, 8)
    for run in (eager, compiled):
        run(x).square().mean().backward()
    compare(eager, model)
    assert muster.step_report(model).step == 1


def test_a_model_with_a_hook_keeps_the_reducer() -> None:
    run_ranks(2, keep_hooks, timeout=TIMEOUT)


def train_with_plan(rank: int) -> None:
    torch.set_num_threads(1)
    train(perceptron, "muster")


def test_gradients_are_right_in_the_planned_order() -> None:
    run_ranks(2, train_with_plan, timeout=TIMEOUT)


def evaluate(rank: int) -> None:
    eager, model = pair(normalized)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for each in (eager, model):
        each.eval()
    with torch.no_grad():
        x = torch.randn(6, 8)
        torch.testing.assert_close(compiled(x), eager(x))


def test_evaluation_is_one_graph() -> None:
    run_ranks(2, evaluate, timeout=TIMEOUT)
