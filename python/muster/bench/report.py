"""What every benchmark hands back, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class BenchFailedError(RuntimeError):
    """A benchmark could not be carried out; the message says which part failed, and how."""


@dataclass
class Row:
    """One measured case. `ratio` > 1 means that muster is better. `floor`: what the machine needs at the least."""

    bench: str
    case: str
    ranks: int
    bytes: int
    metric: str
    unit: str
    muster: float
    peer: float
    peer_name: str
    ratio: float
    floor: float
    busbw: float | None = None  # GB/s


def parse_size(text: str) -> int:
    """8, 64Ki, 1Mi, 2Gi, also with a trailing B: powers of 1024."""
    number = text.removesuffix("B")
    factor = 1
    for suffix, power in (("Ki", 1), ("Mi", 2), ("Gi", 3)):
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), 1024**power
    if not number.isascii() or not number.isdigit() or int(number) == 0:
        raise ValueError(f"{text!r} is not a size; write it as 8, 64Ki, 1Mi or 2Gi")
    return int(number) * factor


def format_size(count: int) -> str:
    for suffix, unit in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= unit:
            return f"{count / unit:g} {suffix}"
    return f"{count} B"


def format_figure(value: float) -> str:
    """Three digits that matter: 0.52, 13.1, 719, 21,534."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


class Table(Protocol):
    """Prints rows as they come, in columns wide enough for any figure."""

    def __init__(self, first: Row) -> None: ...

    def add(self, row: Row) -> None: ...


class SizeTable:
    """One metric over numbers of ranks and bytes."""

    def __init__(self, first: Row) -> None:
        unit = first.unit
        names = ["ranks", "bytes", f"muster {unit}", f"{first.peer_name} {unit}", "ratio", f"floor {unit}"]
        names += ["busbw GB/s"]
        self._widths = [max(len(name), 10) for name in names]
        print(_line(names, self._widths))

    def add(self, row: Row) -> None:
        cells = [str(row.ranks), format_size(row.bytes), format_figure(row.muster), format_figure(row.peer)]
        cells += [f"{row.ratio:.1f}x", format_figure(row.floor), "" if row.busbw is None else format_figure(row.busbw)]
        print(_line(cells, self._widths), flush=True)


class CaseTable:
    """Cases of different kinds, each row with a metric and a unit of its own. A figure of 0 was not measured."""

    def __init__(self, first: Row) -> None:
        names = ["case", "ranks", "metric", "unit", "muster", first.peer_name, "ratio", "floor"]
        self._widths = [-40, 7, -16, -8, 11, max(len(first.peer_name), 11), 8, 11]
        print(_line(names, self._widths))

    def add(self, row: Row) -> None:
        cells = [row.case, f"{row.ranks:,}", row.metric, row.unit]
        cells += [format_figure(value) if value else "" for value in (row.muster, row.peer)]
        cells += [f"{row.ratio:.2f}x" if row.ratio else "", format_figure(row.floor) if row.floor else ""]
        print(_line(cells, self._widths), flush=True)


def _line(cells: list[str], widths: list[int]) -> str:
    """Cells to the right of their columns, or to the left where a width is negative."""
    padded = (cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded)


def write_markdown(path: Path, rows: list[Row]) -> None:
    """A table for a document. A figure of 0 was not measured."""
    names = ["case", "ranks", "metric", "muster", rows[0].peer_name if rows else "peer", "ratio", "floor"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        figures = [f"{format_figure(value)} {row.unit}".strip() if value else "" for value in (row.muster, row.peer)]
        cells = [row.case, f"{row.ranks:,}", row.metric, *figures, f"{row.ratio:.2f}x" if row.ratio else ""]
        floor = f"{format_figure(row.floor)} {row.unit}".strip() if row.floor else ""
        lines.append("| " + " | ".join([*cells, floor]) + " |")
    path.write_text("\n".join(lines) + "\n")


def write_json(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
