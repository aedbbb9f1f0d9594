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


def dumps(value: object, tensors: list[torch.Tensor]) -> bytes:
    """Pickles `value`, and appends its tensors to the list."""
    output = io.BytesIO()
    pickler = pickle.Pickler(output, 5)
    pickler.dispatch_table = copyreg.dispatch_table | {  # type: ignore[assignment]
        torch.Tensor: lambda tensor: _reduce(tensor, tensors),
        torch.nn.Parameter: lambda tensor: (parameter, (*_reduce(tensor.data, tensors), tensor.requires_grad)),
    }
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(f"{type(value).__qualname__} cannot be sent to another worker: {error}") from error
    return output.getvalue()


def loads(pickled: bytes, tensors: list[torch.Tensor]) -> Any:
    return _Unpickler(pickled, tensors).load()


def _reduce(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[Any, tuple[Any, ...]]:
    if tensor.layout == torch.sparse_coo:
        indices, values = tensor._indices().clone(), tensor._values()
        return sparse, (indices, values, tensor.shape, tensor.is_coalesced())
    tensors.append(tensor)
    return tensor_at, (len(tensors) - 1,)


def tensor_at(index: int) -> torch.Tensor:
    """Stands for a tensor in a pickle. _Unpickler replaces it."""
    raise RuntimeError("a pickle of muster.rpc can only be read by muster.rpc")


def parameter(function: Callable[..., torch.Tensor], arguments: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    return torch.nn.Parameter(function(*arguments), requires_grad)


def sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=True)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module == _OURS:
            return {"tensor_at": self._tensors.__getitem__, "parameter": parameter, "sparse": sparse}[name]
        if _functions.allows_all():
            return super().find_class(module, name)
        return _functions.find(f"{module}:{name}")
