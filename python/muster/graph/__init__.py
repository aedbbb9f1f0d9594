"""Collectives inside compiled graphs.

`torch.compile` holds every call of torch.distributed in its graph as soon as the process has a muster group, or has
imported this package:

    @torch.compile(fullgraph=True)
    def step(x):
        work = dist.all_reduce(x, async_op=True)
        ...
        work.wait()

    patch(function)   the same for a function of another package that wraps a call
    torch.compile(model, backend="muster")   Inductor, with collectives that begin early and are awaited late
    backend(Config(...))   the same with options
    package(model, inputs, path)   the same ahead of time, for C++ programs without Python
    all_gather_into_tensor_uneven(), reduce_scatter_tensor_uneven()   a part of another size for each rank
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from muster import _C  # noqa: F401  has the operators
from muster.graph._capture.install import install

if TYPE_CHECKING:
    from muster.graph._backend import Config, backend, compile_graph
    from muster.graph._capture.patch import patch
    from muster.graph._capture.uneven import all_gather_into_tensor_uneven, reduce_scatter_tensor_uneven
    from muster.graph._package import package

__all__ = [
    "Config",
    "all_gather_into_tensor_uneven",
    "backend",
    "compile_graph",
    "package",
    "patch",
    "reduce_scatter_tensor_uneven",
]

# Every process with a group imports this package, and few compile.
_MODULES = {
    **dict.fromkeys(("Config", "backend", "compile_graph"), "muster.graph._backend"),
    "package": "muster.graph._package",
    "patch": "muster.graph._capture.patch",
    **dict.fromkeys(("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven"), "muster.graph._capture.uneven"),
}

install()


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'muster.graph' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
