"""Prepare a trained model for serving: split it over the ranks, and compile one step of writing for a C++ program.

    muster run --nproc-per-node 2 examples/python/chars.py --checkpoint out/chars.pt
    muster run --nproc-per-node 2 examples/python/decoder.py out/chars.pt out

Each rank has some heads of each attention, and a part of each network (tensor parallelism). It makes the file
out/rankN.pt2. examples/cpp/decoder.cpp serves these files to clients.
"""

import argparse
from pathlib import Path

import muster.graph
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chars import CONTEXT, DATA, HEADS, WIDTH, Block, Transformer, load_text
from torch import Tensor, nn


def rows_of(layer: nn.Module, rank: int, size: int, groups: int = 1) -> nn.Linear:
    """The layer that computes this rank's part of the output. The output has `groups` groups, each divided by rank."""
    assert isinstance(layer, nn.Linear)
    part = nn.Linear(layer.in_features, layer.out_features // size)
    for own, whole in ((part.weight, layer.weight), (part.bias, layer.bias)):
        own.copy_(whole.unflatten(0, (groups, size, -1))[:, rank].flatten(0, 1))
    return part


def columns_of(layer: nn.Module, rank: int, size: int) -> nn.Linear:
    """The layer that computes this rank's addend of the output, from its part of the input. Rank 0 adds the bias."""
    assert isinstance(layer, nn.Linear)
    part = nn.Linear(layer.in_features // size, layer.out_features)
    part.weight.copy_(layer.weight.unflatten(1, (size, -1))[:, rank])
    part.bias.copy_(layer.bias * (rank == 0))
    return part


class PartOfBlock(nn.Module):
    """This rank's part of a Block, for one character at a time. It keeps the keys and values of the earlier ones."""

    keys: Tensor
    values: Tensor

    def __init__(self, whole: Block, rank: int, size: int) -> None:
        super().__init__()
        self.before_attention = whole.before_attention
        self.query_key_value = rows_of(whole.query_key_value, rank, size, groups=3)
        self.joined = columns_of(whole.joined, rank, size)
        norm, up, activation, down = whole.network
        self.network = nn.Sequential(norm, rows_of(up, rank, size), activation, columns_of(down, rank, size))
        for name in "keys", "values":
            self.register_buffer(name, torch.zeros(HEADS // size, CONTEXT, WIDTH // HEADS))

    def forward(self, hidden: Tensor, place: Tensor) -> Tensor:
        """Input and output: float32[1, WIDTH]."""
        heads = len(self.keys)
        query, key, value = self.query_key_value(self.before_attention(hidden)).view(3, heads, 1, -1)
        self.keys.index_copy_(1, place, key)
        self.values.index_copy_(1, place, value)
        seen = torch.arange(CONTEXT) <= place
        attended = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        hidden = hidden + summed(self.joined(attended.reshape(1, -1)))
        return hidden + summed(self.network(hidden))


def summed(addend: Tensor) -> Tensor:
    dist.all_reduce(addend)
    return addend


class Step(nn.Module):
    def __init__(self, whole: Transformer, rank: int, size: int) -> None:
        super().__init__()
        self.characters, self.places, self.scores = whole.characters, whole.places, whole.scores
        *blocks, self.norm = whole.blocks
        self.blocks = nn.ModuleList(PartOfBlock(block, rank, size) for block in blocks if isinstance(block, Block))

    def forward(self, character: Tensor, place: Tensor) -> Tensor:
        """Turn a character and its place, both int64[1], into scores of the next character: float32[alphabet]."""
        hidden = self.characters(character) + self.places(place)
        for block in self.blocks:
            hidden = block(hidden, place)
        return self.scores(self.norm(hidden))[0]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Split a trained transformer over the ranks, and compile it.")
    parser.add_argument("checkpoint", type=Path, help="of chars.py")
    parser.add_argument("folder", type=Path, help="for the compiled parts")
    arguments = parser.parse_args()

    dist.init_process_group("muster")
    rank, size = dist.get_rank(), dist.get_world_size()
    if HEADS % size:
        parser.error(f"{HEADS} heads cannot be divided by {size} ranks")
    alphabet, _, held_out = load_text(DATA)
    whole = Transformer(len(alphabet)).eval()
    whole.load_state_dict(torch.load(arguments.checkpoint)["model"])
    step = Step(whole, rank, size).eval()

    text = held_out[:CONTEXT]
    for place, expected in enumerate(whole(text[None])[0]):
        torch.testing.assert_close(step(text[place, None], torch.tensor([place])), expected, rtol=1e-3, atol=1e-3)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        for old in arguments.folder.glob("rank*.pt2"):
            old.unlink()
    dist.barrier()
    path = muster.graph.package(step, (text[:1], torch.tensor([0])), arguments.folder / f"rank{rank}.pt2")
    print(f"wrote {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
