"""What every benchmark hands back, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
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
    buffers: str = ""  # "warm" or "cold", where that is a question
    also: dict[str, float] = field(default_factory=dict)  # what other ways of muster took, by their names
    note: str = ""  # why something was not measured


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
    """Three digits that matter: 0.052, 0.520, 5.20, 13.1, 719, 21,534."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


class Table(Protocol):
    """Prints rows as they come, in columns wide enough for any figure."""

    def __init__(self, first: Row) -> None: ...

    def add(self, row: Row) -> None: ...


# What a row may have in `also`, by benchmark.
_ALSO = {"collectives": ("shared", "direct"), "mpi": ("openmpi", "mpich", "shared", "unrecorded"), "ddp": ("stock",)}
_BUS_NAME = "busbw GB/s"
_WITH_BUS = ("collectives", "mpi", "network")  # benchmarks of messages


def bus_bandwidth(count: int, factor: float, microseconds: float) -> float | None:
    """GB/s of a message of `count` bytes, as nccl-tests defines it: its `factor` is the operation's Operation.bus()."""
    return count * factor / (microseconds * 1e3) if count and microseconds else None


_FIRST_NAMES = ("operation", "ranks", "bytes", "buffers")


class SizeTable:
    """One metric over operations, numbers of ranks and bytes. A figure that was not measured stays empty."""

    def __init__(self, first: Row) -> None:
        names = _size_names(first)
        self._widths = [-22, 5, 9, 7, *(max(len(name), 10) for name in names[4:-1]), -1]
        print(_line(names, self._widths))

    def add(self, row: Row) -> None:
        print(_line(_size_cells(row), self._widths), flush=True)


def _size_names(row: Row) -> list[str]:
    timed = [f"{name} {row.unit}" for name in ("muster", row.peer_name)]
    also = [f"{name} {row.unit}" for name in _ALSO[row.bench]]
    return [*_FIRST_NAMES, *timed, "ratio", f"floor {row.unit}", "of floor", _BUS_NAME, *also, "note"]


def _size_cells(row: Row) -> list[str]:
    size = format_size(row.bytes) if row.bytes else row.metric.replace("time", "")
    cells = [row.case, str(row.ranks), size, row.buffers, _figure(row.muster), _figure(row.peer)]
    cells += [f"{row.ratio:.1f}x" if row.ratio else "", _figure(row.floor)]
    cells += [f"{row.floor / row.muster:.0%}" if row.floor and row.muster else "", _figure(row.busbw)]
    return [*cells, *(_figure(row.also.get(name)) for name in _ALSO[row.bench]), row.note]


def _figure(value: float | None) -> str:
    return format_figure(value) if value else ""


class CaseTable:
    """Cases of different kinds, each row with a metric and a unit of its own. A figure of 0 was not measured."""

    def __init__(self, first: Row) -> None:
        self._also, self._bus = _ALSO.get(first.bench, ()), first.bench in _WITH_BUS
        names = ["case", "ranks", "metric", "unit", "muster", first.peer_name, "ratio", "floor", *self._also]
        names += [_BUS_NAME] * self._bus
        self._widths = [-40, 7, -16, -8, 11, max(len(first.peer_name), 11), 8, *(11 for _ in names[7:])]
        print(_line(names, self._widths))

    def add(self, row: Row) -> None:
        cells = [row.case, f"{row.ranks:,}", row.metric, row.unit]
        cells += [format_figure(value) if value else "" for value in (row.muster, row.peer)]
        cells += [f"{row.ratio:.2f}x" if row.ratio else "", format_figure(row.floor) if row.floor else ""]
        cells += [_figure(row.also.get(name)) for name in self._also]
        cells += [_figure(row.busbw)] * self._bus
        print(_line(cells, self._widths), flush=True)


def _line(cells: list[str], widths: list[int]) -> str:
    """Cells to the right of their columns, or to the left where a width is negative."""
    padded = (cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded)


def write_markdown(path: Path, rows: list[Row]) -> None:
    """A table for a document. A figure of 0 was not measured."""
    also = _ALSO.get(rows[0].bench, ()) if rows else ()
    bus = bool(rows) and rows[0].bench in _WITH_BUS
    names = ["case", "ranks", "metric", "muster", rows[0].peer_name if rows else "peer", "ratio", "floor", *also]
    names += [_BUS_NAME] * bus
    lines = []
    for row in rows:
        muster, peer, floor, *others = (
            f"{format_figure(value)} {row.unit}".strip() if value else ""
            for value in (row.muster, row.peer, row.floor, *(row.also.get(name) for name in also))
        )
        ratio = f"{row.ratio:.2f}x" if row.ratio else ""
        lines.append([row.case, f"{row.ranks:,}", row.metric, muster, peer, ratio, floor, *others])
        lines[-1] += [_figure(row.busbw)] * bus
    _write_table(path, names, lines)


def write_size_markdown(path: Path, rows: list[Row]) -> None:
    """The table that SizeTable prints."""
    _write_table(path, _size_names(rows[0]) if rows else [], [_size_cells(row) for row in rows])


def _write_table(path: Path, names: list[str], lines: list[list[str]]) -> None:
    shown = ["| " + " | ".join(cells) + " |" for cells in (names, *lines)]
    shown.insert(1, "|---" * len(names) + "|")
    path.write_text("\n".join(shown) + "\n")


def write_json(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
