"""Runs at each rank of `muster bench graph`: models of several kinds, split among the ranks in the usual ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import muster.nn
from muster.bench.graph_steps import TrainingStep, compile_for, medians, overlapped, prepare
from muster.bench.groups import Groups
from muster.bench.namespaces import INTERFACE

collectives: Any = torch.distributed.nn.functional
WIDTH, BATCH, LENGTH, HEAD = 512, 4, 64, 64
_BLOCKS = 2
_SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
Make = Callable[[], nn.Module]


class Perceptron(nn.Sequential):
    def __init__(self, layers: int = 4) -> None:
        super().__init__(*[each for _ in range(layers) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


class Transformer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[Block() for _ in range(_BLOCKS)])


class Block(nn.Module):
    """Attention and two linear layers. With a group each rank has some heads, and a part of the features between the
    linear layers. `rows`: between blocks each rank has a part of the tokens, instead of all.
    """

    def __init__(self, group: Any = None, rows: bool = False, parts: int = 1) -> None:
        super().__init__()
        self.group, self.rows = group, rows
        self.heads = WIDTH // HEAD // parts
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.projections = nn.Linear(WIDTH, 3 * WIDTH // parts, bias=False)
        self.merge = nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH // parts), nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole = self._enter(self.norms[0](x))
        q, k, v = self.projections(whole).view(*whole.shape[:2], 3, self.heads, HEAD).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*whole.shape[:2], -1)
        x = x + self._leave(self.merge(mixed), x)
        return x + self._leave(self.down(F.gelu(self.up(self._enter(self.norms[1](x))))), x)

    def _enter(self, x: Tensor) -> Tensor:
        return gather(x, self.group) if self.rows else x

    def _leave(self, x: Tensor, like: Tensor) -> Tensor:
        return scatter(x, self.group, len(like)) if self.rows else reduce(x, self.group)


class SplitPerceptron(nn.Module):
    """Pairs of linear layers: each rank has a part of the features between them."""

    def __init__(self, group: Any, parts: int, layers: int = 2) -> None:
        super().__init__()
        self.group = group
        self.ups = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH // parts) for _ in range(layers)])
        self.downs = nn.ModuleList([nn.Linear(4 * WIDTH // parts, WIDTH, bias=False) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + reduce(down(torch.relu(up(x))), self.group)
        return x


class Experts(nn.Module):
    """Each rank has one expert of each layer, and sends an equal part of its tokens to each."""

    def __init__(self, group: Any, layers: int = 2) -> None:
        super().__init__()
        self.group = group
        self.experts = nn.ModuleList([Perceptron(2) for _ in range(layers)])
        self.dense = nn.ModuleList([Perceptron(1) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for expert, dense in zip(self.experts, self.dense, strict=True):
            x = dense(x) + exchange(expert(exchange(x, self.group)), self.group)
        return x


class Tables(nn.Module):
    """Recommendation: each rank has some tables of embeddings, and the dense layers of its part of the samples."""

    def __init__(self, group: Any, parts: int, tables: int = 8) -> None:
        super().__init__()
        self.group, self.parts = group, parts
        self.tables = nn.ModuleList([nn.EmbeddingBag(1000, HEAD) for _ in range(tables // parts)])
        self.bottom = Perceptron(2)
        self.top = nn.Linear(WIDTH + tables * HEAD, 1)

    def forward(self, x: Tensor) -> Tensor:
        samples = x.flatten(0, 1)
        ids = (samples[:, :8].abs() * 100).long().repeat(self.parts, 1)
        found = torch.stack([table(ids) for table in self.tables], 1)  # of the samples of all ranks
        mine = exchange(found, self.group).view(self.parts, len(samples), -1).transpose(0, 1).reshape(len(samples), -1)
        return self.top(torch.cat([self.bottom(samples), mine], 1))  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Residual blocks."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(64, 64, 3, padding=1) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 64, 16, 16)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class Vocabulary(nn.Module):
    """The loss of a language model: each rank has the scores of a part of the words."""

    def __init__(self, group: Any, parts: int, words: int = 8192) -> None:
        super().__init__()
        self.group = group
        self.scores = nn.Linear(WIDTH, words // parts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x.flatten(0, 1))
        sums = reduce(scores.exp().sum(1), self.group)
        target = reduce(scores[:, 0], self.group)
        return sums.log() - target


class Context(nn.Module):
    """Attention over tokens of all ranks: each gathers the keys and values of the others."""

    def __init__(self, group: Any, layers: int = 2) -> None:
        super().__init__()
        self.group = group
        self.projections = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(layers)])
        self.dense = nn.ModuleList([Perceptron(2) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for projection, dense in zip(self.projections, self.dense, strict=True):
            q, k, v = projection(x.transpose(0, 1)).chunk(3, -1)
            k, v = gather(k.contiguous(), self.group), gather(v.contiguous(), self.group)
            q, k, v = (each.view(len(each), -1, WIDTH // HEAD, HEAD).permute(1, 2, 0, 3) for each in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(x.shape[1], len(x), WIDTH)
            x = x + dense(mixed.transpose(0, 1))
        return x


def reduce(x: Tensor, group: Any) -> Tensor:
    return x if group is None else collectives.all_reduce(x, group=group)


def gather(x: Tensor, group: Any) -> Tensor:
    """Rows of all ranks. Without a group: as many, of this one."""
    if group is None:
        return x.repeat(dist.get_world_size(), *[1] * (x.ndim - 1))
    return torch.cat(collectives.all_gather(x, group=group))


def scatter(x: Tensor, group: Any, rows: int) -> Tensor:
    """Sums of the ranks, of the rows of this one."""
    if group is None:
        return x[:rows]
    parts = list(x.split(rows))
    result: Tensor = collectives.reduce_scatter(torch.empty_like(parts[0]), parts, group=group)
    return result


def exchange(x: Tensor, group: Any) -> Tensor:
    """Each rank sends an equal part of its rows to each."""
    if group is None:
        return x
    result: Tensor = collectives.all_to_all_single(torch.empty_like(x), x.contiguous(), group=group)
    return result


def _replicated(make: Make, group: Any, backend: str) -> nn.Module:
    if group is None:
        return make()
    if backend == "muster":
        return muster.nn.DistributedDataParallel(make(), process_group=group)
    return nn.parallel.DistributedDataParallel(make(), process_group=group)


def _sharded(make: Make, group: Any) -> nn.Module:
    return make() if group is None else muster.nn.fully_shard(make(), DeviceMesh.from_group(group, "cpu"))


def models(group: Any, backend: str) -> dict[str, Make]:
    """By name. Without a group they compute the same, and send nothing."""
    parts = dist.get_world_size()
    return {
        "perceptron-data": partial(_replicated, Perceptron, group, backend),
        "perceptron-sharded": partial(_sharded, Perceptron, group),
        "perceptron-tensor": partial(SplitPerceptron, group, parts),
        "transformer-data": partial(_replicated, Transformer, group, backend),
        "transformer-sharded": partial(_sharded, Transformer, group),
        "transformer-tensor": lambda: nn.Sequential(*[Block(group, False, parts) for _ in range(_BLOCKS)]),
        "transformer-sequence": lambda: nn.Sequential(*[Block(group, True, parts) for _ in range(_BLOCKS)]),
        "transformer-context": partial(Context, group),
        "convolutions-data": partial(_replicated, Convolutions, group, backend),
        "experts": partial(Experts, group),
        "tables": partial(Tables, group, parts),
        "words": partial(Vocabulary, group, parts),
    }


def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A variant is a compiler and a backend of torch.distributed, or "bare": without collectives, compiled by muster.
    Steps are forward and backward. The result has the bytes that a rank sends in muster's step, too.
    """
    prepare()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(BATCH, LENGTH, WIDTH)
    steps: dict[str, TrainingStep] = {}
    for variant in options["variants"]:
        compiler, _, backend = variant.partition(" ")
        torch.manual_seed(0)
        model = models(groups[backend] if backend else None, backend)[options["model"]]()
        whole = not isinstance(model, nn.parallel.DistributedDataParallel)  # which splits the graph itself
        compiled = compile_for(model, compiler if backend else "muster", whole)
        steps[variant] = TrainingStep(model, partial(_loss, compiled, x))
    sent, bare = _sent(steps["muster muster"]), steps["bare"]
    if options["model"].endswith("-data"):  # backward makes all that is sent
        floor = overlapped(bare.backward, sent, groups["muster"], before=bare.forward)
    else:
        floor = overlapped(bare, sent, groups["muster"])
    yield medians({**steps, "overlapped": floor}, "eager muster", options["rounds"], 1) | {"sent": sent}


def _sent(step: Callable[[], Any]) -> int:
    """The bytes of the rank that sends the most."""
    step()
    dist.barrier()
    before = int(_SENT.read_text())
    step()
    sent = torch.tensor(int(_SENT.read_text()) - before)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return int(sent)


def _loss(compiled: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return compiled(x).square().mean()
