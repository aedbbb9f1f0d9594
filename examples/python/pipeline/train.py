"""Train a transformer whose layers are spread over the ranks, with different schedules, and compare them.

    muster run --nproc-per-node 2 examples/python/pipeline/train.py [--schedules 1f1b,zero-bubble] [--plot FILE.png]

A batch is cut into microbatches, which pass through the ranks' stages one after the other, forward and backward. The
schedule says in which order. A rank that waits for another one is in a bubble. The table shows the share of the step
that is such waiting: by formula, and as measured. schedules.py makes the schedules, runner.py runs them. The messages
between the ranks are those of torch.distributed (p2p) or remote calls (rpc). The last column is PyTorch's own
torch.distributed.pipelining with the same model and messages. All train the same model, so the losses are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model
import schedules
import torch
import torch.distributed as dist
from runner import Runner
from schedules import Schedule, Timed
from torch import Tensor, nn
from torch.distributed import pipelining
from transports import P2P, Rpc

from muster import rpc

PIECES = 4  # of text in a microbatch
RATE = 1e-3
COLORS = {schedules.FORWARD: "#1b6ca8", schedules.BACKWARD: "#c8553d", schedules.WEIGHTS: "#e6c9a8"}
NAMES = {schedules.FORWARD: "forward", schedules.BACKWARD: "backward", schedules.WEIGHTS: "gradients of weights"}

Step = Callable[[Tensor], tuple[float, list[Timed]]]


def torch_step(schedule: Schedule, stages: dict[int, nn.Sequential]) -> Step:
    """The same schedule in torch.distributed.pipelining. It does not tell the times of its actions."""
    parts = [
        pipelining.PipelineStage(module, number, schedule.stages, torch.device("cpu"))
        for number, module in stages.items()
    ]
    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    kind = kinds[schedule.name]
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    pipeline = kind(parts if several else parts[0], schedule.microbatches, loss_fn=model.loss_of)

    def step(rows: Tensor) -> tuple[float, list[Timed]]:
        losses: list[Tensor] = []
        if 0 in stages:
            pipeline.step(rows[:, :-1], target=rows[:, 1:], losses=losses)
        else:
            pipeline.step(target=rows[:, 1:], losses=losses)
        return sum(loss.item() for loss in losses) / schedule.microbatches, []

    return step


def train(schedule: Schedule, engine: str, steps: int) -> tuple[list[float], float, list[list[Timed]], float]:
    """Returns the loss of each step, the time of a step in seconds, and each rank's actions in the last step with the
    time that this step took on the slowest rank.
    """
    rank = dist.get_rank()
    alphabet, text = model.load_text()
    stages = {
        number: model.make_stage(number, schedule.stages, alphabet)
        for number in range(rank, schedule.stages, schedule.ranks)
    }
    optimizer = torch.optim.AdamW([each for stage in stages.values() for each in stage.parameters()], lr=RATE)
    if engine == "torch":
        run = torch_step(schedule, stages)
    else:
        transport = P2P(schedule.stages, schedule.microbatches) if engine == "p2p" else Rpc()
        run = Runner(schedule, rank, stages, transport).step
    losses, times = [], []
    actions: list[Timed] = []
    for step in range(steps):
        rows = model.batch(text, step, PIECES * schedule.microbatches)
        dist.barrier()
        begun = time.monotonic()
        loss, actions = run(rows)
        taken = torch.tensor([loss, time.monotonic() - begun])
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(taken[0].item())
        times.append(taken[1].item())
    of_ranks: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    dist.all_gather_object(of_ranks, actions)
    return losses, statistics.median(times), of_ranks, times[-1]


def draw(path: Path, panels: dict[str, tuple[Schedule, list[list[Timed]]]]) -> None:
    """For each schedule, the actions by formula, and below them as measured over p2p."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(2 * len(panels), figsize=(11, 3 * len(panels)), squeeze=False)
    for row, (name, (schedule, measured)) in enumerate(panels.items()):
        draw_times(axes[2 * row, 0], f"{name}, by formula", schedule.simulate(), numbered=True)
        draw_times(axes[2 * row + 1, 0], f"{name}, measured, s", measured, numbered=False)
    figure.legend(handles=[Patch(color=COLORS[kind], label=NAMES[kind]) for kind in COLORS], ncols=3, loc="upper right")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path)


def draw_times(axis: Any, title: str, times: list[list[Timed]], numbered: bool) -> None:
    """numbered: each action shows its microbatch."""
    for rank, actions in enumerate(times):
        for one in actions:
            bar = [(one.start, one.end - one.start)]
            axis.broken_barh(
                bar, (rank - 0.4, 0.8), facecolors=COLORS[one.action.kind], edgecolor="white", linewidth=0.5
            )
            if numbered:
                middle = (one.start + one.end) / 2
                axis.text(middle, rank, str(one.action.microbatch), ha="center", va="center", fontsize=6)
    axis.set(yticks=range(len(times)), ylabel="rank")
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a transformer in a pipeline, and compare schedules.")
    parser.add_argument("--schedules", default=",".join(schedules.NAMES), help="some of: %(default)s")
    parser.add_argument("--engines", default="p2p,rpc,torch", help="some of: %(default)s")
    parser.add_argument("--microbatches", type=int, default=8, help="parts of a batch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each case (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the schedules")
    arguments = parser.parse_args()
    names, engines = arguments.schedules.split(","), arguments.engines.split(",")
    if unknown := {*names, *engines} - {*schedules.NAMES, "p2p", "rpc", "torch"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")

    dist.init_process_group("muster")
    rank, size = dist.get_rank(), dist.get_world_size()
    if not 2 <= size <= model.LAYERS // 2:
        parser.error(f"start 2 to {model.LAYERS // 2} processes, not {size}")
    try:
        made = [schedules.make(name, size, arguments.microbatches) for name in names]
    except ValueError as error:
        parser.error(str(error))
    rpc.init_rpc(f"stage{rank}")
    if rank == 0:
        print("schedule      engine   loss, first and last   step     bubble  by formula", flush=True)
    drawn = {}
    for schedule in made:
        for engine in engines:
            losses, seconds, times, last = train(schedule, engine, arguments.steps)
            bubble = ""
            if engine != "torch":
                busy = sum(one.end - one.start for actions in times for one in actions)
                bubble = f"{1 - busy / (size * last):6.1%}  {schedule.expected_bubble():6.1%}"
            if engine == "p2p":
                drawn[schedule.name] = (schedule, times)
            if rank == 0:
                case = f"{schedule.name:12}  {engine:6}   {losses[0]:.4f}  {losses[-1]:.4f}"
                print(f"{case}     {1e3 * seconds:6.1f} ms   {bubble}", flush=True)
    if rank == 0 and arguments.plot:
        draw(arguments.plot, drawn)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
