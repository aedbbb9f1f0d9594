"""The list of benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from muster.bench import collectives, ddp, launch, mpi, network, startup_load, store
from muster.bench.groups import Groups
from muster.bench.report import Row


class Bench(Protocol):
    """What the module of a benchmark defines."""

    SUMMARY: str
    PEERS: tuple[str, ...]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> Iterator[Row]:
        """Yields rows as they are measured. Runs in the process that the user started."""
        ...

    def write_plot(self, path: Path, rows: list[Row]) -> None: ...


class RankBench(Bench, Protocol):
    """A benchmark that measures in the ranks of a group, which muster.bench.ranks starts."""

    def measure(self, groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the same at all ranks; the results of rank 0 are reported."""
        ...


RANK_BENCHES: dict[str, RankBench] = {"collectives": collectives, "network": network, "ddp": ddp}
BENCHES: dict[str, Bench] = {
    **RANK_BENCHES,
    "mpi": mpi,
    "launch": launch,
    "store": store,
    "startup-load": startup_load,
}
