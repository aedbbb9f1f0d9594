"""All collectives and send/recv, called synchronously through torch.distributed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from muster.bench.operations import OPERATIONS
from muster.bench.ranks import RankSetup, run_ranks
from muster.bench.report import Row, bus_bandwidth, parse_names, parse_numbers, parse_size

SUMMARY = "every collective and send/recv over processes of this host, against gloo"
PEERS: tuple[str, ...] = ("gloo", "deepspeed")
BUFFERS = ("warm", "cold")
VARIANTS = ("shared", "direct")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default="all", help="some of: " + ", ".join(OPERATIONS) + " (default: all)")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--sizes", default="8,1Ki,64Ki,1Mi,16Mi", help="bytes of a message (default: %(default)s)")
    parser.add_argument(
        "--buffers", default="warm", help="warm: one tensor; cold: a pool larger than the caches (warm)"
    )
    parser.add_argument("--load", type=int, default=0, metavar="N", help="N busy processes run in the background (0)")
    parser.add_argument("--bind", action="store_true", help="bind each rank to a core before it joins")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument(
        "--variants", "--ways", default=",".join(VARIANTS), help="variants of muster beside c10d (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each number of ranks, operation, size and kind of buffers."""
    if arguments.load < 0:
        raise ValueError(f"--load takes a number of processes, not {arguments.load}")
    if arguments.vs == "deepspeed":
        _check_deepspeed(arguments)
    counts = parse_numbers("--ranks", arguments.ranks, 2)
    options = common_options(arguments) | {
        "buffers": parse_names("--buffers", arguments.buffers, BUFFERS),
        "variants": parse_names("--variants", arguments.variants, VARIANTS) if arguments.variants else [],
        "dtype": arguments.dtype,
        "bind": arguments.bind,
        "calls": arguments.load > 0,
    }
    for ranks in counts:
        rows = []
        for result in run_ranks("measuring", [RankSetup()] * ranks, options, arguments.timeout, load=arguments.load):
            rows.append(_row(ranks, arguments.vs, result))
            yield rows[-1]
            if result.get("late"):
                yield _late_row(rows[-1], result["late"])
        yield from means(rows)


def _check_deepspeed(arguments: argparse.Namespace) -> None:
    if not importlib.util.find_spec("deepspeed"):
        raise ValueError(f"--vs deepspeed: it is not installed in {sys.prefix} (pip install deepspeed)")
    if arguments.ops != "all_reduce" or arguments.dtype != "float32":
        raise ValueError("--vs deepspeed has all_reduce of float32 only: give --ops all_reduce")


def common_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of measuring.measure() for which all benchmarks of collectives have options."""
    return {
        "ops": parse_names("--ops", arguments.ops, OPERATIONS),
        "sizes": [parse_size(text) for text in arguments.sizes.split(",")],
        "buffers": ["warm"],
        "variants": [],
        "dtype": "float32",
        "peer": arguments.vs,
        "rounds": 3 if arguments.quick else 7,
        "seconds": 0.03 if arguments.quick else 0.15,
        "timeout": arguments.timeout,
    }


def time_row(
    bench: str, op: str, ranks: int, size: int, microseconds: dict[str, float], peer_name: str, peer: float, **more: Any
) -> Row:
    """Takes muster's time and the floor out of `microseconds`. The rest is of other variants."""
    muster, floor = (microseconds.pop(name, 0.0) for name in ("muster", "floor"))
    busbw = bus_bandwidth(size, OPERATIONS[op].bus(ranks), muster)
    times = (muster, peer, peer_name, floor)
    return Row(bench, op, ranks, "time", "us", *times, bytes=size, busbw=busbw, also=microseconds, **more)


def _row(ranks: int, peer: str, result: dict[str, Any]) -> Row:
    microseconds = {variant: 1e6 * seconds for variant, seconds in result["seconds"].items()}
    other = microseconds.pop(peer, 0.0)
    more = {"buffers": result["buffers"], "note": note_of(result)}
    return time_row("collectives", result["op"], ranks, result["bytes"], microseconds, peer, other, **more)


def note_of(result: dict[str, Any]) -> str:
    """Returns the reasons why figures are missing."""
    return "; ".join(f"{variant}: {reason}" for variant, reason in result["notes"].items())


def _late_row(row: Row, late: dict[str, float]) -> Row:
    """Returns the row of the same case with the 95th percentile of the calls."""
    muster, peer = 1e6 * late.get("muster", 0.0), 1e6 * late.get(row.peer_name, 0.0)
    also = {variant: 1e6 * late[variant] for variant in row.also if variant in late}
    return dataclasses.replace(
        row, case=f"{row.case}, p95", muster=muster, peer=peer, ratio=-1, floor=0.0, busbw=None, also=also, note=""
    )


def means(rows: list[Row]) -> Iterator[Row]:
    """Yields the geometric mean of the ratios over all sizes, for each operation."""
    for case in dict.fromkeys(row.case for row in rows):
        ratios = [row.ratio for row in rows if row.case == case and row.ratio]
        if len(ratios) > 1:
            last = next(row for row in rows if row.case == case)
            mean = statistics.geometric_mean(ratios)
            yield Row(last.bench, case, last.ranks, "geometric mean", "", 0, 0, last.peer_name, ratio=mean)
