"""Collectives from C++: the same program over muster, Open MPI and MPICH, in turn."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from muster.bench import mpi_python
from muster.bench.collectives import BUFFERS, means, time_row
from muster.bench.jobs import MPIS, OWN, Job, available, running
from muster.bench.memory import COLD_FROM, pool_size
from muster.bench.report import BenchFailedError, Row, parse_names, parse_numbers, parse_size
from muster.bench.timing import find_repeats, in_rounds

SUMMARY = "collectives called from C++ over processes of this host, against Open MPI and MPICH"
PEERS: tuple[str, ...] = ("all", *MPIS)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
_MAX_REPEATS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default="all", help="some of: " + ", ".join(OPS) + " (default: all)")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--sizes", default="8,1Ki,64Ki,1Mi,16Mi", help="bytes of a message (default: %(default)s)")
    parser.add_argument(
        "--buffers", default="warm", help="warm: one message again and again; cold: out of a pool (warm)"
    )
    parser.add_argument("--python", action="store_true", help="the backend muster-mpi against mpi4py, both from Python")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each number of ranks, operation, size and kind of buffers."""
    ops = parse_names("--ops", arguments.ops, mpi_python.OPS if arguments.python else OPS)
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    if arguments.python:
        yield from _python(arguments, list(mpi_python.OPS) if arguments.ops == "all" else ops, sizes)
        return
    buffers = parse_names("--buffers", arguments.buffers, BUFFERS)
    mpis = [mpi for mpi in MPIS if arguments.vs in ("all", mpi) and available(mpi)]
    if not mpis:
        raise BenchFailedError(
            "no MPI was found: install one of the packages in docs/howto/benchmarks.md, then build again"
        )
    for ranks in parse_numbers("--ranks", arguments.ranks, 2):
        rows = []
        with (
            tempfile.TemporaryDirectory(prefix="muster-bench-") as folder,
            running([*OWN, *mpis], ranks, Path(folder), arguments.timeout) as jobs,
        ):
            for op in ops:
                for size in sizes if op != "barrier" else [0]:
                    for kind in [kind for kind in buffers if kind == "warm" or size >= COLD_FROM]:
                        rows.append(_measure(jobs, op, size, kind, arguments.quick))
                        yield rows[-1]
        yield from means(rows)


def _python(arguments: argparse.Namespace, ops: list[str], sizes: list[int]) -> Iterator[Row]:
    for mpi in mpi_python.found():
        for ranks in parse_numbers("--ranks", arguments.ranks, 1):
            yield from mpi_python.rows(mpi, ranks, ops, sizes, arguments.quick, arguments.timeout)


def _measure(jobs: dict[str, Job], op: str, size: int, buffers: str, quick: bool) -> Row:
    count = pool_size(size, buffers)
    rounds, seconds = (3, 0.03) if quick else (7, 0.15)
    microseconds: dict[str, float] = {}
    moved = 0
    # A job holds one kind of memory at a time, so `shared` is measured after the rest.
    for memory, variants in (("ordinary", jobs), ("own", {"shared": jobs["muster"]})):
        timed: dict[str, Callable[[int], float]] = {}
        for name, job in variants.items():
            answers = set(job.ask("prepare", op, size, 1, count, memory))
            if answers != {"refused"}:
                timed[name] = partial(job.time, "run", op, size, count)
                moved = int(answers.pop())
        if "muster" in timed and size:
            timed["floor"] = partial(jobs["muster"].time, "copy", op, size, count)
        repeats = {name: find_repeats(each, seconds, _MAX_REPEATS) for name, each in timed.items()}
        times = in_rounds({name: partial(each, repeats[name]) for name, each in timed.items()}, rounds)
        microseconds |= {name: 1e6 * statistics.median(taken) / repeats[name] for name, taken in times.items()}
    return _row(op, jobs["muster"].ranks, moved, buffers, microseconds)


def _row(op: str, ranks: int, size: int, buffers: str, microseconds: dict[str, float]) -> Row:
    """Returns a row whose ratio compares muster with the fastest MPI."""
    best = min(microseconds[mpi] for mpi in MPIS if mpi in microseconds)
    size = size if op != "barrier" else 0
    return time_row("mpi", op, ranks, size, microseconds, "best MPI", best, buffers=buffers)
