"""Draws steps: forward, backward and waiting on top, and a line for each bucket below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muster._step import StepReport

_COMPUTING, _FILLING, _REDUCING, _QUEUED, _WAITING = "#8a8a8a", "#c9d8e6", "#1b6ca8", "#e6c9a8", "#c8553d"
_NAMED = 24  # above this number buckets have no labels


def draw(reports: Mapping[str, StepReport], path: Path) -> None:
    """Draws the steps of some ranks, by the ranks' labels. Times are in milliseconds since the first gradient: that of
    the first rank if all reports are of the same step.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing a step needs matplotlib: run `pip install matplotlib`") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    lines = max(len(report.plan) for report in reports.values())
    height = 1.8 + 0.3 * min(lines + 1, 60)
    figure, panels = plt.subplots(len(reports), figsize=(11, height * len(reports)), sharex=True, squeeze=False)
    for (rank, report), panel, later in zip(reports.items(), panels.flat, delays(reports), strict=True):
        _draw_step(panel, rank, report, later)
    panels.flat[-1].set_xlabel("milliseconds from the first gradient")
    colors = {"forward, backward": _COMPUTING, "gradients": _FILLING, "queued": _QUEUED, "reduction": _REDUCING}
    handles = [Patch(color=color, label=name) for name, color in {**colors, "waiting": _WAITING}.items()]
    position = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
    panels.flat[-1].legend(handles=handles, ncols=5, frameon=False, fontsize=8, **position)
    if advice := [f"{rank}{line}" for rank, report in reports.items() for line in report.advice]:
        figure.text(0.01, 0, "\n".join(advice), fontsize=8, color=_WAITING, va="top", wrap=True)
    figure.tight_layout()
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)


def delays(reports: Mapping[str, StepReport]) -> list[float]:
    """Returns the delay of each rank's first gradient after the earliest one, in seconds; zeros for unrelated steps."""
    firsts = [report._begin / 1e9 + report.forward for report in reports.values()]
    longest = max(report.forward + report.backward + report.waiting for report in reports.values())
    together = len({report.step for report in reports.values()}) == 1 and max(firsts) - min(firsts) <= longest
    return [first - min(firsts) if together else 0.0 for first in firsts]


def _draw_step(panel: Any, rank: str, report: StepReport, later: float) -> None:
    def draw_bar(begin: float, end: float, row: int, color: str, **options: str) -> None:
        panel.broken_barh([(1e3 * (later + begin), 1e3 * (end - begin))], (row - 0.4, 0.8), color=color, **options)

    draw_bar(-report.forward, 0.0, 0, _COMPUTING, edgecolor="white")
    draw_bar(0.0, report.backward, 0, _COMPUTING, edgecolor="white")
    draw_bar(report.backward, report.backward + report.waiting, 0, _WAITING)
    for row, bucket in enumerate(report.plan, 1):
        parts = (
            (bucket.first, bucket.full, _FILLING),
            (bucket.full, bucket.started, _QUEUED),
            (bucket.started, bucket.ended, _REDUCING),
        )
        for begin, end, color in parts:
            draw_bar(begin, end, row, color)
    panel.axvline(1e3 * (later + report.backward), color=_WAITING, linestyle=":")
    names = [f"bucket {i}, {b.bytes / 2**20:.1f} MiB" for i, b in enumerate(report.plan)]
    names = [f"{name}, full by {b.last}" if b.last else name for name, b in zip(names, report.plan, strict=True)]
    count = len(names)
    panel.set_yticks(range(count + 1), ["the step", *(names if count <= _NAMED else [""] * count)], fontsize=8)
    panel.invert_yaxis()
    share = f"{1e3 * report.communication:.3g} ms of communication, {report.overlap_ratio:.0%} hidden"
    panel.set_title(f"{rank}step {report.step}: {share}", fontsize=10)
