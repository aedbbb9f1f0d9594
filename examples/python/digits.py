"""Train a small convolutional network on handwritten digits, with one process for each rank.

    muster run --nproc-per-node 2 examples/python/digits.py

A stock PyTorch script: torch's DistributedDataParallel over the backend "muster", without an import of muster.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DATA = Path(__file__).resolve().parent.parent / "data" / "digits.csv.gz"
HELD_OUT = 360


def load_digits(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """The training and the held-out images: float32[N, 1, 8, 8] in 0..1, with their digits, int64[N]."""
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    images = (table[order, :64] / 16).reshape(-1, 1, 8, 8)
    digits = table[order, 64].long()
    return TensorDataset(images[HELD_OUT:], digits[HELD_OUT:]), TensorDataset(images[:HELD_OUT], digits[:HELD_OUT])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Progress:
    """Rank 0 draws a progress bar on a terminal; without a terminal, it prints only one line for each epoch."""

    def __init__(self, epochs: int, steps: int) -> None:
        self.epochs, self.steps = epochs, steps
        self.speaks = dist.get_rank() == 0
        # Under a launcher, standard output is a pipe. The launcher sets MUSTER_TERMINAL if it writes to a terminal.
        self.draws = self.speaks and (sys.stdout.isatty() or os.environ.get("MUSTER_TERMINAL") == "1")

    def step(self, epoch: int, step: int, loss: float) -> None:
        if self.draws:
            filled = 30 * step // self.steps
            bar = "█" * filled + "·" * (30 - filled)
            print(f"\repoch {epoch:2}/{self.epochs} {bar} loss {loss:.4f}", end="", flush=True)

    def epoch(self, epoch: int, loss: float, accuracy: float) -> None:
        if self.speaks:
            bar = "█" * 30 + " " if self.draws else ""
            start = "\r" if self.draws else ""
            line = f"epoch {epoch:2}/{self.epochs} {bar}loss {loss:.4f}  held-out accuracy {accuracy:6.2%}"
            print(start + line, flush=True)


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader[Any], epoch: int, progress: Progress
) -> float:
    """Make one pass over this rank's share of the data. Returns the mean loss of all ranks."""
    model.train()
    losses: list[Tensor] = []
    for step, (images, digits) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), digits)
        loss.backward()  # DDP averages the gradients over the ranks while this runs
        optimizer.step()
        losses.append(loss.detach())
        progress.step(epoch, step, loss.item())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@torch.no_grad()
def accuracy_of(model: nn.Module, held_out: TensorDataset) -> float:
    """Each rank tests every size-th image; the counts are summed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, digits = (column[rank::size] for column in held_out.tensors)
    model.eval()
    right = (model(images).argmax(dim=1) == digits).sum()
    dist.all_reduce(right)
    return right.item() / len(held_out)


def save_curve(path: Path, losses: list[float], accuracies: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    epochs = range(1, len(losses) + 1)
    figure, left = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    right = left.twinx()
    left.plot(epochs, losses, color="#c44e52", marker="o", markersize=4)
    right.plot(epochs, accuracies, color="#2f6690", marker="s", markersize=4)
    left.set_ylabel("training loss", color="#c44e52")
    right.set_ylabel("held-out accuracy", color="#2f6690")
    left.set_ylim(bottom=0)
    right.set_ylim(min(0.8, *accuracies), 1.005)
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlabel("epoch")
    left.grid(alpha=0.25)
    for axes in (left, right):
        axes.spines["top"].set_visible(False)
    ranks = dist.get_world_size()
    figure.suptitle(f"Handwritten digits on {ranks} rank{'s' if ranks > 1 else ''}: {accuracies[-1]:.1%} held out")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DistributedDataParallel.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images a step, over all ranks (default: 64)")
    parser.add_argument("--backend", default="muster", help="process-group backend (default: muster)")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--plot", type=Path, default=Path("out/digits.png"), help="where the curve goes")
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    training, held_out = load_digits(arguments.data)
    sampler: DistributedSampler[Any] = DistributedSampler(training, seed=0)
    batches = DataLoader(training, batch_size=max(1, arguments.batch // size), sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, epochs=arguments.epochs, steps_per_epoch=1)
    progress = Progress(arguments.epochs, len(batches))

    losses, accuracies = [], []
    began = time.perf_counter()
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        losses.append(train_epoch(model, optimizer, batches, epoch, progress))
        accuracies.append(accuracy_of(model, held_out))
        schedule.step()
        progress.epoch(epoch, losses[-1], accuracies[-1])
    seconds = time.perf_counter() - began
    if rank == 0:
        print(f"trained on {len(training)} images with {size} ranks in {seconds:.1f} s", flush=True)
        save_curve(arguments.plot, losses, accuracies)
        print(f"held-out accuracy {accuracies[-1]:.2%}; training curve in {arguments.plot}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
