"""What ranks of device_program.py train: DistributedDataParallel, FSDP and sharded checkpoints."""

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import device_double
import muster.hooks
import muster.nn
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import _MixedPrecision

import muster

DELAY = 20  # milliseconds


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def check_training(wrap: Callable[..., torch.nn.Module], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Three steps of a model on the device, and of a model on the CPU that has the batches of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    wrapped = wrap(two_layers().to(device_double.DEVICE), **options)
    model: torch.nn.Module = wrapped.module  # type: ignore[assignment]
    local = two_layers()
    local.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    tolerance: Any = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for step in range(3):
        inputs = [torch.arange(32.0).view(4, 8).sin() + 0.1 * each + step for each in range(size)]
        wrapped(inputs[rank].to(device_double.DEVICE)).sum().backward()
        (sum(local(each).sum() for each in inputs) / size).backward()
        for ours, expected in zip(model.parameters(), local.parameters(), strict=True):
            assert ours.grad is not None
            assert expected.grad is not None
            torch.testing.assert_close(ours.grad.cpu(), expected.grad, **tolerance)
            with torch.no_grad():
                ours.sub_(0.01 * ours.grad)
                expected.sub_(0.01 * expected.grad)
            ours.grad = expected.grad = None


def ddp(rank: int) -> None:
    """Models on the device, wrapped by torch's class and by muster's."""
    check_training(torch.nn.parallel.DistributedDataParallel)
    check_training(muster.nn.DistributedDataParallel)
    for options in (
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": 0.0001},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ):
        check_training(muster.nn.DistributedDataParallel, **options)
    low = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    check_training(muster.nn.DistributedDataParallel, torch.float16, mixed_precision=low)
    reductions_begin_during_backward()
    device_double.set_kernel_delay(DELAY)
    check_training(muster.nn.DistributedDataParallel)
    device_double.set_kernel_delay(0)

    def with_hook(hook: Any, **options: Any) -> Callable[[torch.nn.Module], torch.nn.Module]:
        def wrap(model: torch.nn.Module) -> torch.nn.Module:
            wrapped = muster.nn.DistributedDataParallel(model, **options)
            wrapped.register_comm_hook(None, hook)
            return wrapped

        return wrap

    check_training(with_hook(default_hooks.fp16_compress_hook), torch.float16)
    for hook in (
        muster.hooks.all_reduce(),
        muster.hooks.bf16(),
        muster.hooks.int8(),
        muster.hooks.top_k(1.0),
        muster.hooks.power_sgd(rank=4, start_powerSGD_iter=1, min_compression_rate=1),
    ):
        exact = hook.name in ("all_reduce()", "top_k(ratio=1)")
        device_double.set_kernel_delay(DELAY if exact else 0)
        check_training(with_hook(hook), torch.float32 if exact else torch.float16)
        check_training(with_hook(hook, bucket_cap_mb=0.0001), torch.float32 if exact else torch.float16)
    device_double.set_kernel_delay(0)


def reductions_begin_during_backward() -> None:
    model = two_layers().to(device_double.DEVICE)
    wrapped = muster.nn.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    inputs = torch.ones(4, 8, device=device_double.DEVICE)

    def reductions() -> int:
        return sum(
            operation["operation"] == "all_reduce" for group in muster.dump() for operation in group["operations"]
        )

    begun = []
    for _ in range(2):  # the first backward finds the order of the gradients
        loss = wrapped(inputs).sum()
        before = reductions()
        hook = next(model.parameters()).register_hook(lambda _: begun.append(reductions() - before))  # noqa: B023
        loss.backward()
        hook.remove()
    assert begun[1] > 0, "the last layer's bucket waits for the gradients of the first layer"


def sharded(rank: int) -> None:
    """torch's DDP, FSDP and sharded checkpoints."""
    check_training(torch.nn.parallel.DistributedDataParallel)
    size = dist.get_world_size()
    mesh = init_device_mesh(device_double.DEVICE, (size,))

    def shard(seed: int) -> torch.nn.Sequential:
        torch.manual_seed(seed)
        model = two_layers().to(device_double.DEVICE)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model

    def values(model: torch.nn.Module) -> list[torch.Tensor]:
        return [each.full_tensor().cpu() for each in model.parameters() if isinstance(each, DTensor)]

    model = shard(seed=1)
    torch.manual_seed(1)
    local = two_layers()
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (model, local)]
    for step in range(3):
        inputs = [torch.arange(32.0).view(4, 8).sin() + 0.1 * each + step for each in range(size)]
        model(inputs[rank].to(device_double.DEVICE)).sum().backward()
        (sum(local(each).sum() for each in inputs) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(values(model), [each.detach() for each in local.parameters()])

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    other = shard(seed=2)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    torch.testing.assert_close(values(other), values(model))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 2, "the CPU's tensors go over muster"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def large_bucket(rank: int) -> None:
    """Through the host, backward goes on while pieces of the bucket are copied and reduced."""
    size = dist.get_world_size()
    model = torch.nn.Linear(2048, 2100, bias=False).to(device_double.DEVICE)  # 16.4 MiB
    wrapped = muster.nn.DistributedDataParallel(model)
    for step in range(3):
        device_double.set_kernel_delay(DELAY)
        wrapped(torch.full((1, 2048), rank + step + 1.0, device=device_double.DEVICE)).sum().backward()
        device_double.set_kernel_delay(0)
        assert model.weight.grad is not None
        assert model.weight.grad.cpu().unique().tolist() == [step + (size + 1) / 2]
        model.weight.grad = None


def no_sync_and_join(rank: int) -> None:
    """Of muster's class: gradients that accumulate, and ranks with different numbers of batches."""
    size = dist.get_world_size()
    model = torch.nn.Linear(1, 1, bias=False).to(device_double.DEVICE)
    wrapped = muster.nn.DistributedDataParallel(model)
    one = torch.ones(1, 1, device=device_double.DEVICE)
    with wrapped.no_sync():
        wrapped(one * rank).sum().backward()
    wrapped(one * 3).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(sum(range(size)) / size + 3)
    model.weight.grad = None
    with wrapped.join():
        for _ in range(rank + 1):
            wrapped(one).sum().backward()
