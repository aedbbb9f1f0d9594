"""Sizes and dtypes of a call. Without a graph the backend checks them; in a graph, wrong ones would give wrong data."""

from __future__ import annotations

from typing import Any

import torch


def check_size(call: str, what: str, given: int, needed: int) -> None:
    if given != needed:
        raise ValueError(f"{call}: {what} has {given} elements, but needs {needed}")


def check_count(call: str, what: str, given: Any, group: Any) -> None:
    if len(given) != group.size():
        raise ValueError(f"{call}: {what} has length {len(given)}, but the group has {group.size()} ranks")


def check_dtypes(call: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{call}: the tensors differ in dtype: {tensors[0].dtype} and {tensor.dtype}")


def check_parts(call: str, what: str, parts: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
    """Each rank has a part of the same size as `tensor`."""
    check_count(call, what, parts, group)
    check_dtypes(call, tensor, *parts)
    for i, part in enumerate(parts):
        check_size(call, f"{what}[{i}]", part.numel(), tensor.numel())


def check_whole(call: str, what: str, whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    check_dtypes(call, part, whole)
    check_size(call, what, whole.numel(), part.numel() * group.size())
