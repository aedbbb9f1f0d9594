"""DistributedDataParallel inside a compiled graph: the averages of gradients are operators of its backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from muster.graph._capture.install import after_import

if TYPE_CHECKING:
    from muster.nn._distributed import DistributedDataParallel


class _AverageGradient(torch.autograd.Function):
    """The tensor itself, and the average of its gradient over a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return functional.all_reduce(gradient, "avg", ctx.group_name), None


def can_trace(model: DistributedDataParallel) -> bool:
    """False for what only the reducer does. It then runs, outside the graph."""
    return not (
        model._use_python_reducer
        or model._delay_all_reduce_params
        or model._comm_hooks
        or model.mixed_precision is not None
        or model._join_config.enable
        or (model.find_unused_parameters and not model.static_graph)  # ranks may use other parameters
        or model._has_sparse_gradients
        or (model._has_local_gradients and model.require_backward_grad_sync)  # it averages them, too
        or model._has_graph_breaks
        or hasattr(model, "buffer_hook")
        or any(each.device.type != "cpu" for each in model._module_parameters)
        or _inductor_compiles()
    )


def _inductor_compiles() -> bool:
    """True for the default backend of torch.compile. It waits for each collective at once, and the reducer does not."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    return isinstance(inspect.unwrap(compiler), torch._TorchCompileInductorWrapper)


# torch.compiler.assume_constant_result() would import the compiler.
_inductor_compiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced_forward(
    model: DistributedDataParallel, forward: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The forward of `model` in a form that the compiler traces. `forward`: with the reducer."""
    if not torch.compiler.is_compiling():
        # The compiler has ended its graph at this call, because it cannot trace the whole module. Each part would
        # average its gradients when all of them are there, and the reducer does that earlier.
        model._has_graph_breaks = True
        return forward(*inputs, **kwargs)
    if model.will_sync_module_buffers():
        buffers = [each for name, each in model.module.named_buffers() if name not in model.parameters_to_ignore]
        _broadcast(buffers, model.process_group)
    averages = torch.is_grad_enabled() and model.require_backward_grad_sync
    model.require_forward_param_sync = averages  # as torch: only a step that trains changes buffers
    if not averages:
        return model.module(*inputs, **kwargs)
    name = model.process_group.group_name
    averaged = {
        key: _AverageGradient.apply(parameter, name)  # type: ignore[no-untyped-call]
        for key, parameter in model.module.named_parameters()
        if parameter.requires_grad and key not in model.parameters_to_ignore
    }
    return torch.func.functional_call(model.module, averaged, inputs, kwargs)


# The compiler traces it as a part of another function, but begins no graph with it.
after_import("torch._dynamo", lambda: torch._dynamo.eval_frame.skip_code(traced_forward.__code__))


def _broadcast(buffers: list[Tensor], group: dist.ProcessGroup) -> None:
    """Gives the buffers the values of rank 0, with one message for each dtype."""
    with torch.no_grad():
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            same = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            dist.broadcast(flat, group=group, group_src=0)
            for buffer, part in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
                buffer.copy_(part.view_as(buffer))
