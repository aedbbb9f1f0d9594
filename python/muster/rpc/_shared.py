"""Tensors in shared memory, which travel by reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from muster import _C
from muster.rpc import _agent

if TYPE_CHECKING:
    from collections.abc import Sequence

Alias = _C.RpcAlias


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialized tensor in memory that the workers of this host can share (alias()).

    size: as for torch.empty(). The memory is freed with the last tensor that uses it, at any worker. All tensors of a
        process together may have half of the machine's memory.

    Raises torch.OutOfMemoryError.
    """
    sizes = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return _C.rpc_empty_shared(list(sizes), dtype or torch.get_default_dtype())  # type: ignore[arg-type]


def alias(tensor: torch.Tensor) -> Alias:
    """Makes an argument or a result that travels by reference: the other worker gets a tensor in the same memory.

    tensor: one of empty_shared(), or a contiguous part of one.

    Nothing is copied, so each worker sees what the others write; the program must see to it that they do not write at
    the same time. The other worker must be on the same host, else its call raises muster.Error. Its tensor does not
    require gradients, and may be kept: it keeps the memory. One alias may be passed any number of times.

    Raises muster.ArgumentError for a tensor that does not lie in such memory.
    """
    return _agent.current().agent.alias(tensor)
