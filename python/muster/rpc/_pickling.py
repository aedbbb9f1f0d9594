"""Objects that the native format does not cover, such as dataclasses: pickled, with their tensors beside the pickle.

A pickle may only name what other workers may call anyway (_functions.py), unless the program has allowed all pickles.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from muster.rpc import _functions

_OURS = __name__


def dumps(value: object, parts: list[Any]) -> bytes:
    """Pickles `value`, and appends its tensors and references to the list."""
    from muster.rpc._rref import RRef

    output = io.BytesIO()
    pickler = pickle.Pickler(output, 5)
    pickler.dispatch_table = copyreg.dispatch_table | {  # type: ignore[assignment]
        torch.Tensor: lambda tensor: _reduce(tensor, parts),
        torch.nn.Parameter: lambda tensor: (parameter, (*_reduce(tensor.data, parts), tensor.requires_grad)),
        RRef: lambda rref: _apart(rref, parts),
    }
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{type(value).__qualname__} cannot be sent to another worker: {error}") from error
    return output.getvalue()


def loads(pickled: bytes, parts: list[Any]) -> Any:
    return _Unpickler(pickled, parts).load()


def _reduce(tensor: torch.Tensor, parts: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    if tensor.layout == torch.sparse_coo:
        indices, values = tensor._indices().clone(), tensor._values()
        return sparse, (indices, values, tensor.shape, tensor.is_coalesced())
    return _apart(tensor, parts)


def _apart(part: Any, parts: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    parts.append(part)
    return part_at, (len(parts) - 1,)


def part_at(index: int) -> Any:
    """Stands for a part in a pickle. _Unpickler replaces it."""
    raise RuntimeError("a pickle of muster.rpc can only be read by muster.rpc")


def parameter(function: Callable[..., torch.Tensor], arguments: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    return torch.nn.Parameter(function(*arguments), requires_grad)


def sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=True)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, parts: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._parts = parts

    def find_class(self, module: str, name: str) -> Any:
        if module == _OURS:
            return {"part_at": self._parts.__getitem__, "parameter": parameter, "sparse": sparse}[name]
        if _functions.allows_all():
            return super().find_class(module, name)
        return _functions.find(f"{module}:{name}")
