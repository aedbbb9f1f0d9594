"""The collectives of a process group without torch's dispatcher, which takes most of the time of small calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import deprecated

from muster import _C
from muster.errors import ArgumentError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Work


class Group(_C.Group):
    """The ranks of one process group, for calls that go directly to muster: without dispatcher, autograd and operator
    profiler. `muster.group()` creates one. A program may use it and the process group, in the same order at all ranks.

    Ranks are numbered within the group. Tensors are of any dtype and strides, and have the same shape at all ranks
    unless documented otherwise. docs/reference/devices.md says what happens to those on a device. A call blocks and
    returns None; with async_op=True it returns a torch.distributed.Work. `timeout` is in seconds or a timedelta, by
    default the group's. Thread-safe. Errors are the same as those of torch.distributed over muster (muster.errors).

    op: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or an op of torch.distributed.
    """

    def __repr__(self) -> str:
        return f"<muster.Group {self.name!r}: rank {self.rank} of {self.size}, over {self.transport}>"

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a tensor in memory that the ranks of this host share, so collectives copy its bytes only once. It is
        not cleared, and may outlive the group.
        """
        sizes = torch.Size(size for each in shape for size in ([each] if isinstance(each, int) else each))
        return self._empty(math.prod(sizes), dtype or torch.get_default_dtype()).view(sizes)

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,  # noqa: A002 (as in all_to_all_single)
        root: int,
        splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: timedelta | float | None = None,
    ) -> Work | None:
        """Writes the inputs of all ranks to the root's `output`, in rank order. The other ranks pass None.

        splits: the rows of each rank's input, which may differ. Only the root needs them. Without them all are equal.
        """
        received = self._root_splits(output, splits, root, "output")
        output = input.new_empty(0, *input.shape[1:]) if output is None else output
        return self.all_to_all_single(output, input, received, self._only(root, len(input)), async_op, timeout)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None,  # noqa: A002
        root: int,
        splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: timedelta | float | None = None,
    ) -> Work | None:
        """Sends one block of the root's `input` to each rank, in rank order. The other ranks pass None.

        splits: the rows of each rank's block, which may differ. Only the root needs them. Without them all are equal.
        """
        sent = self._root_splits(input, splits, root, "input")
        input = output.new_empty(0, *output.shape[1:]) if input is None else input  # noqa: A001
        return self.all_to_all_single(output, input, self._only(root, len(output)), sent, async_op, timeout)

    def _root_splits(
        self, tensor: torch.Tensor | None, splits: Sequence[int] | None, root: int, role: str
    ) -> list[int]:
        """The rows of `tensor` for each rank. It is the root's alone."""
        if root not in range(self.size):
            raise ArgumentError(f"root {root} is out of range for world size {self.size}")
        if (tensor is None) != (self.rank != root):
            raise ArgumentError(f"the root, rank {root}, has the {role}, and only the root; this is rank {self.rank}")
        if tensor is None:
            return [0] * self.size
        if splits is None and len(tensor) % self.size != 0:
            raise ArgumentError(f"the {role} has {len(tensor)} rows for {self.size} ranks: it needs splits")
        return [len(tensor) // self.size] * self.size if splits is None else list(splits)

    def _only(self, root: int, rows: int) -> list[int]:
        return [rows if rank == root else 0 for rank in range(self.size)]

    @deprecated("renamed to all_gather_into_tensor")
    def all_gather_into(self, *arguments: Any, **named: Any) -> Work | None:
        return self.all_gather_into_tensor(*arguments, **named)

    @staticmethod
    @deprecated("use muster.group()")
    def from_process_group(group: dist.ProcessGroup | None = None) -> Group:
        return Group(backend_of(group))


def group(group: dist.ProcessGroup | None = None) -> Group:
    """Returns a Group for `group` (default: all ranks), which must use the muster backend."""
    return Group(backend_of(group))


def process_group_of(group: object) -> dist.ProcessGroup:
    """Returns the process group of an argument `group`; the default group for None."""
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the process group")
    if not isinstance(group, dist.ProcessGroup):
        given = "a muster.Group" if isinstance(group, Group) else repr(group)
        raise TypeError(f"expected a process group, such as torch.distributed.new_group() returns, not {given}")
    return group


def backend_of(group: dist.ProcessGroup | None, device: str = "cpu") -> Backend:
    backend = process_group_of(group)._get_backend(torch.device(device))
    while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend to add checks
        backend = backend.wrapped_pg
    return backend


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """torch.distributed.monitored_barrier() for groups of the muster backend. Rank 0 raises an error that names the
    first rank that did not arrive in time, or with `wait_all_ranks` all of them. The group stays usable.
    """
    # c10d's value for the group's timeout is -1 ms.
    given = timedelta(milliseconds=-1) if timeout is None else as_timedelta(timeout)
    process_group_of(group).monitored_barrier(given, wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]


def as_timedelta(timeout: timedelta | float) -> timedelta:
    """Returns the timeout in c10d's form. A number is in seconds."""
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def gather_bytes(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Returns the bytes of all ranks in rank order at rank 0, and an empty list at the others.

    Replaces torch.distributed.gather_object, which unpickles the received bytes, so that a peer could run code here.
    """
    size, leads = dist.get_world_size(group), dist.get_rank(group) == 0
    lengths = all_gather(torch.tensor([len(own)]), group)[:, 0]
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else mine[:0]
    all_of_them = [torch.empty_like(mine) for _ in range(size)] if leads else None
    dist.gather(mine, all_of_them, dst=dist.get_global_rank(group, 0), group=group)
    pairs = zip(all_of_them or [], lengths.tolist(), strict=False)
    return [tensor[:length].numpy().tobytes() for tensor, length in pairs]


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the tensors of all ranks, stacked in rank order. For any backend; `tensor` has at least one dimension.

    torch.distributed 2.13 renames its function for this and warns about the old name.
    """
    gathered = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])  # Gloo takes no stacked form
    group._allgather_base(gathered, tensor).wait()
    return gathered.view(group.size(), *tensor.shape)
