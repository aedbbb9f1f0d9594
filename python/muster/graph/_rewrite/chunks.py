"""Cuts a product and the collective beside it into chunks of rows: one chunk is on the wire while another is computed.

Tensor parallelism has such chains. Often nothing else in the graph can hide their messages. A chain becomes one or two
operators that do the chunks themselves (src/muster/torch/graph/chunked_matmul.h):

    all_gather -> products     all_gather_chunks, and chunks_matmul, which waits for one chunk after the other
    product -> all_reduce      matmul_all_reduce
    product -> reduce_scatter  matmul_reduce_scatter
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from muster.graph._rewrite.nodes import call, sort

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_muster = torch.ops.muster
_WAIT = _c10d.wait_tensor.default
_GATHER = _c10d.all_gather_into_tensor.default
_SCATTER = _c10d.reduce_scatter_tensor.default
_REDUCE = _c10d.all_reduce.default
VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_PRODUCTS: dict[Any, int] = {_aten.mm.default: 0, _aten.addmm.default: 1}  # and which argument has the rows


@dataclass(frozen=True)
class Chain:
    """A collective, its wait, and the products whose rows it sends or brings."""

    start: Node
    wait: Node
    products: tuple[Node, ...]
    rows: int  # that can be cut: of the product, or of each rank's part of them
    whole: bool = False  # something else needs all gathered rows

    @property
    def gathers(self) -> bool:
        return self.start.target is _GATHER

    @property
    def copied(self) -> tuple[Node, ...]:
        """Whose values are copied, because a chunk has some rows of each rank."""
        if self.gathers:
            return (*self.products, self.wait) if self.whole else self.products
        return (rows_of(self.products[0]),) if self.start.target is _SCATTER else ()


def find_chains(graph: Graph) -> list[Chain]:
    """No product is in two of them."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    taken: set[Node] = set()
    chains = []
    for node in graph.nodes:
        chain = _chain_of(node, taken, places)
        if chain is not None:
            taken.update(chain.products)
            chains.append(chain)
    return chains


def cut(graph: Graph, chunks: dict[Chain, int]) -> None:
    """Cuts each chain into so many chunks, in place."""
    for chain, count in chunks.items():
        (_cut_gather if chain.gathers else _cut_reduction)(graph, chain, count)
        graph.erase_node(chain.wait)
        graph.erase_node(chain.start)
    if chunks:
        sort(graph)
        graph.eliminate_dead_code()
        graph.lint()


def _chain_of(start: Node, taken: set[Node], places: dict[Node, int]) -> Chain | None:
    if start.target not in (_GATHER, _SCATTER, _REDUCE) or start.kwargs:
        return None
    if [user.target for user in start.users] != [_WAIT]:
        return None
    (wait,) = start.users
    if not is_static(start.args[0], wait):
        return None
    if start.target is _GATHER:
        return _gather_chain(start, wait, taken, places)
    product = start.args[0]
    while isinstance(product, Node) and product.target in VIEWS and len(product.users) == 1:
        product = product.args[0]
    if not isinstance(product, Node) or len(product.users) != 1 or product in taken or not is_product(product):
        return None
    rows, parts = product.meta["val"].shape[0], start.args[2] if start.target is _SCATTER else 1
    return Chain(start, wait, (product,), rows // parts) if rows % parts == 0 else None


def _gather_chain(start: Node, wait: Node, taken: set[Node], places: dict[Node, int]) -> Chain | None:
    """The products of the gathered rows. All see them in the same shape, and need nothing else that comes later."""
    users: list[Node] = []
    rows = [wait]  # and views of it
    for node in rows:  # grows
        for user in node.users:
            (rows if user.target in VIEWS else users).append(user)
    found = [
        each
        for each in users
        if each not in taken
        and is_product(each)
        and rows_of(each) in rows
        and all(_is_there(other, start, places) for other in others_of(each))
    ]
    products = tuple(each for each in found if _shape(rows_of(each)) == _shape(rows_of(found[0])))
    if not products:
        return None
    length, parts = _shape(rows_of(products[0]))[0], int(start.args[1])  # type: ignore[arg-type]
    whole = len(products) < len(users)
    return Chain(start, wait, products, length // parts, whole) if length % parts == 0 else None


def _is_there(node: Node, start: Node, places: dict[Node, int]) -> bool:
    """True if the node needs nothing that comes after `start`, except views: so all products of a chain can become one
    operator.
    """
    while places[node] > places[start] and getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return places[node] < places[start]


def is_product(node: Node) -> bool:
    """True for matrices with known shapes. A bias is added to each row."""
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    return is_static(*node.args, node) and (node.target is _aten.mm.default or len(_shape(node.args[0])) == 1)


def is_static(*nodes: Any) -> bool:
    return all(isinstance(length, int) for node in nodes for length in _shape(node))


def rows_of(product: Node) -> Node:
    rows: Any = product.args[_PRODUCTS[product.target]]
    return rows  # type: ignore[no-any-return]


def others_of(product: Node) -> list[Node]:
    """The weights, and the bias if there is one."""
    place = _PRODUCTS[product.target]
    return [product.args[place + 1], *product.args[:place]]  # type: ignore[list-item]


def weights_and_bias(product: Node) -> tuple[Node, Node | None]:
    weights, *bias = others_of(product)
    return weights, bias[0] if bias else None


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _cut_gather(graph: Graph, chain: Chain, count: int) -> None:
    width = _shape(rows_of(chain.products[0]))[1]
    weights, biases = zip(*map(weights_and_bias, chain.products), strict=True)
    with graph.inserting_before(chain.start):
        own_rows = _reshaped(graph, chain.start.args[0], (chain.rows, width))
        ranks, group_name = chain.start.args[1:]
        target, like = _muster.all_gather_chunks.default, chain.wait.meta["val"].view(-1, width)
        gathered = _start(graph, chain, target, own_rows, ranks, count, group_name, like=like)
        values = [product.meta["val"] for product in chain.products]
        if chain.whole:
            values.append(like.new_empty(like.shape))
        arguments = gathered, own_rows, count, list(weights), list(biases), chain.whole
        results = call(graph, _muster.chunks_matmul.default, *arguments, like=values)
        for product, result in zip(chain.products, _items(graph, results, len(weights)), strict=True):
            product.replace_all_uses_with(result)
            graph.erase_node(product)
        rows = own_rows  # only for views that nothing uses any more
        if chain.whole:
            rows = call(graph, operator.getitem, results, len(weights), like=values[-1])
            rows = _reshaped(graph, rows, _shape(chain.wait))
        chain.wait.replace_all_uses_with(rows)


def _cut_reduction(graph: Graph, chain: Chain, count: int) -> None:
    (product,) = chain.products
    scatters = chain.start.target is _SCATTER
    target = _muster.matmul_reduce_scatter if scatters else _muster.matmul_all_reduce
    _, *reduce_op_and_ranks, group_name = chain.start.args
    with graph.inserting_before(chain.start):
        arguments = rows_of(product), *weights_and_bias(product), *reduce_op_and_ranks, count, group_name
        like = chain.start.meta["val"].view(chain.rows, -1)
        start = _start(graph, chain, target.default, *arguments, like=like)
        result = _reshaped(graph, call(graph, _WAIT, start, like=start.meta["val"]), _shape(chain.wait))
        chain.wait.replace_all_uses_with(result)


def _start(graph: Graph, chain: Chain, target: Any, *arguments: Any, like: Any) -> Node:
    start = call(graph, target, *arguments, like=like)
    start.meta["stack_trace"] = chain.start.meta.get("stack_trace")
    return start


def _items(graph: Graph, values: Node, count: int) -> list[Node]:
    return [call(graph, operator.getitem, values, index, like=values.meta["val"][index]) for index in range(count)]


def _reshaped(graph: Graph, node: Any, shape: Sequence[int]) -> Node:
    if _shape(node) == tuple(shape):
        return node  # type: ignore[no-any-return]
    return call(graph, _aten.reshape.default, node, tuple(shape))
