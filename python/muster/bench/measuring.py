"""The part of `muster bench collectives` that runs in each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import muster
from muster._group import all_gather, process_group_of
from muster.bench import deepspeed_op
from muster.bench.groups import Groups
from muster.bench.memory import COLD_FROM, copying, in_turn, make_tensors, pool_size
from muster.bench.operations import OPERATIONS, Call, Operation, Tensors, filled
from muster.bench.timing import interleave, interleave_calls


@dataclass
class Variant:
    """One way to run an operation."""

    group: str
    allocate: Callable[[int], torch.Tensor] | None = None  # None: ordinary tensors
    direct: Callable[[Tensors, Any], Call] | None = None  # over muster.Group


def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in options["ops"]:
        for size in options["sizes"] if name != "barrier" else [0]:
            for buffers in options["buffers"]:
                if buffers == "warm" or size >= COLD_FROM:
                    yield {"op": name, "buffers": buffers, **_measure_case(groups, name, size, buffers, options)}


def _measure_case(groups: Groups, name: str, size: int, buffers: str, options: dict[str, Any]) -> dict[str, Any]:
    operation = OPERATIONS[name]
    like = shapes(operation, size, getattr(torch, options["dtype"]))
    size = max(like.input.nbytes, like.output.nbytes)
    count = pool_size(size, buffers)
    ordinary = make_tensors(operation, like, count)
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for variant, what in _variants(groups, operation, options).items():
        tensors = make_tensors(operation, like, count, what.allocate) if what.allocate else ordinary
        group = muster.group(groups[what.group]) if what.direct else groups[what.group]
        bound = [(what.direct or operation.call)(one, group) for one in tensors]
        if reason := agreed(failure(operation, tensors[0], bound[0])):
            notes[variant] = reason
            groups.recreate(what.group)
        else:
            calls[variant] = in_turn(bound)
    if size:
        calls["floor"] = in_turn([copying(one) for one in ordinary])
    late: dict[str, float] = {}
    if options.get("calls"):
        seconds, late = interleave_calls(calls, options["rounds"], options["seconds"])
    else:
        seconds = interleave(calls, options["rounds"], options["seconds"])
    for times in (seconds, late):
        for variant in times.keys() - {"floor"}:
            times[variant] /= operation.messages
    return {"bytes": size, "seconds": seconds, "late": late, "notes": notes}


def _variants(groups: Groups, operation: Operation, options: dict[str, Any]) -> dict[str, Variant]:
    variants = {"muster": Variant("muster")}
    if options["peer"] == "deepspeed":
        variants["deepspeed"] = Variant("muster", direct=deepspeed_op.all_reduce)
    elif options["peer"]:
        variants[options["peer"]] = Variant(options["peer"])
    cpu = torch.device("cpu")
    backend = groups["muster"]._get_backend(cpu)
    if "shared" in options["variants"] and backend.supports_tensor_alloc(cpu):
        variants["shared"] = Variant(
            "muster", lambda size: backend.allocate_tensor(size, dtype=torch.uint8, device=cpu)
        )
    if "direct" in options["variants"] and operation.direct:
        variants["direct"] = Variant("muster", direct=operation.direct)
    return variants


def shapes(operation: Operation, size: int, dtype: torch.dtype) -> Tensors:
    """Returns tensors without memory of the given size, rounded up to whole elements and equal blocks."""
    ranks = dist.get_world_size()
    block = -(-size // (dtype.itemsize * (ranks if operation.in_blocks else 1)))
    counts = (block * (ranks if blocks else 1) for blocks in (operation.input_blocks, operation.output_blocks))
    return Tensors(dist.get_rank(), ranks, *(torch.empty(count, dtype=dtype, device="meta") for count in counts))


def failure(operation: Operation, tensors: Tensors, call: Call) -> str:
    """Returns why the operation cannot be measured, or an empty string. Raises for a wrong result."""
    tensors.input.copy_(filled(tensors.rank, tensors.input.numel(), tensors.input.dtype))
    try:
        call()
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    expected = operation.expected(tensors)
    if expected is not None and not _is(expected, tensors.output, tensors.ranks):
        raise RuntimeError(f"a wrong result: {tensors.output.numel()} elements at rank {tensors.rank}")
    tensors.input.zero_()
    tensors.output.zero_()
    return ""


def _is(expected: torch.Tensor, output: torch.Tensor, ranks: int) -> bool:
    """Compares bits, except for sums that the dtype cannot represent, because each addition may round them."""
    if torch.equal(output, expected) or not expected.is_floating_point():
        return torch.equal(output, expected)
    eps = torch.finfo(expected.dtype).eps
    return expected.max().item() > 2 / eps and torch.allclose(output.double(), expected.double(), rtol=ranks * eps)


def agreed(reason: str) -> str:
    """Returns the reason of the first rank that has one, at all ranks."""
    text = reason.encode()
    lengths = all_gather(torch.tensor([len(text)]), process_group_of(None))
    first = next((rank for rank, length in enumerate(lengths) if length > 0), None)
    if first is None:
        return ""
    said = torch.zeros(int(lengths[first]), dtype=torch.uint8)
    if first == dist.get_rank():
        said = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(said, src=first)
    return said.numpy().tobytes().decode()
