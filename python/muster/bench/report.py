"""The rows that benchmarks produce, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path


class BenchFailedError(RuntimeError):
    """A benchmark failed. The message names the part that failed, and the reason."""


@dataclass
class Row:
    """One measured case. A figure of 0 was not measured."""

    bench: str
    case: str
    ranks: int
    metric: str
    unit: str
    muster: float
    peer: float
    peer_name: str
    floor: float = 0.0  # the best that the machine can do
    ratio: float = -1.0  # above 1: muster is better; negative: computed from figures of which less is better
    bytes: int = 0
    busbw: float | None = None  # GB/s
    buffers: str = ""  # "warm" or "cold", where that matters
    also: dict[str, float] = field(default_factory=dict)  # figures of other variants, by name
    note: str = ""  # why a figure is missing

    def __post_init__(self) -> None:
        if self.ratio < 0:
            self.ratio = self.peer / self.muster if self.muster else 0.0


def parse_size(text: str) -> int:
    """Parses 8, 64Ki, 1Mi, 2Gi, also with a trailing B. The units are powers of 1024."""
    number = text.removesuffix("B")
    factor = 1
    for suffix, power in (("Ki", 1), ("Mi", 2), ("Gi", 3)):
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), 1024**power
    if not number.isascii() or not number.isdigit() or int(number) == 0:
        raise ValueError(f"{text!r} is not a size; write it as 8, 64Ki, 1Mi or 2Gi")
    return int(number) * factor


def parse_numbers(option: str, text: str, least: int, most: int | None = None) -> list[int]:
    numbers = [int(word) if word.isdigit() else -1 for word in text.split(",")]
    if min(numbers) < least or max(numbers) > (most or max(numbers)):
        bounds = f"from {least} to {most}" if most else f"from {least} on"
        raise ValueError(f"{option} takes numbers {bounds}, as in {least},{2 * least}; not {text!r}")
    return numbers


def parse_names(option: str, text: str, known: Collection[str]) -> list[str]:
    """Returns the names in `text`, which must be in `known`. "all" means all known names."""
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} takes {', '.join(known)}; not {name!r}")
    return names


def format_size(count: int) -> str:
    for suffix, unit in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= unit:
            return f"{count / unit:g} {suffix}"
    return f"{count} B"


def format_figure(value: float | None, unit: str = "") -> str:
    """Returns three significant digits: 0.052, 0.520, 5.20, 13.1, 719, 21,534; empty if it was not measured."""
    if not value:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f} {unit}".strip()


def bus_bandwidth(count: int, factor: float, microseconds: float) -> float | None:
    """Returns GB/s of a message of `count` bytes, as nccl-tests defines it. `factor`: from Operation.bus()."""
    return count * factor / (microseconds * 1e3) if count and microseconds else None


# The benchmarks whose rows have a size and a kind of buffers.
WITH_SIZES = ("collectives", "mpi")
# The names that `also` of a benchmark's rows may have.
ALSO = {
    "collectives": ("shared", "direct"),
    "mpi": ("openmpi", "mpich", "shared", "unrecorded"),
    "ddp": ("stock", "DP", "torch DP"),
    "graph": ("inductor muster", "passes muster", "passes gloo", "muster gloo", "eager muster", "eager gloo", "whole"),
    "processes": ("forkserver",),
}


def _cells(row: Row) -> dict[str, str]:
    """Returns the cells of a row by the names of their columns. All rows of a benchmark have the same columns."""
    cells = {"case": row.case, "ranks": f"{row.ranks:,}"}
    if row.bench in WITH_SIZES:
        cells |= {"bytes": format_size(row.bytes) if row.bytes else "", "buffers": row.buffers}
    cells |= {"metric": row.metric, "muster": format_figure(row.muster, row.unit)}
    cells |= {row.peer_name: format_figure(row.peer, row.unit), "ratio": f"{row.ratio:.2f}x" if row.ratio else ""}
    cells["floor"] = format_figure(row.floor, row.unit)
    cells |= {name: format_figure(row.also.get(name), row.unit) for name in ALSO.get(row.bench, ())}
    if row.bench in (*WITH_SIZES, "network"):
        cells |= {"busbw GB/s": format_figure(row.busbw), "note": row.note}
    return cells


class Table:
    """Prints rows as they arrive, in columns that are wide enough for any figure."""

    def __init__(self) -> None:
        self._widths: list[int] = []  # negative: aligned to the left

    def add(self, row: Row) -> None:
        cells = _cells(row)
        if not self._widths:
            left = {"case": -24 if "buffers" in cells else -40, "metric": -16, "note": -1}
            self._widths = [left.get(name, max(len(name), 7 if name in ("ranks", "ratio") else 12)) for name in cells]
            self._print(list(cells))
        self._print(list(cells.values()))

    def _print(self, cells: list[str]) -> None:
        pairs = zip(cells, self._widths, strict=True)
        print("  ".join(cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in pairs), flush=True)


def write_markdown(path: Path, rows: list[Row]) -> None:
    lines = [list(_cells(row).values()) for row in rows]
    names = list(_cells(rows[0])) if rows else []
    shown = ["| " + " | ".join(cells) + " |" for cells in (names, *lines)]
    shown.insert(1, "|---" * len(names) + "|")
    path.write_text("\n".join(shown) + "\n")


def write_json(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
