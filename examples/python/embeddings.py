"""Train an embedding table that is too large for one process: its rows are sharded over servers.

    muster run --nproc-per-node 4 examples/python/embeddings.py --mode async --checkpoint embeddings

The model predicts the next character of a play of Shakespeare's. Each run of one to five characters has a row in the
table, which it finds by its hash; the scores of the next character are the sum of the rows of the runs that precede it.
So a batch needs few rows of many. A trainer pulls these rows from the servers, and pushes gradients of these rows only.

With `--mode sync` each server waits for the gradients of all trainers and applies their mean. With `--mode async` it
applies each push at once. With `--checkpoint` each server saves its rows from time to time, and a later call of the
same command goes on from there, on any number of servers. If a worker dies, `--max-restarts` of `muster run` does this.
"""

import argparse
import functools
import gzip
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from muster import rpc

DATA = Path(__file__).resolve().parent.parent / "data" / "as_you_like_it.txt.gz"
LONGEST = 5  # characters in a run
ROWS = 1 << 16
BATCH = 512  # characters that each trainer predicts in a step
RATE = 0.5


@functools.cache
def load_text() -> tuple[int, Tensor, Tensor]:
    """The size of the alphabet, the training text and the held-out text, int64[N]."""
    text = gzip.decompress(DATA.read_bytes()).decode("ascii")
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    numbers = torch.tensor([number[character] for character in text])
    return len(alphabet), numbers[: -len(text) // 10], numbers[-len(text) // 10 :]


def row_ids(text: Tensor, places: Tensor) -> Tensor:
    """The rows of the runs that end before each of these places: int64[places, LONGEST]."""
    hashed = torch.zeros_like(places)
    columns = []
    for back in range(1, LONGEST + 1):
        hashed = (hashed * 1_000_003 + text[places - back] + 1) % 2_147_483_647
        columns.append(hashed % ROWS)
    return torch.stack(columns, dim=1)


class Shard:
    """Rows `index`, `index + shards`, `index + 2 * shards` and so on, at a server.

    The methods for trainers are coroutines: they run in one thread, so they need no lock.
    """

    def __init__(self, index: int, shards: int, trainers: int, synchronous: bool) -> None:
        self.index, self.shards, self.trainers, self.synchronous = index, shards, trainers, synchronous
        count = len(range(index, ROWS, shards))
        self.rows = torch.zeros(count, load_text()[0])
        self.squares = torch.zeros(count)  # of Adagrad: the sum of the squares of all gradients of a row
        self.arrived: dict[int, tuple[Tensor, Tensor]] = {}
        self.applied: rpc.Future[None] = rpc.Future()

    async def pull(self, ids: Tensor) -> Tensor:
        return self.rows[ids]  # a copy

    async def push(self, trainer: int, ids: Tensor, gradients: Tensor) -> None:
        """ids: without duplicates. In synchronous mode the call ends when all trainers have pushed."""
        if not self.synchronous:
            self.apply(ids, gradients)
            return
        self.arrived[trainer] = (ids, gradients)
        applied = self.applied
        if len(self.arrived) == self.trainers:
            pushes = [self.arrived[each] for each in sorted(self.arrived)]  # in one order, so that runs can be repeated
            unique, places = torch.cat([ids for ids, _ in pushes]).unique(return_inverse=True)
            total = torch.zeros(len(unique), self.rows.shape[1])
            total.index_add_(0, places, torch.cat([gradients for _, gradients in pushes]))
            self.apply(unique, total / self.trainers)
            self.arrived, self.applied = {}, rpc.Future()
            applied.set_result(None)
        await applied

    def apply(self, ids: Tensor, gradients: Tensor) -> None:
        """One step of Adagrad with one learning rate for each row."""
        self.squares[ids] += gradients.square().mean(dim=1)
        self.rows[ids] -= RATE * gradients / (self.squares[ids].sqrt() + 1e-8)[:, None]

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save((self.rows, self.squares), Path(folder) / f"{self.index}-of-{self.shards}.pt")

    def load(self, folder: str) -> None:
        """The checkpoint may have another number of shards."""
        rows, squares = torch.empty(ROWS, self.rows.shape[1]), torch.empty(ROWS)
        for file in Path(folder).glob("*-of-*.pt"):
            index, shards = (int(number) for number in file.stem.split("-of-"))
            rows[index::shards], squares[index::shards] = torch.load(file)
        self.rows, self.squares = rows[self.index :: self.shards].clone(), squares[self.index :: self.shards].clone()


class Table:
    """All rows, for a worker that uses them. The ids that it is given have no duplicates."""

    def __init__(self, shards: list[rpc.RRef[Shard]]) -> None:
        self.shards = shards

    def split(self, ids: Tensor) -> list[Tensor]:
        """The places of the ids of each shard, in `ids`."""
        owners = ids % len(self.shards)
        return [(owners == index).nonzero()[:, 0] for index in range(len(self.shards))]

    def pull(self, ids: Tensor) -> Tensor:
        places = self.split(ids)
        pulls = [
            shard.rpc_async().pull(ids[own] // len(self.shards)) for shard, own in zip(self.shards, places, strict=True)
        ]
        return torch.cat(rpc.wait_all(pulls))[torch.cat(places).argsort()]

    def push(self, trainer: int, ids: Tensor, gradients: Tensor) -> None:
        rpc.wait_all(
            [
                shard.rpc_async().push(trainer, ids[own] // len(self.shards), gradients[own])
                for shard, own in zip(self.shards, self.split(ids), strict=True)
            ]
        )


def loss_of(rows: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """rows: of the table. places: those that each target needs, int64[targets, LONGEST]."""
    return F.cross_entropy(F.embedding_bag(places, rows, mode="sum"), targets)


def train(table: Table, trainer: int, steps: list[int]) -> float:
    """Runs at a trainer. Returns the mean loss."""
    _, text, _ = load_text()
    total = 0.0
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + trainer)
        batch = torch.randint(LONGEST, len(text), (BATCH,), generator=generator)
        ids, places = row_ids(text, batch).unique(return_inverse=True)
        rows = table.pull(ids).requires_grad_()
        loss = loss_of(rows, places, text[batch])
        table.push(trainer, ids, *torch.autograd.grad(loss, [rows]))
        total += loss.item()
    return total / len(steps)


def held_out_loss(table: Table) -> float:
    _, _, text = load_text()
    batch = torch.arange(LONGEST, len(text))
    ids, places = row_ids(text, batch).unique(return_inverse=True)
    return loss_of(table.pull(ids), places, text[batch]).item()


class Checkpoint:
    """A folder with a folder for each step, and a file that names the last one that is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.latest = folder, folder / "latest"

    def save(self, shards: list[rpc.RRef[Shard]], step: int) -> None:
        """The trainers must be idle. The previous checkpoint counts until all servers have saved their rows."""
        before, new = self.step(), self.folder / str(step)
        shutil.rmtree(new, ignore_errors=True)  # a run that died may have left a part of it
        rpc.wait_all([shard.rpc_async().save(str(new)) for shard in shards])
        partial = self.latest.with_suffix(".new")
        partial.write_text(str(step))
        partial.replace(self.latest)
        shutil.rmtree(self.folder / str(before), ignore_errors=True)

    def step(self) -> int:
        return int(self.latest.read_text()) if self.latest.exists() else 0

    def load(self, shards: list[rpc.RRef[Shard]]) -> None:
        rpc.wait_all([shard.rpc_async().load(str(self.folder / str(self.step()))) for shard in shards])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lead(arguments: argparse.Namespace, trainers: int) -> None:
    """Rank 0: makes the shards, and starts the trainers. They stop after some steps, so that the rows can be saved."""
    servers, synchronous = arguments.servers, arguments.mode == "sync"
    shards = [
        rpc.remote(f"server{index}", Shard, args=(index, servers, trainers, synchronous)) for index in range(servers)
    ]
    table = Table(shards)
    checkpoint = Checkpoint(arguments.checkpoint) if arguments.checkpoint else None
    begun = checkpoint.step() if checkpoint else 0
    if checkpoint and begun:
        checkpoint.load(shards)
    print(f"begins at step {begun}: held-out loss {held_out_loss(table):.4f}", flush=True)
    for step in range(begun, arguments.steps, arguments.round):
        steps = list(range(step, min(step + arguments.round, arguments.steps)))
        calls = [rpc.rpc_async(f"trainer{each}", train, (table, each, steps), timeout=0) for each in range(trainers)]
        if arguments.fail_at in steps and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            rpc.rpc_one_way(f"server{servers - 1}", die)
        loss = sum(rpc.wait_all(calls)) / trainers
        if checkpoint:
            checkpoint.save(shards, steps[-1] + 1)
        print(
            f"step {steps[-1] + 1:4}/{arguments.steps}: loss {loss:.4f}  held-out loss {held_out_loss(table):.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an embedding table that is sharded over servers.")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--servers", type=int, help="the others are trainers (default: half of the processes)")
    parser.add_argument("--steps", type=int, default=600, help="batches of each trainer (default: 600)")
    parser.add_argument("--round", type=int, default=100, help="steps between two checkpoints (default: 100)")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, if it is there, and to write")
    parser.add_argument("--fail-at", type=int, help="the step near which the last server dies, once")
    arguments = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    arguments.servers = arguments.servers or size // 2
    trainers = size - arguments.servers
    if arguments.servers < 1 or trainers < 1:
        parser.error("there must be a server and a trainer: start at least two processes")
    rpc.init_rpc(f"server{rank}" if rank < arguments.servers else f"trainer{rank - arguments.servers}")
    if rank == 0:
        lead(arguments, trainers)
    rpc.shutdown()


if __name__ == "__main__":
    main()
