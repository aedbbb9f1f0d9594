"""Train a character-level transformer on a play of Shakespeare's, with one process for each rank, and write some lines
with it.

    muster run --nproc-per-node 2 examples/python/chars.py [--steps N] [--checkpoint FILE]

muster.nn.DistributedDataParallel averages the gradients; it is used as torch's. With a checkpoint, a later call of the
same command continues where the first one stopped, on any number of ranks. examples/cpp/chars.cpp is the same in C++.
"""

import argparse
import gzip
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from muster.nn import DistributedDataParallel
from torch import Tensor, nn

DATA = Path(__file__).resolve().parent.parent / "data" / "as_you_like_it.txt.gz"
CONTEXT = 64  # characters that the model looks back on
WIDTH = 96
HEADS = 4
LAYERS = 2
BATCH = 32  # pieces of text in a step, over all ranks, each of which has at least one
PEAK_RATE = 3e-3
REPORT = 50  # steps between two lines of output


def load_text(path: Path) -> tuple[str, Tensor, Tensor]:
    """Return the alphabet, the training text and the held-out text, int64[N]: each character is its index in it."""
    text = gzip.decompress(path.read_bytes()).decode("ascii")
    alphabet = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(alphabet)}
    numbers = torch.tensor([number[character] for character in text])
    held_out = len(text) // 10
    return alphabet, numbers[:-held_out], numbers[-held_out:]


class Block(nn.Module):
    """Attention to the earlier characters, then a small network for each character; each adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Input and output: float32[batch, length, WIDTH]."""
        batch, length, _ = hidden.shape
        heads = self.query_key_value(self.before_attention(hidden)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output = hidden + self.joined(attended.transpose(1, 2).reshape(hidden.shape))
        return output + self.network(output)


class Transformer(nn.Module):
    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.scores = nn.Linear(WIDTH, alphabet)

    def forward(self, text: Tensor) -> Tensor:
        """Turn int64[batch, length] into scores of the next character: float32[batch, length, alphabet]."""
        place = self.places(torch.arange(text.shape[1]))
        return self.scores(self.blocks(self.characters(text) + place))


def stretches(text: Tensor, starts: Tensor) -> Tensor:
    """The pieces of text that begin at `starts`: int64[starts, CONTEXT + 1]."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def training_batch(text: Tensor, step: int) -> Tensor:
    """This rank's part of a step's pieces. All ranks draw the same pieces, and the step alone determines them."""
    generator = torch.Generator().manual_seed(step)
    rank, size = dist.get_rank(), dist.get_world_size()
    starts = torch.randint(len(text) - CONTEXT, (max(BATCH, size),), generator=generator)
    return stretches(text, starts[rank::size])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor) -> float:
    """The mean loss over this rank's pieces of the held-out text, averaged over the ranks."""
    starts = torch.arange(0, len(text) - CONTEXT, 2 * CONTEXT)[dist.get_rank() :: dist.get_world_size()]
    return mean_over_ranks(loss_of(model, stretches(text, starts)))


@torch.no_grad()
def write_lines(model: nn.Module, alphabet: str, characters: int) -> str:
    torch.manual_seed(1)
    numbers = torch.tensor([alphabet.index("\n")])
    for _ in range(characters):
        scores = model(numbers[None, -CONTEXT:])[0, -1]
        numbers = torch.cat([numbers, torch.softmax(scores / 0.8, 0).multinomial(1)])
    return "".join(alphabet[number] for number in numbers[1:].tolist())


def rate_at(step: int, steps: int) -> float:
    """The learning rate: it rises for a twentieth of the steps, then falls along a cosine."""
    done = step / steps
    return PEAK_RATE * min(20 * done, 0.5 * (1 + math.cos(math.pi * done)))


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Rank 0 writes the file, then renames it, so a job that is killed leaves this checkpoint or the previous one."""
    if dist.get_rank() == 0:
        partial = path.with_name(path.name + ".partial")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
        partial.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Rank 0 reads the checkpoint, if there is one, and sends it to all ranks. Returns the number of steps in it."""
    found = [torch.load(path) if dist.get_rank() == 0 and path.exists() else None]
    dist.broadcast_object_list(found)
    state = found[0]
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character-level transformer with DistributedDataParallel.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint", type=Path, help="to go on from, if it is there, and to write")
    arguments = parser.parse_args()

    dist.init_process_group("muster")
    alphabet, training, held_out = load_text(DATA)
    torch.manual_seed(0)
    model = Transformer(len(alphabet))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=PEAK_RATE, weight_decay=0.1)
    begun = load(arguments.checkpoint, model, optimizer) if arguments.checkpoint else 0
    for step in range(begun + 1, arguments.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, arguments.steps)
        optimizer.zero_grad()
        loss = loss_of(ddp, training_batch(training, step))
        loss.backward()  # averages the gradients over the ranks while it runs
        nn.utils.clip_grad_norm_(ddp.parameters(), 1)
        optimizer.step()
        if step % REPORT and step != arguments.steps:
            continue
        if arguments.checkpoint:
            save(arguments.checkpoint, model, optimizer, step)
        line = f"loss {mean_over_ranks(loss):.3f}  held-out loss {held_out_loss(model, held_out):.3f}"
        if dist.get_rank() == 0:
            print(f"step {step:4}/{arguments.steps} {line}", flush=True)
    if dist.get_rank() == 0:
        print(f"\n{write_lines(model, alphabet, 400)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
