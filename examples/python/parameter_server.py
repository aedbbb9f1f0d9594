"""Train on handwritten digits with a parameter server: rank 0 holds the model, the other ranks train it.

    muster run --nproc-per-node 4 examples/python/parameter_server.py --mode async

A trainer pulls the weights, computes gradients on a batch of its share of the images, and pushes them to the server.
With `--mode sync` the server waits for the gradients of all trainers and applies their mean: every step is a step of
one large batch. With `--mode async` it applies each push at once, so no trainer waits for a slower one.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster import rpc

DATA = Path(__file__).resolve().parent.parent / "data" / "digits.csv.gz"
HELD_OUT = 360
BATCH = 32


def load_digits() -> tuple[Tensor, Tensor]:
    """The images, float32[N, 64] in 0..1, and their digits, int64[N], in the same random order at all ranks."""
    table = torch.from_numpy(np.loadtxt(DATA, delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :64] / 16, table[:, 64].long()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class ParameterServer:
    """Holds the model. Its methods for trainers are coroutines: they run in one thread, so they need no lock."""

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)

    async def pull(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    async def push(self, gradients: list[Tensor]) -> None:
        self.apply(gradients)

    def apply(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def accuracy(self) -> float:
        images, digits = load_digits()
        right = self.model(images[:HELD_OUT]).argmax(dim=1) == digits[:HELD_OUT]
        return right.float().mean().item()


class SynchronousServer(ParameterServer):
    """Applies the mean of the gradients of all trainers. A push is answered when all have arrived."""

    def __init__(self, trainers: int) -> None:
        super().__init__(trainers)
        self.arrived: list[list[Tensor]] = []
        self.applied: rpc.Future[None] = rpc.Future()

    async def push(self, gradients: list[Tensor]) -> None:
        self.arrived.append(gradients)
        applied = self.applied
        if len(self.arrived) == self.trainers:
            self.apply([torch.stack(each).mean(dim=0) for each in zip(*self.arrived, strict=True)])
            self.arrived, self.applied = [], rpc.Future()
            applied.set_result(None)
        await applied


def train(server: rpc.RRef[ParameterServer], trainer: int, trainers: int, steps: int) -> float:
    """Runs at a trainer. Returns the loss of its last batch."""
    images, digits = (column[HELD_OUT:][trainer::trainers] for column in load_digits())
    model = make_model()
    parameters = list(model.parameters())
    loss = torch.zeros(())
    for _ in range(steps):
        with torch.no_grad():
            for parameter, weights in zip(parameters, server.rpc_sync().pull(), strict=True):
                parameter.copy_(weights)
        batch = torch.randint(len(images), (BATCH,))
        loss = F.cross_entropy(model(images[batch]), digits[batch])
        server.rpc_sync().push(list(torch.autograd.grad(loss, parameters)))
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with a parameter server.")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--steps", type=int, default=500, help="batches of each trainer (default: 500)")
    arguments = parser.parse_args()

    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if trainers == 0:
        parser.error("a server needs trainers: start at least two processes")
    torch.manual_seed(rank)
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}")
    if rank == 0:
        server = SynchronousServer(trainers) if arguments.mode == "sync" else ParameterServer(trainers)
        reference = rpc.RRef(server)
        calls = [
            rpc.rpc_async(f"trainer{number + 1}", train, (reference, number, trainers, arguments.steps), timeout=0)
            for number in range(trainers)
        ]
        for number, loss in enumerate(rpc.wait_all(calls), start=1):
            print(f"trainer{number}: the loss of the last batch is {loss:.3f}")
        print(f"{arguments.mode}: held-out accuracy {server.accuracy():.2%}")
    rpc.shutdown()


if __name__ == "__main__":
    main()
