"""Runs at each rank of `muster bench graph`: models that are split over the ranks (tensor parallelism)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import muster.graph
from muster.bench.graph_steps import compiled, medians, prepare
from muster.bench.groups import Groups

_CONTEXT = 256  # tokens that the decoder looks back on


class Perceptron(nn.Module):
    """Each rank has a part of the hidden features."""

    def __init__(self, width: int, ranks: int, group: Any) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width // ranks, bias=False)
        self.down = nn.Linear(4 * width // ranks, width, bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x + _summed(self.down(F.gelu(self.up(x))), self.group)


class Layer(nn.Module):
    """Of a decoder: each rank has some of the attention heads. It keeps the keys and values of earlier tokens."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, ranks: int, group: Any, head: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width // ranks, bias=False)
        self.joined = nn.Linear(width // ranks, width, bias=False)
        self.network = nn.Sequential(nn.RMSNorm(width), Perceptron(width, ranks, group))
        self.group = group
        for name in "keys", "values":
            self.register_buffer(name, torch.zeros(width // ranks // head, _CONTEXT, head))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.norm(x)).view(3, len(self.keys), 1, -1)
        self.keys.index_copy_(1, place, key)
        self.values.index_copy_(1, place, value)
        seen = torch.arange(_CONTEXT) <= place
        attended = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        x = x + _summed(self.joined(attended.reshape(1, -1)), self.group)
        return self.network(x)


class Decoder(nn.Module):
    def __init__(self, width: int, ranks: int, group: Any, head: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, ranks, group, head) for _ in range(layers))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, place)
        return x


class Chain(nn.Module):
    """all_reduces that need each other. `norms`: a sum and an RMSNorm after each, as in a decoder."""

    def __init__(self, ranks: int, group: Any, calls: int, width: int, norms: bool = False) -> None:
        super().__init__()
        self.group = group
        self.steps = nn.ModuleList(nn.RMSNorm(width) if norms else nn.Identity() for _ in range(calls))
        self.norms = norms

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = x * 2
        for step in self.steps:
            x = _summed(x, self.group)
            if self.norms:
                residual = residual + x
                x = step(residual)
        return x


def _summed(x: Tensor, group: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


@torch.no_grad()
def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A variant is a compiler and a backend of torch.distributed. "package" is a package of muster.graph.package().
    "bare" is a package without collectives, "whole" is a package of the whole model that one rank runs alone.
    "alone muster" is a package of the collectives without the norms between them.
    """
    prepare()
    width = options["width"]
    model: Callable[[int, Any], nn.Module]
    inputs: tuple[Tensor, ...] = (torch.ones(1, width),)
    if options["model"] == "decoder":
        model = partial(Decoder, width, head=options["head"], layers=options["layers"])
        inputs = *inputs, torch.tensor([_CONTEXT // 2])
    elif options["model"] == "chain":
        model = partial(Chain, calls=options["chained"], width=width, norms=options["norms"])
    else:
        model = partial(Perceptron, width)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(dist.get_rank())
        ranks = dist.get_world_size()
        weights = dict(model(ranks, None).named_parameters())
        steps: dict[str, Callable[[], Any]] = {}
        for variant in options["variants"]:
            compiler, _, backend = variant.partition(" ")
            group = groups[backend] if backend else None
            if compiler == "whole":
                steps[variant] = _packaged(model(1, None), inputs, folder) if dist.get_rank() == 0 else _nothing
                continue
            own = Chain(ranks, group, options["chained"], width) if compiler == "alone" else model(ranks, group)
            for name, parameter in own.named_parameters():
                parameter.data = weights[name].data
            packs = compiler in ("package", "bare", "alone")
            steps[variant] = _packaged(own, inputs, folder, group) if packs else compiled(own, compiler, *inputs)
        yield medians(steps, "eager muster", options["rounds"], options["calls"])


def _packaged(model: nn.Module, inputs: tuple[Tensor, ...], folder: str, group: Any = None) -> Callable[[], Any]:
    path = str(Path(folder) / f"{len(list(Path(folder).iterdir()))}.pt2")
    muster.graph.package(model.eval(), inputs, path, {"ranks": group} if group is not None else {})
    return partial(torch._inductor.aoti_load_package(path), *inputs)


def _nothing() -> None:
    """What the other ranks do while one has the whole model."""
