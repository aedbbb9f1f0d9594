"""A process group's collectives without torch's dispatcher: what a few bytes cost most."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from muster import _C

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend


class Group(_C.Group):
    """The ranks of one process group, for calls that go straight to muster: no dispatcher, no autograd, no profiler of
    operators. `muster.group()` makes one; it may be used beside the process group, in the same order at all ranks.

    Ranks are those of the group, tensors are on the CPU, of any dtype and strides, and equal in shape at all ranks
    unless said otherwise. A call blocks and returns None, or with async_op=True returns a torch.distributed.Work.
    `timeout` is in seconds, the group's by default. Thread-safe. Errors are those of torch.distributed over muster
    (muster.errors).

    op: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or what torch.distributed takes.
    """

    def __repr__(self) -> str:
        return f"<muster.Group {self.name!r}: rank {self.rank} of {self.size}, over {self.transport}>"

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor whose memory the ranks of this host share, so that collectives move its bytes once. Not cleared.
        It may outlive the group.
        """
        return self._empty(math.prod(shape), dtype or torch.get_default_dtype()).view(shape)

    @staticmethod
    def from_process_group(group: dist.ProcessGroup | None = None) -> Group:
        """The direct form of `group` (default: all ranks), which must use the muster backend."""
        return Group(backend_of(group))


def group(group: dist.ProcessGroup | None = None) -> Group:
    """The direct form of `group` (default: all ranks), which must use the muster backend."""
    return Group.from_process_group(group)


def backend_of(group: dist.ProcessGroup | None) -> Backend:
    group = group or dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL puts checks around it
        backend = backend.wrapped_pg
    return backend


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """torch.distributed.monitored_barrier() for groups of the muster backend: rank 0 raises an error that names the
    first rank that did not come in time, or with `wait_all_ranks` every one of them. The group lives on.
    """
    group = group or dist.distributed_c10d._get_default_group()
    given = timedelta(milliseconds=-1) if timeout is None else timeout  # as c10d says: the group's
    group.monitored_barrier(given, wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]
