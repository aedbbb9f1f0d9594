"""muster bench NAME: compares muster with a peer, prints a table with the ratio and the floor, and writes JSON."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from muster.bench import (
    collectives,
    ddp,
    frameworks,
    graph,
    launch,
    mpi,
    network,
    plot,
    processes,
    rpc,
    startup_load,
    store,
)
from muster.bench.operations import OPERATIONS
from muster.bench.report import BenchFailedError, Row, Table, write_json, write_markdown


class Bench(Protocol):
    """The attributes of a benchmark's module."""

    SUMMARY: str
    PEERS: tuple[str, ...]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> Iterator[Row]: ...


BENCHES: dict[str, Bench] = {
    "collectives": collectives,
    "network": network,
    "ddp": ddp,
    "graph": graph,
    "mpi": mpi,
    "launch": launch,
    "processes": processes,
    "rpc": rpc,
    "store": store,
    "startup-load": startup_load,
    "frameworks": frameworks,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The name of an operation stands for `collectives --ops NAME`: muster bench all_reduce --ranks 2."""
    if arguments and arguments[0] == "storm":
        print("muster bench: storm is now called startup-load", file=sys.stderr)
        arguments = ["startup-load", *arguments[1:]]
    if arguments and arguments[0] in OPERATIONS:
        arguments = ["collectives", "--ops", *arguments]
    epilog = f"The name of an operation is a benchmark, too: {', '.join(OPERATIONS)}."
    parser = argparse.ArgumentParser(prog="muster bench", description=__doc__, epilog=epilog)
    names = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, bench in BENCHES.items():
        one = names.add_parser(name, help=bench.SUMMARY, description=bench.SUMMARY)
        one.add_argument("--vs", choices=bench.PEERS, default=bench.PEERS[0], help="the peer (default: %(default)s)")
        bench.add_arguments(one)
        one.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
        one.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the rows as a table for a document")
        one.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rows")
        one.add_argument("--quick", action="store_true", help="fewer and shorter rounds: under a minute, less exact")
        one.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one number of ranks (600)")
    if not arguments or (arguments[0] not in BENCHES and not arguments[0].startswith("-")):
        asked = f"there is no benchmark {arguments[0]!r}" if arguments else "name a benchmark"
        parser.error(f"{asked}; there are: {', '.join(BENCHES)}")
    options = parser.parse_args(arguments)
    for path in filter(None, (options.json, options.markdown, options.plot)):
        if reason := _unwritable(path):
            parser.error(f"{path} cannot be written: {reason}")
    if options.plot and options.plot.suffix not in plot.SUFFIXES:
        parser.error(f"--plot draws to a file that ends in {', '.join(plot.SUFFIXES)}, not to {options.plot}")
    if not options.timeout > 0:
        parser.error(f"--timeout takes a number of seconds above 0, not {options.timeout:g}")
    return options


def _unwritable(path: Path) -> str:
    """Creates the file's directory. Returns why the file cannot be written, or an empty string."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    if path.is_dir():
        return "it is a directory"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "permission denied"


def _end(number: int, frame: object) -> NoReturn:
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)  # the first signal cleans up
    raise SystemExit(128 + number)


_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Makes signals clean up processes, files and network namespaces, as errors do. Ignored signals stay ignored."""
    before = {each: signal.getsignal(each) for each in _ENDINGS}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, _end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.plot and not plot.available():
        print("muster bench: --plot needs matplotlib: run `pip install matplotlib`", file=sys.stderr)
        return 2
    bench = BENCHES[options.bench]
    rows: list[Row] = []
    table = Table()
    try:
        with _signals_as_exits(), contextlib.closing(cast("Any", bench.run(options))) as measured:
            for row in measured:
                rows.append(row)
                table.add(row)
    except (ValueError, FileNotFoundError, BenchFailedError) as error:
        print(f"muster bench {options.bench}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if options.json:
        write_json(options.json, rows)
    if options.markdown:
        write_markdown(options.markdown, rows)
    if options.plot and rows:
        plot.write_plot(options.plot, rows)
        print(f"drawn: {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
