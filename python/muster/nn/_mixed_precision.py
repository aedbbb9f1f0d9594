"""The argument mixed_precision of DistributedDataParallel, on the CPU.

torch swaps the parameters' data on a stream of an accelerator. Here forward gets a low-precision copy in place of each
parameter. autograd records the operation that makes the copy. So gradients reach the parameters in their own dtype,
and accumulation, unused parameters, retained graphs and hooks work as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class LowPrecision:
    """Gives `root` and its submodules their floating-point parameters in another dtype. Not thread-safe."""

    def __init__(self, root: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._active = False
        self._part: tuple[nn.Module, contextlib.ExitStack] | None = None  # the submodule that a checkpoint recomputes
        for parameter in self._parameters(root):
            marked: Any = parameter  # torch's attributes: the first is for forward, the second for the optimizer
            marked._mp_param = torch.empty(0, dtype=dtype)
            marked._fp_param = parameter.data
        for module in root.modules():
            module.register_forward_pre_hook(self._enter_part)
            module.register_forward_hook(self._leave_part, always_call=True)

    def _enter_part(self, part: nn.Module, _: object) -> None:
        """A submodule that runs during backward is being recomputed by a checkpoint."""
        if not self._active and torch._C._current_graph_task_id() != -1:
            self._part = part, contextlib.ExitStack()
            self._part[1].enter_context(self.active(part))

    def _leave_part(self, part: nn.Module, *_: object) -> None:
        if self._part is not None and self._part[0] is part:
            self._part[1].close()
            self._part = None

    @staticmethod
    def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
        for parameter in module.parameters():
            if parameter.is_floating_point() and not getattr(parameter, "_ddp_ignored", False):
                yield parameter

    @contextlib.contextmanager
    def active(self, module: nn.Module) -> Iterator[None]:
        """Replaces the parameters of the module by copies while the context is active."""
        copies = {id(each): each.to(self._dtype) for each in self._parameters(module)}
        slots: list[tuple[dict[str, Any], str, Any]] = [
            (part._parameters, name, parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if id(parameter) in copies
        ]
        self._active = True
        try:
            for parameters, name, parameter in slots:
                parameters[name] = copies[id(parameter)]
            yield
        finally:
            for parameters, name, parameter in slots:
                parameters[name] = parameter
            self._active = False
