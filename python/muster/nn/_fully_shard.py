"""fully_shard: a module of which each rank keeps a part, in a form that torch.compile holds in one graph."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Module = TypeVar("Module", bound=nn.Module)


def fully_shard(module: Module, mesh: DeviceMesh | None = None, *, reshard_after_forward: bool = True) -> Module:
    """Splits each parameter of the module by rows among the ranks, as torch.distributed.fsdp.fully_shard does. Changes
    the module, and returns it. All ranks must call it; rank 0's values are used.

    A layer's parameters are gathered when its forward needs them, and their gradients are averaged and scattered in
    backward. Compiled with the backend "muster", gathers begin before they are needed, and the smaller ones are merged.
    Without torch.compile each layer waits for its gather, and whole parameters stay until backward.

    module.parameters() and the state dict have DTensors, so optimizers and torch.distributed.checkpoint work on parts.
    An attribute such as `layer.weight` is the whole tensor: reading it is a collective call, and writing to it has no
    effect. Initialize the module before.

    Args:
        mesh: of one dimension (default: all ranks), or of two: replicas, and the ranks that share a replica.
        reshard_after_forward: in a compiled graph, gather again in backward.
    """
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    if mesh.ndim > 2:
        raise ValueError(f"fully_shard takes a mesh of one or two dimensions, not of {mesh.ndim}")
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    whole = functools.partial(_whole, mesh.ndim, reshard_after_forward)
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # a parameter may occur several times
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise TypeError(f"the parameter {name} is a DTensor already: fully_shard takes a module once")
        parts = distribute_tensor(parameter.detach(), mesh, placements)
        sharded[parameter] = nn.Parameter(parts, requires_grad=parameter.requires_grad)
    for layer in list(module.modules()):
        names = [name for name, parameter in layer._parameters.items() if parameter is not None]
        if names:
            layer._parameters.update({name: sharded[layer._parameters[name]] for name in names})  # type: ignore[index]
            getters = {name: property(functools.partial(_get, whole, name)) for name in names}
            layer.__class__ = type(type(layer).__name__, (type(layer),), {**getters, "extra_repr": _no_parameters})
    return module


def _no_parameters(layer: nn.Module) -> str:
    """For print(): the layer's own text may read a parameter, and that is a collective call."""
    return "sharded"


def _get(whole: Any, name: str, layer: nn.Module) -> Tensor:
    return whole(layer._parameters[name])


def _whole(dimensions: int, reshard: bool, parameter: DTensor) -> Tensor:
    gather = functools.partial(_gather, dimensions)
    if not reshard or not torch.is_grad_enabled() or not torch.compiler.is_compiling():
        return gather(parameter)
    contexts = functools.partial(create_selective_checkpoint_contexts, _recompute)
    return checkpoint(gather, parameter, use_reentrant=False, context_fn=contexts)


def _gather(dimensions: int, parameter: DTensor) -> Tensor:
    whole = parameter.redistribute(placements=[Replicate()] * dimensions)
    return whole.to_local(grad_placements=[Partial("avg")] * dimensions)


def _recompute(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE
