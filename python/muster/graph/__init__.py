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
    all_gather_into_tensor_uneven(), reduce_scatter_tensor_uneven()   a part of another size for each rank
"""

from __future__ import annotations

from muster import _C  # noqa: F401  has the operators
from muster.graph._backend import Config, backend, compile_graph
from muster.graph._install import install
from muster.graph._patch import patch
from muster.graph._uneven import all_gather_into_tensor_uneven, reduce_scatter_tensor_uneven

__all__ = [
    "Config",
    "all_gather_into_tensor_uneven",
    "backend",
    "compile_graph",
    "patch",
    "reduce_scatter_tensor_uneven",
]

install()
