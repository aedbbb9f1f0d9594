"""The operations of `muster bench collectives`, as programs call them, with their expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]


@dataclass
class Tensors:
    """The tensors of one rank. Blocks are in rank order."""

    rank: int
    ranks: int
    input: torch.Tensor
    output: torch.Tensor

    def blocks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.chunk(self.ranks))


@dataclass(frozen=True)
class Operation:
    """`call` binds an operation to tensors and a group. A message has the size of the longer tensor."""

    call: Callable[[Tensors, Any], Call]
    # The output for inputs of filled(). None: no output at this rank.
    expected: Callable[[Tensors], torch.Tensor | None]
    bus: Callable[[int], float] = lambda ranks: 1.0  # nccl-tests: busbw = bytes / time * bus
    input_blocks: bool = False  # true: the input has a block for each rank
    output_blocks: bool = False
    in_place: bool = False
    messages: int = 1  # messages that one call sends in sequence; the reported time is for one message
    direct: Callable[[Tensors, Any], Call] | None = None  # the same operation over muster.Group

    @property
    def in_blocks(self) -> bool:
        return self.input_blocks or self.output_blocks


def pattern(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns small whole numbers. Their sums over 13 ranks are exact in all dtypes with 8 bits of precision."""
    return torch.arange(count).remainder_(13).to(dtype)


def filled(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the input of `rank` for checks of results."""
    return pattern(count, dtype) + rank


def _block(tensors: Tensors) -> torch.Tensor:
    """Returns the part of the pattern in this rank's block."""
    whole = pattern(tensors.input.numel(), tensors.input.dtype)
    return tensors.blocks(whole)[tensors.rank]


def _summed(tensors: Tensors, each: torch.Tensor) -> torch.Tensor:
    return each * tensors.ranks + tensors.ranks * (tensors.ranks - 1) // 2


def _all_summed(tensors: Tensors) -> torch.Tensor:
    return _summed(tensors, pattern(tensors.input.numel(), tensors.input.dtype))


def _at_root(expected: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], torch.Tensor | None]:
    return lambda tensors: expected(tensors) if tensors.rank == 0 else None


def _from_rank(sender: Callable[[Tensors], int | None]) -> Callable[[Tensors], torch.Tensor | None]:
    def expected(tensors: Tensors) -> torch.Tensor | None:
        rank = sender(tensors)
        return None if rank is None else filled(rank, tensors.output.numel(), tensors.output.dtype)

    return expected


def _gathered(tensors: Tensors) -> torch.Tensor:
    count, dtype = tensors.input.numel(), tensors.input.dtype
    return torch.cat([filled(rank, count, dtype) for rank in range(tensors.ranks)])


def _exchanged(tensors: Tensors) -> torch.Tensor:
    return torch.cat([_block(tensors) + rank for rank in range(tensors.ranks)])


def _all_gather(tensors: Tensors, group: Any) -> Call:
    outputs = tensors.blocks(tensors.output)
    return lambda: dist.all_gather(outputs, tensors.input, group=group)


def _gather(tensors: Tensors, group: Any) -> Call:
    outputs = tensors.blocks(tensors.output) if tensors.rank == 0 else None
    return lambda: dist.gather(tensors.input, outputs, dst=0, group=group)


def _scatter(tensors: Tensors, group: Any) -> Call:
    inputs = tensors.blocks(tensors.input) if tensors.rank == 0 else None
    return lambda: dist.scatter(tensors.output, inputs, src=0, group=group)


def _reduce_scatter(tensors: Tensors, group: Any) -> Call:
    inputs = tensors.blocks(tensors.input)
    return lambda: dist.reduce_scatter(tensors.output, inputs, group=group)


def _all_to_all(tensors: Tensors, group: Any) -> Call:
    inputs, outputs = tensors.blocks(tensors.input), tensors.blocks(tensors.output)
    return lambda: dist.all_to_all(outputs, inputs, group=group)


def _partner(tensors: Tensors) -> int | None:
    other = tensors.rank ^ 1
    return other if other < tensors.ranks else None


def _send_recv(tensors: Tensors, group: Any) -> Call:
    """A round trip between ranks 2i and 2i + 1."""
    other = _partner(tensors)

    def there_and_back() -> None:
        if other is None:
            return
        if tensors.rank < other:
            dist.send(tensors.input, other, group=group)
            dist.recv(tensors.output, other, group=group)
        else:
            dist.recv(tensors.output, other, group=group)
            dist.send(tensors.input, other, group=group)

    return there_and_back


def _ring_exchange(tensors: Tensors, group: Any) -> Call:
    """Sends to the next rank and receives from the previous one, concurrently."""
    after, before = (tensors.rank + 1) % tensors.ranks, (tensors.rank - 1) % tensors.ranks
    both = [
        dist.P2POp(dist.isend, tensors.input, after, group=group),
        dist.P2POp(dist.irecv, tensors.output, before, group=group),
    ]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return exchange


def _shared_out(ranks: int) -> float:
    return (ranks - 1) / ranks


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        lambda tensors, group: lambda: dist.all_reduce(tensors.output, group=group),
        _all_summed,
        bus=lambda ranks: 2 * _shared_out(ranks),
        in_place=True,
        direct=lambda tensors, group: lambda: group.all_reduce(tensors.output),
    ),
    "reduce": Operation(
        lambda tensors, group: lambda: dist.reduce(tensors.output, 0, group=group),
        _at_root(_all_summed),
        in_place=True,
        direct=lambda tensors, group: lambda: group.reduce(tensors.output, 0),
    ),
    "broadcast": Operation(
        lambda tensors, group: lambda: dist.broadcast(tensors.output, 0, group=group),
        _from_rank(lambda tensors: 0),
        in_place=True,
        direct=lambda tensors, group: lambda: group.broadcast(tensors.output, 0),
    ),
    "all_gather": Operation(_all_gather, _gathered, bus=_shared_out, output_blocks=True),
    "all_gather_into_tensor": Operation(
        lambda tensors, group: lambda: dist.all_gather_into_tensor(tensors.output, tensors.input, group=group),
        _gathered,
        bus=_shared_out,
        output_blocks=True,
        direct=lambda tensors, group: lambda: group.all_gather_into_tensor(tensors.output, tensors.input),
    ),
    "gather": Operation(_gather, _at_root(_gathered), bus=_shared_out, output_blocks=True),
    "scatter": Operation(_scatter, _block, bus=_shared_out, input_blocks=True),
    "reduce_scatter": Operation(
        _reduce_scatter, lambda tensors: _summed(tensors, _block(tensors)), bus=_shared_out, input_blocks=True
    ),
    "reduce_scatter_tensor": Operation(
        lambda tensors, group: lambda: dist.reduce_scatter_tensor(tensors.output, tensors.input, group=group),
        lambda tensors: _summed(tensors, _block(tensors)),
        bus=_shared_out,
        input_blocks=True,
        direct=lambda tensors, group: lambda: group.reduce_scatter(tensors.output, tensors.input),
    ),
    "all_to_all": Operation(_all_to_all, _exchanged, bus=_shared_out, input_blocks=True, output_blocks=True),
    "all_to_all_single": Operation(
        lambda tensors, group: lambda: dist.all_to_all_single(tensors.output, tensors.input, group=group),
        _exchanged,
        bus=_shared_out,
        input_blocks=True,
        output_blocks=True,
        direct=lambda tensors, group: lambda: group.all_to_all_single(tensors.output, tensors.input),
    ),
    "send_recv": Operation(_send_recv, _from_rank(_partner), messages=2),
    "exchange": Operation(_ring_exchange, _from_rank(lambda tensors: (tensors.rank - 1) % tensors.ranks)),
    "barrier": Operation(
        lambda tensors, group: lambda: dist.barrier(group=group),
        lambda tensors: None,
        direct=lambda tensors, group: group.barrier,
    ),
}
