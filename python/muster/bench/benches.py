"""The benchmarks that there are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Protocol

from muster.bench import all_reduce
from muster.bench.report import Row


class Bench(Protocol):
    """What the module of a benchmark has."""

    SUMMARY: str
    PEERS: tuple[str, ...]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> Iterator[Row]:
        """In the process that the user started: yields rows as they are measured."""
        ...

    def measure(self, groups: dict[str, Any], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """In every rank: yields the same at all of them; rank 0's results are reported."""
        ...


BENCHES: dict[str, Bench] = {"all_reduce": all_reduce}
