"""Collectives from C++: one program over muster, Open MPI and MPICH, measured in turn."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.bench.collectives import BUFFERS, chosen, means, rank_counts
from muster.bench.jobs import MPIS, OWN, Job, available, running
from muster.bench.memory import COLD_FROM, cold_pool_bytes, slots
from muster.bench.operations import OPERATIONS
from muster.bench.plot import write_size_plot
from muster.bench.report import BenchFailedError, Row, SizeTable, Table, bus_bandwidth, parse_size, write_size_markdown

__all__ = ["PEERS", "SUMMARY", "TABLE", "add_arguments", "run", "write_markdown", "write_plot"]

SUMMARY = "collectives called from C++ over processes of this host, against Open MPI and MPICH"
PEERS: tuple[str, ...] = ("all", *MPIS)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
TABLE: type[Table] = SizeTable
_MOST_REPEATS = 1_000_000

write_plot = write_size_plot
write_markdown = write_size_markdown


@dataclass(frozen=True)
class Way:
    """A job and the memory that it works on."""

    job: str
    memory: str = "ordinary"


WAYS = {**{job: Way(job) for job in OWN}, "shared": Way("muster", "own"), **{mpi: Way(mpi) for mpi in MPIS}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default="all", help="some of: " + ", ".join(OPS) + " (default: all)")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--sizes", default="8,1Ki,64Ki,1Mi,16Mi", help="bytes of a message (default: %(default)s)")
    parser.add_argument(
        "--buffers", default="warm", help="warm: one message again and again; cold: out of a pool (warm)"
    )


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each number of ranks, operation, size and kind of buffers."""
    ops = list(OPS) if arguments.ops == "all" else chosen("--ops", arguments.ops, OPS)
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    buffers = chosen("--buffers", arguments.buffers, BUFFERS)
    mpis = [mpi for mpi in MPIS if arguments.vs in ("all", mpi) and available(mpi)]
    if not mpis:
        raise BenchFailedError("no MPI to measure beside: docs/benchmarks.md names the packages, then build again")
    for ranks in rank_counts(arguments.ranks):
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
    ways = {name: way for name, way in WAYS.items() if way.job in jobs}
    times: dict[str, list[float]] = {}
    repeats: dict[str, int] = {}
    moved = 0
    # A job holds the memory of one way at a time, so `shared` is measured behind the rest.
    for group in ({name: way for name, way in ways.items() if way.memory == "ordinary"}, {"shared": ways["shared"]}):
        ready = {}
        for name, way in group.items():
            answers = set(jobs[way.job].ask("prepare", op, size, 1, count, way.memory))
            if answers != {"refused"}:
                ready[name] = jobs[way.job], "run"
                moved = int(answers.pop())
        if "muster" in ready and size:
            ready["floor"] = jobs["muster"], "copy"
        for name, (job, verb) in ready.items():
            repeats[name] = _repeats(job, verb, op, size, count, seconds)
        for _ in range(rounds):
            for name, (job, verb) in ready.items():
                taken = _time(job, verb, op, size, repeats[name], count)
                times.setdefault(name, []).append(taken / repeats[name])
    return _row(op, len(jobs["muster"]), moved, buffers, {n: 1e6 * statistics.median(t) for n, t in times.items()})


def _time(job: Job, verb: str, op: str, size: int, repeats: int, count: int) -> float:
    """Seconds at the slowest rank."""
    return max(map(float, job.ask(verb, op, size, repeats, count, "-")))


def _repeats(job: Job, verb: str, op: str, size: int, count: int, seconds: float) -> int:
    """How many calls fill `seconds`, found by quadrupling, which also warms up."""
    repeats = 1
    while (taken := _time(job, verb, op, size, repeats, count)) < seconds / 4 and repeats < _MOST_REPEATS:
        repeats *= 4
    return max(1, min(_MOST_REPEATS, round(repeats * seconds / max(taken, 1e-9))))


def _row(op: str, ranks: int, size: int, buffers: str, microseconds: dict[str, float]) -> Row:
    """The ratio is to the faster one of the MPIs."""
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
        ratio=best / muster,
        floor=microseconds.get("floor", 0.0),
        busbw=bus_bandwidth(size, OPERATIONS[op].bus(ranks), muster),
        buffers=buffers,
        also={name: value for name, value in microseconds.items() if name not in ("muster", "floor")},
    )
