"""Batch norm over the batches of all ranks, also on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from muster._group import all_gather

_TorchSyncBatchNorm: Any = nn.SyncBatchNorm  # Any: most of it is untyped


class SyncBatchNorm(_TorchSyncBatchNorm):  # type: ignore[misc]
    """torch.nn.SyncBatchNorm that also accepts CPU tensors. In training, mean and variance cover the batches of all
    ranks of `process_group`, which may have different sizes. All ranks must call it in the same order.
    """

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replaces each batch norm in the module, keeping its parameters and statistics. Returns the module, or its
        replacement.
        """
        if isinstance(module, _BatchNorm):
            converted = cls.__new__(cls)
            nn.Module.__init__(converted)
            converted.__dict__.update(module.__dict__)
            converted.process_group = process_group
            return converted
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        if input.device.type != "cpu":
            return super().forward(input)
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if not self.training or group is None or group.size() == 1:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        output, mean, variance, count = _normalize(input, self.weight, self.bias, self.eps, group)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked += 1
            weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


class _Normalize(torch.autograd.Function):
    """(input[N, C, ...], weight[C], bias[C]) -> output, and mean[C], variance[C], count[] of all ranks' elements."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, channels = [0, *range(2, x.dim())], x.size(1)
        wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
        count = wide.numel() // channels
        variance, mean = torch.var_mean(wide, dims, correction=0) if count > 0 else wide.new_zeros(2, channels)
        ours = torch.cat([mean, variance * count, mean.new_full((1,), count)])
        means, squares, counts = all_gather(ours, group).tensor_split([channels, 2 * channels], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (squares + counts * (means - mean) ** 2).sum(0) / total
        ctx.save_for_backward(x, weight, mean, variance, total)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean, variance, total)
        scale, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
        output = F.batch_norm(wide, mean, variance, scale, shift, eps=eps)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, total = ctx.saved_tensors
        dims, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
        gradient = gradient.to(mean.dtype)
        scale = (variance + ctx.eps).rsqrt()
        normal = (x - mean.view(shape)) * scale.view(shape)
        ours = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        both = ours.clone()
        dist.all_reduce(both, group=ctx.group)
        along, across = (both / total).unbind()
        if weight is not None:
            scale = scale * weight
        input_gradient = scale.view(shape) * (gradient - along.view(shape) - normal * across.view(shape))
        others = (None, None) if weight is None else (ours[1].to(weight.dtype), ours[0].to(weight.dtype))
        return input_gradient.to(x.dtype), *others, None, None


_normalize: Any = _Normalize.apply
