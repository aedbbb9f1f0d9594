"""Store servers under the load of a C++ generator that uses PyTorch's TCPStore protocol."""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from muster.bench.loading import Figures, Metric, load, row_beside_torch
from muster.bench.report import BenchFailedError, Row, parse_names, parse_numbers
from muster.bench.servers import Server, muster_server, torch_server

SUMMARY = "the store's server, against torch's libuv TCPStore"
PEERS: tuple[str, ...] = ("tcpstore",)

# By the load generator's names.
_METRICS = {
    "rate": Metric("rate", "1/s"),
    "time": Metric("time", "ms", 1e3),
    "longest": Metric("longest silence", "ms", 1e3),
    "p50": Metric("p50", "us", 1e6),
    "p99": Metric("p99", "us", 1e6),
    "cpu": Metric("server CPU", "us", 1e6),
    "memory": Metric("server memory", "B"),
}


@dataclass
class Case:
    """A case of the benchmark, with one row for each metric."""

    name: str  # the load generator's name
    shown: str
    connections: list[int]
    options: list[str] = field(default_factory=list)
    repeats: int = 3
    fresh: bool = False  # a new server for each measurement
    resolvable: bool = True


def _cases(quick: bool) -> list[Case]:
    loop = ["--seconds", "0.2" if quick else "1"]
    rounds = ["--rounds", "3" if quick else "15"]
    counts = [1, 256] if quick else [1, 16, 256, 2048, 8192]
    crowd = [1024] if quick else [1024, 4096, 8192]
    gets = [Case("multi_get", f"wait and multi_get of {n:,} keys", [1], ["--keys", str(n), *loop]) for n in crowd]
    closed = [Case(name, name, counts, loop) for name in ("set", "get", "add")]
    return [
        Case("connect", "connect and validate", counts[1:] if quick else [256, 2048, 8192]),
        Case("connect", "connect, names as they resolve here", [32], repeats=1, resolvable=False),
        *closed,
        *gets,
        Case("barrier", "barrier of all", crowd, rounds),
        Case("release", "one set releases all waiting", crowd, rounds),
        Case("killed", "all waiting are killed", crowd, fresh=True),
        Case("killed", "all waiting for 64 keys are killed", crowd, ["--keys", "64"], fresh=True),
        Case("idle", "idle connections", crowd[-1:], repeats=1, fresh=True),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", metavar="NAME,...", default="all", help="only these of the load generator's cases")
    parser.add_argument("--connections", metavar="N,...", help="instead of each case's own numbers of clients")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each case and number of clients."""
    cases = _cases(arguments.quick)
    wanted = parse_names("--cases", arguments.cases, dict.fromkeys(case.name for case in cases))
    counts = parse_numbers("--connections", arguments.connections or "1", 1)
    for case in (case for case in cases if case.name in wanted):
        for connections in counts if arguments.connections else case.connections:
            yield from _measure(case, connections, arguments)


def _measure(case: Case, connections: int, arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures the three servers in turn, so that a change in the machine's load affects all of them alike."""
    start: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
        "muster": muster_server,
        "tcpstore": functools.partial(torch_server, resolvable=case.resolvable),
        "floor": lambda: contextlib.nullcontext(Server(["floor"], 0)),
    }
    found: dict[str, list[Figures]] = {name: [] for name in start}
    with contextlib.ExitStack() as stack:
        kept = {} if case.fresh else {name: stack.enter_context(make()) for name, make in start.items()}
        for _ in range(1 if arguments.quick else case.repeats):
            for name, make in start.items():
                with contextlib.nullcontext(kept[name]) if kept else make() as server:
                    found[name].append(_load(case, connections, server, arguments.timeout))
    medians = {name: _medians(figures) for name, figures in found.items()}
    for name in medians["muster"]:
        if metric := _METRICS.get(name):
            figures = (medians[server].get(name, 0) for server in ("muster", "tcpstore", "floor"))
            yield row_beside_torch("store", case.shown, connections, metric, *figures)


def _load(case: Case, connections: int, server: Server, timeout: float) -> Figures:
    words = [case.name, *case.options, "--server", server.addresses[0], "--pid", str(server.pid)]
    try:
        return load([*words, "--connections", str(connections), "--timeout", str(timeout)])
    except BenchFailedError as error:
        raise BenchFailedError(f"{case.shown}, {connections:,} clients: {error}") from None


def _medians(repeats: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in repeats) for name in repeats[0]}
