"""Draws the step of a compiled graph: for each order, what the rank does, and below it the messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from muster.graph._plan.saved import SavedPlan
from muster.graph._plan.schedule import Kind, Timeline

_COLORS = {Kind.COMPUTE: "#8a8a8a", Kind.WAIT: "#c8553d", Kind.START: "#1b6ca8"}
_NAMES = {Kind.COMPUTE: "computing", Kind.WAIT: "waiting", Kind.START: "message on the way"}


def draw(plan: SavedPlan, steps: Mapping[str, Timeline], path: Path) -> None:
    """Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing a plan needs matplotlib: run `pip install matplotlib`") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, panels = plt.subplots(len(steps), figsize=(11, 1.1 * len(steps) + 0.8), sharex=True, squeeze=False)
    for (name, step), panel in zip(steps.items(), panels.flat, strict=True):
        for kind, color in _COLORS.items():
            spans = step.computing
            if kind is not Kind.COMPUTE:
                ends = zip(plan.tasks, step.begin, step.end, strict=True)
                spans = [(begin, end) for task, begin, end in ends if task.kind is kind]
            bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]
            row = 1 if kind is Kind.START else 0
            panel.broken_barh(bars, (row - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.4)
        panel.set_yticks((0, 1), ("rank", "messages"), fontsize=8)
        panel.invert_yaxis()
        panel.set_title(
            f"{name}: {1e3 * step.total:.2f} ms, of which {1e3 * step.exposed:.2f} ms waiting", fontsize=9, loc="left"
        )
    panels.flat[-1].set_xlabel("milliseconds")
    handles = [Patch(color=color, label=_NAMES[kind]) for kind, color in _COLORS.items()]
    figure.legend(handles=handles, ncols=3, frameon=False, fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
