"""Tests torch's communication hooks, and optimizers within backward, with muster.nn.DistributedDataParallel."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from muster.nn import DistributedDataParallel
from ranks import RankPool
from test_nn_ddp import MODELS, PER_RANK, Case, Registration, batch, compare, digest, perceptron, train_twice
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store


def power_sgd(name: str, wrap: bool = False) -> Registration:
    def register(model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        state = power.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.1)
        hook = getattr(power, name)
        model.register_comm_hook(state, default_hooks.bf16_compress_wrapper(hook) if wrap else hook)

    return register


def quantization(name: str, own_group: bool = False) -> Registration:
    def register(model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

        group = torch.distributed.new_group() if own_group else None
        model.register_comm_hook(group, getattr(quantization_hooks, name))

    return register


def post_local_sgd(model: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local

    state = local.PostLocalSGDState(None, None, start_localSGD_iter=100)
    model.register_comm_hook(state, local.post_localSGD_hook)


def default(name: str, *wrapped: str) -> Registration:
    def register(model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, name)
        model.register_comm_hook(None, hook(*(getattr(default_hooks, each) for each in wrapped)) if wrapped else hook)

    return register


def built_in(name: str) -> Registration:
    return lambda model: model._register_builtin_comm_hook(getattr(torch.distributed.BuiltinCommHookType, name))


def custom_hook(model: DistributedDataParallel) -> None:
    """Completes its future when its operation has ended, with another tensor than the bucket's buffer."""

    def average(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
        state["buckets"].append(bucket.index())
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    model.register_comm_hook({"buckets": []}, average)


def concatenating_hook(model: DistributedDataParallel) -> None:
    """Returns a tensor made from the gradients, and so assumes that the bucket holds only these."""

    def average(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
        gradients = bucket.gradients()
        assert bucket.buffer().numel() == sum(each.numel() for each in gradients)
        dense = torch.cat([each.flatten() for each in gradients])
        work = torch.distributed.all_reduce(dense, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    model.register_comm_hook(None, average)


HOOKS: dict[str, Registration] = {
    "allreduce": default("allreduce_hook"),
    "fp16": default("fp16_compress_hook"),
    "bf16": default("bf16_compress_hook"),
    "bf16 around allreduce": default("bf16_compress_wrapper", "allreduce_hook"),
    "built-in allreduce": built_in("ALLREDUCE"),
    "built-in fp16": built_in("FP16_COMPRESS"),
    "PowerSGD": power_sgd("powerSGD_hook"),
    "bf16 around PowerSGD": power_sgd("powerSGD_hook", wrap=True),
    "batched PowerSGD": power_sgd("batched_powerSGD_hook"),
    "bf16 around batched PowerSGD": power_sgd("batched_powerSGD_hook", wrap=True),
    "quantized by tensor": quantization("quantization_pertensor_hook"),
    "quantized by channel": quantization("quantization_perchannel_hook"),
    "quantized over another group": quantization("quantization_pertensor_hook", own_group=True),
    "post-localSGD": post_local_sgd,
    "own": custom_hook,
    "concatenated": concatenating_hook,
}


def compare_with(rank: int, hook: str, case: Case) -> str:
    return compare(rank, case, HOOKS[hook])


@pytest.mark.parametrize("view", [True, False])
def test_torch_hooks_average_gradients(ranks: RankPool, view: bool) -> None:
    for hook in HOOKS:
        exact = hook in ("allreduce", "built-in allreduce", "post-localSGD", "own", "concatenated")
        options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.001}
        digests = ranks.run(compare_with, hook, Case(options=options, tolerance=1e-5 if exact else 0.03))
        assert len(set(digests)) == 1, hook


def train_twice_with_power_sgd(rank: int) -> None:
    train_twice(rank, "perceptron", HOOKS["PowerSGD"])


def test_two_runs_with_one_seed_compress_to_the_same_bits(ranks: RankPool) -> None:
    ranks.run(train_twice_with_power_sgd)


class CollectiveInBackward(torch.autograd.Function):
    """A collective that the model makes in backward, as SyncBatchNorm does. Rank 0 begins it after all operations of
    the preceding bucket, rank 1 before the second one of these operations.
    """

    step, reduced = 0, threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CollectiveInBackward.step += 1
        CollectiveInBackward.reduced.clear()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 0:
            assert CollectiveInBackward.reduced.wait(30)
        sum_of_ones = torch.ones(3)
        work = torch.distributed.all_reduce(sum_of_ones, async_op=True)
        if torch.distributed.get_rank() == 1:
            _get_default_store().set(f"meeting {CollectiveInBackward.step}", "begun")
        work.wait()
        assert sum_of_ones.tolist() == [2, 2, 2]
        return gradient


def with_collectives_in_backward(rank: int) -> str:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    class State(power.PowerSGDState):
        @property
        def process_group(self) -> None:  # read before a bucket's first operation
            if rank == 0:
                _get_default_store().wait([f"meeting {CollectiveInBackward.step}"])

        @process_group.setter
        def process_group(self, value: object) -> None:
            pass

        def maybe_increase_iter(self, bucket: Any) -> None:  # called after the last operation
            CollectiveInBackward.reduced.set()
            super().maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]

    torch.manual_seed(1)
    first, last = torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 32, bias=False)
    module = torch.nn.Sequential(first, last)
    module.forward = lambda x: last(CollectiveInBackward.apply(first(x)))  # type: ignore[method-assign,no-untyped-call]
    model = DistributedDataParallel(module, bucket_cap_mb=4096 / 2**20)
    model.register_comm_hook(State(None, start_powerSGD_iter=2), power.powerSGD_hook)
    for _ in range(4):
        model(torch.randn(4, 32)).square().sum().backward()
    assert len(model.reducer.bucket_bytes()) == 2
    return digest(model.module)


def test_two_phase_hooks_with_collectives_in_backward(ranks: RankPool) -> None:
    assert len(set(ranks.run(with_collectives_in_backward))) == 1


def average_periodically(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    torch.manual_seed(1)
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.001)
    alone, _ = torch.distributed.new_subgroups(1)
    model.register_comm_hook(local.PostLocalSGDState(None, alone, start_localSGD_iter=2), local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    replicas = [copy.deepcopy(model.module) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in [model, *replicas]]
    for step in range(6):
        x, y = batch(step, 2)
        for i, replica in enumerate([model, *replicas]):
            at = rank if i == 0 else i - 1
            optimizers[i].zero_grad()
            part = slice(at * PER_RANK, (at + 1) * PER_RANK)
            F.cross_entropy(replica(x[part]), y[part]).backward()
        pairs = list(zip(*(each.parameters() for each in replicas), strict=True))
        for one, other in pairs if step < 2 else []:
            one.grad = other.grad = (one.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
        averager.average_parameters(model.parameters())
        for one, other in pairs if step in (2, 4) else []:
            one.data.lerp_(other.data, 0.5)
            other.data.copy_(one.data)
        for ours, theirs in zip(model.parameters(), replicas[rank].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    torch.distributed.destroy_process_group(alone)


def test_post_local_sgd_averages_periodically(ranks: RankPool) -> None:
    ranks.run(average_periodically)


def optimize_in_backward(rank: int, model_name: str) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(1)
    reference, in_backward, fused = (copy.deepcopy(each) for each in [MODELS[model_name]()] * 3)
    _apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    models = [DistributedDataParallel(in_backward), DistributedDataParallel(fused)]
    models[1]._register_fused_optim(torch.optim.SGD, 0.1)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(step, 2)
        part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        for model in models:
            F.cross_entropy(model(x[part]), y[part]).backward()
        models[1].zero_grad()
    for model in models:
        for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("model_name", ["perceptron", "convolution"])
def test_optimizers_in_backward_match(ranks: RankPool, model_name: str) -> None:
    ranks.run(optimize_in_backward, model_name)
