"""Collectives from C++: the same program over muster, Open MPI and MPICH, in turn."""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.bench.collectives import BUFFERS, means
from muster.bench.jobs import MPIS, OWN, Job, available, running
from muster.bench.memory import COLD_FROM, cold_pool_bytes, slots
from muster.bench.operations import OPERATIONS
from muster.bench.report import BenchFailedError, Row, bus_bandwidth, parse_names, parse_numbers, parse_size
from muster.bench.timing import find_repeats

SUMMARY = "collectives called from C++ over processes of this host, against Open MPI and MPICH"
PEERS: tuple[str, ...] = ("all", *MPIS)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
_MAX_REPEATS = 1_000_000


@dataclass(frozen=True)
class Variant:
    """A job and the memory that it works on."""

    job: str
    memory: str = "ordinary"


VARIANTS = {
    **{job: Variant(job) for job in OWN},
    "shared": Variant("muster", "own"),
    **{mpi: Variant(mpi) for mpi in MPIS},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default="all", help="some of: " + ", ".join(OPS) + " (default: all)")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--sizes", default="8,1Ki,64Ki,1Mi,16Mi", help="bytes of a message (default: %(default)s)")
    parser.add_argument(
        "--buffers", default="warm", help="warm: one message again and again; cold: out of a pool (warm)"
    )


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each number of ranks, operation, size and kind of buffers."""
    ops = parse_names("--ops", arguments.ops, OPS)
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
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


def _measure(jobs: dict[str, Job], op: str, size: int, buffers: str, quick: bool) -> Row:
    count = slots(size, cold_pool_bytes()) if buffers == "cold" else 1
    rounds, seconds = (3, 0.03) if quick else (7, 0.15)
    variants = {name: variant for name, variant in VARIANTS.items() if variant.job in jobs}
    times: dict[str, list[float]] = {}
    repeats: dict[str, int] = {}
    moved = 0
    # A job holds the memory of one variant at a time, so `shared` is measured after the rest.
    shared = {"shared": variants.pop("shared")}
    for group in (variants, shared):
        ready = {}
        for name, variant in group.items():
            answers = set(jobs[variant.job].ask("prepare", op, size, 1, count, variant.memory))
            if answers != {"refused"}:
                ready[name] = jobs[variant.job], "run"
                moved = int(answers.pop())
        if "muster" in ready and size:
            ready["floor"] = jobs["muster"], "copy"
        for name, (job, verb) in ready.items():
            timed = functools.partial(_time, job, verb, op, size, count)
            repeats[name] = find_repeats(timed, seconds, _MAX_REPEATS)
        for _ in range(rounds):
            for name, (job, verb) in ready.items():
                taken = _time(job, verb, op, size, count, repeats[name])
                times.setdefault(name, []).append(taken / repeats[name])
    return _row(op, len(jobs["muster"]), moved, buffers, {n: 1e6 * statistics.median(t) for n, t in times.items()})


def _time(job: Job, verb: str, op: str, size: int, count: int, repeats: int) -> float:
    """Returns the seconds of the slowest rank."""
    return max(map(float, job.ask(verb, op, size, repeats, count, "-")))


def _row(op: str, ranks: int, size: int, buffers: str, microseconds: dict[str, float]) -> Row:
    """Returns a row whose ratio compares muster with the fastest MPI."""
    muster = microseconds["muster"]
    best = min(microseconds[mpi] for mpi in MPIS if mpi in microseconds)
    size = size if op != "barrier" else 0
    return Row(
        bench="mpi",
        case=op,
        ranks=ranks,
        bytes=size,
        metric="time",
        unit="us",
        muster=muster,
        peer=best,
        peer_name="best MPI",
        floor=microseconds.get("floor", 0.0),
        busbw=bus_bandwidth(size, OPERATIONS[op].bus(ranks), muster),
        buffers=buffers,
        also={name: value for name, value in microseconds.items() if name not in ("muster", "floor")},
    )
