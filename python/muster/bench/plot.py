"""Draws the rows of benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.bench.report import WITH_SIZES, Row, format_size

MUSTER, PEER, FLOOR = "#1b6ca8", "#c8553d", "#8a8a8a"
SUFFIXES = (".png", ".pdf", ".svg")


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def _panels(path: Path, lines: int, columns: int, width: float, height: float) -> Iterator[Any]:
    """Yields an array of panels, each of this size, and saves them when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(lines, columns, figsize=(width * columns, height * lines), squeeze=False)
    yield panels
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_plot(path: Path, rows: list[Row]) -> None:
    """Draws times by size if the table has a column for sizes, else ratios."""
    (_write_size_plot if rows[0].bench in WITH_SIZES else _write_ratio_plot)(path, rows)


def _write_size_plot(path: Path, rows: list[Row]) -> None:
    """Draws time by size: a line of panels for each operation, a panel for each number of ranks."""
    rows = [row for row in rows if row.bytes]
    cases, counts = list(dict.fromkeys(row.case for row in rows)), sorted({row.ranks for row in rows})
    with _panels(path, len(cases), len(counts), 5.2, 4.2) as panels:
        for line, case in zip(panels, cases, strict=True):
            for panel, ranks in zip(line, counts, strict=True):
                _draw_sizes(panel, [row for row in rows if (row.case, row.ranks) == (case, ranks)])
                panel.set_title(f"{case}, {ranks} ranks")
        if rows:
            panels[0][0].set_ylabel(f"{rows[0].metric}, {rows[0].unit}")
            panels[0][0].legend(frameon=False)


def _draw_sizes(panel: Any, rows: list[Row]) -> None:
    for buffers, style in (("", "o-"), ("warm", "o-"), ("cold", "x:")):
        shown = sorted((row for row in rows if row.buffers == buffers), key=lambda row: row.bytes)
        if not shown:
            continue
        suffix = ", cold" if buffers == "cold" else ""
        lines = ((shown[0].peer_name, "peer", PEER), ("muster", "muster", MUSTER), ("floor", "floor", FLOOR))
        for name, field, color in lines:
            points = [(row.bytes, value) for row in shown if (value := getattr(row, field))]
            if points:
                panel.loglog(*zip(*points, strict=True), style, color=color, label=name + suffix)
    for row in rows:
        if row.ratio and row.buffers != "cold":
            position = {"textcoords": "offset points", "xytext": (0, -14), "ha": "center"}
            panel.annotate(f"{row.ratio:.1f}x", (row.bytes, row.muster), fontsize=8, color=MUSTER, **position)
    sizes = sorted({row.bytes for row in rows})
    panel.set_xticks(sizes, [format_size(size) for size in sizes], rotation=30, ha="right")
    panel.set_xlabel("bytes")
    panel.minorticks_off()
    panel.grid(True, alpha=0.25)
    panel.margins(y=0.12)


def _write_ratio_plot(path: Path, rows: list[Row]) -> None:
    """Draws how many times better than the peer muster is: a bar for each row with a ratio."""
    shown = [row for row in rows if row.ratio][::-1]
    with _panels(path, 1, 1, 9, 1.4 + 0.24 * len(shown)) as ((panel,),):
        ratios = [row.ratio for row in shown]
        panel.barh(range(len(shown)), ratios, color=[MUSTER if ratio >= 1 else PEER for ratio in ratios])
        for index, row in enumerate(shown):
            panel.annotate(f" {row.ratio:.2f}x", (row.ratio, index), va="center", fontsize=8)
        labels = [f"{row.case}, {row.ranks:,}: {row.metric}" for row in shown]
        panel.set_yticks(range(len(shown)), labels, fontsize=8)
        panel.set_xscale("log")
        panel.axvline(1, color=FLOOR, linestyle="--")
        panel.margins(x=0.15, y=0.01)
        panel.set_xlabel(f"times better than {rows[0].peer_name}")
        panel.set_title(f"{rows[0].bench}: muster and {rows[0].peer_name}")
