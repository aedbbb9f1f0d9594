"""A character-level transformer in stages, whose linear layers can compute the gradients of their weights later."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DATA = Path(__file__).resolve().parents[2] / "data" / "as_you_like_it.txt.gz"
CONTEXT = 64  # characters that the model looks back on
WIDTH = 128
HEADS = 4
LAYERS = 8


def load_text() -> tuple[int, Tensor]:
    """Returns the number of different characters, and the text as int64[N]: the number of each character."""
    text = gzip.decompress(DATA.read_bytes()).decode("ascii")
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    return len(alphabet), torch.tensor([number[character] for character in text])


def batch(text: Tensor, step: int, size: int) -> Tensor:
    """The pieces of text of a step: int64[size, CONTEXT + 1]. The step alone determines them."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(CONTEXT + 1)]


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    """The mean loss of scores of the next characters: float32[batch, length, alphabet] and int64[batch, length]."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


class _Apply(torch.autograd.Function):
    """A linear layer that leaves the gradients of its parameters to `layer.later`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: Linear) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.layer = layer
        return F.linear(hidden, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer, (hidden,) = ctx.layer, ctx.saved_tensors
        layer.later.append(partial(layer.add_gradients, hidden.flatten(0, -2), gradient.flatten(0, -2)))
        return gradient @ layer.weight, None


class Linear(nn.Linear):
    """If `later` is a list, backward passes append a function to it that adds the gradients of the parameters."""

    later: list[Callable[[], None]] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.later is None:
            return super().forward(hidden)
        output: Tensor = _Apply.apply(hidden, self)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def add_gradients(self, hidden: Tensor, gradient: Tensor) -> None:
        for parameter, new in ((self.weight, gradient.T @ hidden), (self.bias, gradient.sum(0))):
            parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)


class Block(nn.Module):
    """Attention to the earlier characters, then a small network for each character; each adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.joined = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.wide, self.narrow = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Input and output: float32[batch, length, WIDTH]."""
        heads = self.query_key_value(self.before_attention(hidden)).unflatten(2, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.joined(attended.transpose(1, 2).flatten(2))
        return hidden + self.narrow(F.gelu(self.wide(self.before_network(hidden))))


class Embedding(nn.Module):
    """Turns int64[batch, length] into float32[batch, length, WIDTH]."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(alphabet, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        return self.characters(text) + self.places(torch.arange(text.shape[1]))


def make_stage(stage: int, stages: int, alphabet: int) -> nn.Sequential:
    """Makes a stage: some of the blocks, and the embedding or the scores. A layer begins with the same weights in
    whichever stage it is.
    """
    layers: list[nn.Module] = []
    for number in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):
        torch.manual_seed(number)
        if number == 0:
            layers.append(Embedding(alphabet))
        layers.append(Block())
        if number == LAYERS - 1:
            layers += [nn.LayerNorm(WIDTH), Linear(WIDTH, alphabet)]
    return nn.Sequential(*layers)
