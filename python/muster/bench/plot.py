"""Draws rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from muster.bench.report import Row, format_size

MUSTER, PEER, FLOOR = "#1b6ca8", "#c8553d", "#8a8a8a"
SUFFIXES = (".png", ".pdf", ".svg")


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write_size_plot(path: Path, rows: list[Row]) -> None:
    """Time against size: a line of panels for each operation, a panel for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row.bytes]
    cases, counts = list(dict.fromkeys(row.case for row in rows)), sorted({row.ranks for row in rows})
    size = (5.2 * len(counts), 4.2 * len(cases))
    figure, panels = plt.subplots(len(cases), len(counts), figsize=size, squeeze=False)
    for line, case in zip(panels, cases, strict=True):
        for panel, ranks in zip(line, counts, strict=True):
            _draw_sizes(panel, [row for row in rows if (row.case, row.ranks) == (case, ranks)])
            panel.set_title(f"{case}, {ranks} ranks")
    if rows:
        panels[0][0].set_ylabel(f"{rows[0].metric}, {rows[0].unit}")
        panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
            place = {"textcoords": "offset points", "xytext": (0, -14), "ha": "center"}
            panel.annotate(f"{row.ratio:.1f}x", (row.bytes, row.muster), fontsize=8, color=MUSTER, **place)
    sizes = sorted({row.bytes for row in rows})
    panel.set_xticks(sizes, [format_size(size) for size in sizes], rotation=30, ha="right")
    panel.set_xlabel("bytes")
    panel.minorticks_off()
    panel.grid(True, alpha=0.25)
    panel.margins(y=0.12)


def write_ratio_plot(path: Path, rows: list[Row]) -> None:
    """How many times better than the peer, a bar for each row that has one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.ratio][::-1]
    figure, panel = plt.subplots(figsize=(9, 1.2 + 0.24 * len(shown)))
    labels = [f"{row.case}, {row.ranks:,}: {row.metric}" for row in shown]
    ratios = [row.ratio for row in shown]
    panel.barh(range(len(shown)), ratios, color=[MUSTER if ratio >= 1 else PEER for ratio in ratios])
    for place, row in enumerate(shown):
        panel.annotate(f" {row.ratio:.2f}x", (row.ratio, place), va="center", fontsize=8)
    panel.set_yticks(range(len(shown)), labels, fontsize=8)
    panel.set_xscale("log")
    panel.axvline(1, color=FLOOR, linestyle="--")
    panel.margins(x=0.15, y=0.01)
    panel.set_xlabel(f"times better than {rows[0].peer_name}")
    figure.suptitle(f"{rows[0].bench}: muster beside {rows[0].peer_name}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_scale_plot(path: Path, rows: list[Row], metrics: list[str]) -> None:
    """Each metric against the number of ranks, a line for each case and one for the peer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(metrics), figsize=(5.6 * len(metrics), 4.4), squeeze=False)
    for panel, metric in zip(panels[0], metrics, strict=True):
        shown = [row for row in rows if row.metric == metric]
        lines: dict[str, dict[int, float]] = {}
        for row in shown:
            lines.setdefault(f"muster, {row.case}", {})[row.ranks] = row.muster
            if row.peer:
                lines.setdefault(row.peer_name, {})[row.ranks] = row.peer
        for name, points in lines.items():
            color = {"color": PEER} if not name.startswith("muster") else {}
            panel.loglog(sorted(points), [points[ranks] for ranks in sorted(points)], "o-", label=name, **color)
        panel.set_title(f"{metric}, {shown[0].unit}" if shown else metric)
        panel.set_xlabel("ranks")
        panel.grid(True, alpha=0.25)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
