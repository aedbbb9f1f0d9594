"""The benchmarks that there are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from muster.bench import collectives, ddp, launch, mpi, network, store, storm
from muster.bench.groups import Groups
from muster.bench.report import Row, Table


class Bench(Protocol):
    """What the module of a benchmark has."""

    SUMMARY: str
    PEERS: tuple[str, ...]
    TABLE: type[Table]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> Iterator[Row]:
        """In the process that the user started: yields rows as they are measured."""
        ...

    def write_plot(self, path: Path, rows: list[Row]) -> None: ...

    def write_markdown(self, path: Path, rows: list[Row]) -> None: ...


class RankBench(Bench, Protocol):
    """One that measures inside of the ranks of a group, which muster.bench.ranks starts."""

    def measure(self, groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """In every rank: yields the same at all of them; rank 0's results are reported."""
        ...


RANK_BENCHES: dict[str, RankBench] = {"collectives": collectives, "network": network, "ddp": ddp}
BENCHES: dict[str, Bench] = {**RANK_BENCHES, "mpi": mpi, "launch": launch, "store": store, "storm": storm}
