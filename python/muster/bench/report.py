"""What every benchmark hands back, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


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


class Table:
    """Prints rows as they come, in columns wide enough for any figure."""

    def __init__(self, peer_name: str, unit: str) -> None:
        names = ["ranks", "bytes", f"muster {unit}", f"{peer_name} {unit}", "ratio", f"floor {unit}", "busbw GB/s"]
        self._widths = [max(len(name), 10) for name in names]
        print(self._line(names))

    def add(self, row: Row) -> None:
        cells = [str(row.ranks), format_size(row.bytes), format_figure(row.muster), format_figure(row.peer)]
        cells += [f"{row.ratio:.1f}x", format_figure(row.floor), "" if row.busbw is None else format_figure(row.busbw)]
        print(self._line(cells), flush=True)

    def _line(self, cells: list[str]) -> str:
        return "  ".join(cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True))


def write_json(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
