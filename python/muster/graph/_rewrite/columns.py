"""Splits a product into its columns, where a collective can begin after some of them.

Models compute queries, keys and values in one product. Where ranks gather keys and values, the keys can be on the wire
while the values are computed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from muster.graph._plan.costs import Costs
from muster.graph._plan.graph_tasks import bytes_of, flops_of, planned_seconds, tasks_of
from muster.graph._plan.schedule import Kind, Task
from muster.graph._rewrite.chunks import VIEWS, is_product, is_static, others_of, rows_of, weights_and_bias
from muster.graph._rewrite.greedy import choose
from muster.graph._rewrite.nodes import call, is_strided

_aten = torch.ops.aten
_SPLITS = _aten.split.Tensor, _aten.split_with_sizes.default


@dataclass(frozen=True)
class Columns:
    product: Node
    parts: tuple[Node, ...]  # items of a split, in any order


def split_best(graph: Graph, costs: Costs, max_bytes: float) -> None:
    """Splits products of the graph in place, where the planned step becomes shorter. Products of one shape are all
    split, or none is. max_bytes: as for order().
    """
    kinds: dict[Any, list[Columns]] = {}
    for columns in find_columns(graph):
        kinds.setdefault(tuple(part.meta["val"].shape for part in columns.parts), []).append(columns)
    tasks = tasks_of(graph, costs) if kinds else []
    if all(task.kind is not Kind.START for task in tasks):
        return
    places = {node: place for place, node in enumerate(graph.nodes)}

    def seconds(chosen: list[list[Columns]]) -> float:
        return planned_seconds(with_splits(tasks, places, costs, itertools.chain(*chosen)), max_bytes)

    for columns in itertools.chain(*choose(kinds.values(), seconds)):
        split(graph, columns)


def find_columns(graph: Graph) -> Iterable[Columns]:
    """Products of which nothing but parts of their columns is used."""
    for node in graph.nodes:
        if node.target not in _SPLITS or any(user.target is not operator.getitem for user in node.users):
            continue
        whole: Any = node.args[0]
        if not is_static(whole, *node.users) or node.args[2:] not in ((-1,), (whole.meta["val"].ndim - 1,)):
            continue
        while whole.target in VIEWS and len(whole.users) == 1 and _is_as_wide(whole, whole.args[0]):
            whole = whole.args[0]
        is_apart = len(whole.users) == 1 and len(node.users) > 1 and not any(map(is_strided, node.users))
        if is_product(whole) and is_apart and _width(whole) > 0:
            yield Columns(whole, tuple(node.users))


def with_splits(tasks: list[Task], places: dict[Node, int], costs: Costs, all_columns: Iterable[Columns]) -> list[Task]:
    """The tasks that the graph has after split(). The product stays, and takes no time."""
    result = list(tasks)
    for columns in all_columns:
        product = columns.product
        needs = result[places[product]].needs
        result[places[product]] = Task(Kind.COMPUTE, 0.0, needs)
        for part in columns.parts:
            share = _width(part) / _width(product)
            # Each part reads all rows.
            read = bytes_of(rows_of(product)) + share * bytes_of(others_of(product))
            seconds = costs.compute_seconds(share * (flops_of(product) or 0.0), read)
            result[places[part]] = Task(Kind.COMPUTE, seconds, needs)
    return result


def split(graph: Graph, columns: Columns) -> None:
    """One product for each part, in place."""
    product = columns.product
    product_weights, bias = weights_and_bias(product)
    (source,) = {item.all_input_nodes[0] for item in columns.parts}
    widths = [value.shape[-1] for value in source.meta["val"]]
    for part in columns.parts:
        index: Any = part.args[1]
        begin = sum(widths[:index])
        with graph.inserting_before(product):
            weights = _slice(graph, product_weights, 1, begin, widths[index])
            biases = []
            if bias is not None:  # its one number may be for all columns
                biases = [bias if _width(bias) == 1 else _slice(graph, bias, 0, begin, widths[index])]
            own = call(graph, product.target, *biases, rows_of(product), weights)
            view = call(graph, _aten.reshape.default, own, tuple(part.meta["val"].shape))
        part.replace_all_uses_with(view)
        graph.erase_node(part)
    while source is not product:
        view, source = source, source.all_input_nodes[0]
        graph.erase_node(view)
    graph.erase_node(product)


def _slice(graph: Graph, node: Node, dim: int, begin: int, length: int) -> Node:
    return call(graph, _aten.slice.Tensor, node, dim, begin, begin + length)


def _is_as_wide(node: Node, other: Node) -> bool:
    return is_static(other) and _width(node) == _width(other)


def _width(node: Node) -> int:
    width: int = node.meta["val"].shape[-1]
    return width
