"""Memory for measurements: the same tensor each time (warm), or tensors of a pool larger than the caches (cold)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from muster.bench.operations import Operation, Tensors

# Smaller tensors touch so few cache lines that a pool of them stays in the caches.
COLD_FROM = 4096
# The size of the last-level caches of today's servers, for a machine that does not report it.
_USUAL_CACHE = 64 << 20
_LARGEST_POOL = 1 << 30
_ALIGNED = 64


def _cold_pool_bytes() -> int:
    """Returns twice the size of the last-level cache."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        cache = int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        cache = _USUAL_CACHE
    return min(2 * cache, _LARGEST_POOL)


def pool_size(size: int, buffers: str) -> int:
    """Returns the number of tensors of `size` bytes in the pool of cold buffers. A single tensor is warm memory."""
    return -(-_cold_pool_bytes() // size) if buffers == "cold" and size else 1


def _allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def make_tensors(
    operation: Operation, like: Tensors, count: int, allocate: Callable[[int], torch.Tensor] = _allocate
) -> list[Tensors]:
    """Returns `count` pairs of input and output with the shapes of `like`, written once.

    allocate: makes a flat uint8 tensor of a number of bytes.
    """
    inputs = _slots(like.input, count, allocate)
    outputs = inputs if operation.in_place else _slots(like.output, count, allocate)
    return [Tensors(like.rank, like.ranks, *pair) for pair in zip(inputs, outputs, strict=True)]


def _slots(like: torch.Tensor, count: int, allocate: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    stride = -(-like.nbytes // _ALIGNED) * _ALIGNED
    arena = allocate(max(stride * count, _ALIGNED)).zero_()
    return [arena[i * stride :][: like.nbytes].view(like.dtype) for i in range(count)]


def in_turn(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Returns a function whose calls go to `calls` in turn."""
    if len(calls) == 1:
        return calls[0]
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def copying(tensors: Tensors) -> Callable[[], Any]:
    """Returns the floor: a copy of the message's bytes, if possible between this rank's own tensors."""
    longer = max(tensors.input, tensors.output, key=torch.numel)
    other = tensors.input if longer is tensors.output else tensors.output
    if other.data_ptr() == longer.data_ptr() or other.numel() < longer.numel():
        other = torch.zeros_like(longer)
    target, source, size = longer.data_ptr(), other.data_ptr(), longer.nbytes
    keep = (longer, other)

    def copy() -> None:
        ctypes.memmove(target, source, size)
        assert keep

    return copy
