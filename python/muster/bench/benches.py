"""The list of benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from muster.bench import collectives, ddp, launch, mpi, network, startup_load, store
from muster.bench.report import Row


class Bench(Protocol):
    """The attributes of a benchmark's module. Modules that measure in ranks also have measure(); see worker.py."""

    SUMMARY: str
    PEERS: tuple[str, ...]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> Iterator[Row]: ...

    def write_plot(self, path: Path, rows: list[Row]) -> None: ...


BENCHES: dict[str, Bench] = {
    "collectives": collectives,
    "network": network,
    "ddp": ddp,
    "mpi": mpi,
    "launch": launch,
    "store": store,
    "startup-load": startup_load,
}
