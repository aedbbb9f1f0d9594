"""all_reduce of float32, called as programs call it: torch.distributed, synchronous, in place."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from muster.bench.plot import write_size_plot as write_plot
from muster.bench.ranks import run_ranks
from muster.bench.report import Row, SizeTable, Table, parse_size
from muster.bench.timing import interleave

__all__ = ["PEERS", "SUMMARY", "TABLE", "add_arguments", "measure", "run", "write_plot"]

SUMMARY = "float32 sum over processes of this host, against gloo"
PEERS: tuple[str, ...] = ("gloo",)
TABLE: type[Table] = SizeTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--sizes", default="8,64Ki,1Mi,16Mi", help="bytes of the tensor (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each number of ranks and size."""
    counts = [int(text) if text.isdigit() else 0 for text in arguments.ranks.split(",")]
    if min(counts) < 2:
        raise ValueError(f"--ranks takes numbers from 2 on, as in 2,4; {arguments.ranks!r} is not that")
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    if any(size % 4 for size in sizes):
        raise ValueError("--sizes takes multiples of 4 bytes: the elements are float32")
    options = {
        "sizes": sizes,
        "peer": arguments.vs,
        "rounds": 3 if arguments.quick else 7,
        "seconds": 0.05 if arguments.quick else 0.25,
        "timeout": arguments.timeout,
    }
    for ranks in counts:
        for result in run_ranks("all_reduce", ranks, options, arguments.timeout):
            yield _row(ranks, arguments.vs, result)


def _row(ranks: int, peer: str, result: dict[str, Any]) -> Row:
    muster, other, floor = (1e6 * result[name] for name in ("muster", peer, "floor"))
    bus_bytes = result["bytes"] * 2 * (ranks - 1) / ranks
    return Row(
        bench="all_reduce",
        case="float32 sum, synchronous",
        ranks=ranks,
        bytes=result["bytes"],
        metric="time",
        unit="us",
        muster=muster,
        peer=other,
        peer_name=peer,
        ratio=other / muster,
        floor=floor,
        busbw=bus_bytes / (muster * 1e3),
    )


def measure(groups: dict[str, Any], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for size in options["sizes"]:
        data = torch.zeros(size // 4)
        ways: dict[str, Callable[[], None]] = {}
        for name in ("muster", options["peer"]):
            _check(groups[name], size // 4, name)
            ways[name] = _reducing(data, groups[name])
        ways["floor"] = _copying(data)
        yield {"bytes": size, **interleave(ways, options["rounds"], options["seconds"])}


def _reducing(data: torch.Tensor, group: Any) -> Callable[[], None]:
    return lambda: dist.all_reduce(data, group=group)  # type: ignore[no-any-return]


def _copying(data: torch.Tensor) -> Callable[[], None]:
    """The floor: every process copies as many bytes at the same time."""
    target = torch.ones_like(data)
    pointers = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(data.data_ptr())
    keep = (target, data)

    def copy() -> None:
        ctypes.memmove(*pointers, keep[0].nbytes)

    return copy


def _check(group: Any, count: int, name: str) -> None:
    """A fast wrong answer is worth nothing."""
    ranks = dist.get_world_size(group)
    pattern = torch.arange(count, dtype=torch.float32).remainder_(251)
    data = pattern + dist.get_rank(group)
    dist.all_reduce(data, group=group)
    if not torch.equal(data, pattern * ranks + ranks * (ranks - 1) / 2):
        raise RuntimeError(f"{name}'s all_reduce of {count} elements over {ranks} ranks gave a wrong sum")
