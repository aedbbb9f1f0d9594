"""The models that `muster bench ddp` trains, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Case:
    """A model and its batch. They are the same at all ranks, so the ranks agree without averaging."""

    text: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def mlp(width: int, layers: int) -> nn.Module:
    """Returns a multilayer perceptron with 1024 inputs and 1000 classes."""
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(1024, width), nn.ReLU(), *hidden, nn.Linear(width, 1000))


class Transformer(nn.Module):
    """A decoder over characters. It maps (batch, length) of numbers below 256 to (batch * length, 256)."""

    def __init__(self, width: int = 320, layers: int = 8, heads: int = 5, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores.flatten(0, 1)


class Block(nn.Module):
    """Causal attention and a hidden layer of four times the width, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.movedim(-2, 1).unbind(3)  # (batch, head, position, width of a head) each
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.movedim(1, -2).flatten(-2))
        fed: torch.Tensor = self.feed(self.feed_norm(hidden))
        return hidden + fed


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norms, added to the input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride), nn.ReLU(), *convolution(outputs, outputs, 3, 1)
        )
        same = inputs == outputs and stride == 1
        self.past = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.past(x))


def convolution(inputs: int, outputs: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


def resnet18() -> nn.Module:
    """Returns a ResNet-18 for 32x32 inputs (He et al. 2016, with a first layer for small images) and 10 classes."""
    stem = [*convolution(3, 64, 3, 1), nn.ReLU()]
    stages = []
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        stages += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def tokens() -> Batch:
    drawn = torch.randint(256, (8, 65))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].flatten()


MODELS = {
    "mlp": Case(
        "MLP, 25M parameters", lambda: mlp(2048, 5), lambda: (torch.randn(32, 1024), torch.randint(1000, (32,)))
    ),
    "transformer": Case("transformer, 10M parameters", Transformer, tokens),
    "resnet18": Case("ResNet-18, 32x32", resnet18, lambda: (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))),
    "tiny": Case("tiny MLP", lambda: mlp(32, 1), lambda: (torch.randn(4, 1024), torch.randint(1000, (4,)))),
}
