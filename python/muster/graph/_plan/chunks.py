"""Cuts a product and the collective beside it into chunks of rows: one chunk is on the wire while another is computed.

Tensor parallelism has such chains. Often nothing else in the graph can hide their messages.

    all_gather -> product      the product of a chunk begins when this chunk has arrived
    product -> all_reduce      a chunk is sent when its product is computed
    product -> reduce_scatter
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from muster.graph._plan.rewrite import call, sort

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default
_GATHER = _c10d.all_gather_into_tensor.default
_SCATTER = _c10d.reduce_scatter_tensor.default
_REDUCE = _c10d.all_reduce.default
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_PRODUCTS: dict[Any, int] = {_aten.mm.default: 0, _aten.addmm.default: 1}  # and which argument has the rows

CHUNK = "muster_chunk"  # in the meta of a collective that must not be merged with those of other chunks


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
        """Whose values are copied together from chunks."""
        if not self.gathers:
            return (self.wait,)
        return (*self.products, self.wait) if self.whole else self.products


def find_chains(graph: Graph) -> list[Chain]:
    """No product is in two of them."""
    taken: set[Node] = set()
    chains = []
    for node in graph.nodes:
        chain = _chain_of(node, taken)
        if chain is not None:
            taken.update(chain.products)
            chains.append(chain)
    return chains


def cut(graph: Graph, chunks: dict[Chain, int]) -> None:
    """Cuts each chain into so many chunks, in place."""
    for chain, count in chunks.items():
        bounds = [chain.rows * index // count for index in range(count + 1)]
        pieces = list(itertools.pairwise(bounds))
        (_cut_gather if chain.gathers else _cut_reduction)(graph, chain, pieces)
        graph.erase_node(chain.wait)
        graph.erase_node(chain.start)
    if chunks:
        sort(graph)
        graph.eliminate_dead_code()
        graph.lint()


def _chain_of(start: Node, taken: set[Node]) -> Chain | None:
    if start.target not in (_GATHER, _SCATTER, _REDUCE) or start.kwargs or CHUNK in start.meta:
        return None
    if [user.target for user in start.users] != [_WAIT]:
        return None
    (wait,) = start.users
    if not _is_static(start.args[0], wait):
        return None
    if start.target is _GATHER:
        return _gather_chain(start, wait, taken)
    product = start.args[0]
    while isinstance(product, Node) and product.target in _VIEWS and len(product.users) == 1:
        product = product.args[0]
    if not isinstance(product, Node) or len(product.users) != 1 or product in taken or not _is_product(product):
        return None
    rows, parts = product.meta["val"].shape[0], start.args[2] if start.target is _SCATTER else 1
    return Chain(start, wait, (product,), rows // parts) if rows % parts == 0 else None


def _gather_chain(start: Node, wait: Node, taken: set[Node]) -> Chain | None:
    """The products of the gathered rows. All see them in the same shape."""
    users: list[Node] = []
    rows = [wait]  # and views of it
    for node in rows:  # grows
        for user in node.users:
            (rows if user.target in _VIEWS else users).append(user)
    found = [each for each in users if each not in taken and _is_product(each) and rows_of(each) in rows]
    products = tuple(each for each in found if _shape(rows_of(each)) == _shape(rows_of(found[0])))
    if not products:
        return None
    length, parts = _shape(rows_of(products[0]))[0], int(start.args[1])  # type: ignore[arg-type]
    whole = len(products) < len(users)
    return Chain(start, wait, products, length // parts, whole) if length % parts == 0 else None


def _is_product(node: Node) -> bool:
    """True for matrices with known shapes. A bias is added to each row."""
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    return _is_static(*node.args, node) and (node.target is _aten.mm.default or len(_shape(node.args[0])) == 1)


def _is_static(*nodes: Any) -> bool:
    return all(isinstance(length, int) for node in nodes for length in _shape(node))


def rows_of(product: Node) -> Node:
    rows: Any = product.args[_PRODUCTS[product.target]]
    return rows  # type: ignore[no-any-return]


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _multiply(graph: Graph, product: Node, rows: Node) -> Node:
    """The product of some rows."""
    arguments = list(product.args)
    arguments[_PRODUCTS[product.target]] = rows
    return call(graph, product.target, *arguments)


def _send(graph: Graph, chain: Chain, piece: Node) -> Node:
    """The chunk's own collective, awaited."""
    start = call(graph, chain.start.target, piece, *chain.start.args[1:])
    start.meta["stack_trace"] = chain.start.meta.get("stack_trace")
    start.meta[CHUNK] = True
    return call(graph, _WAIT, start)


def _cut_gather(graph: Graph, chain: Chain, pieces: list[tuple[int, int]]) -> None:
    ranks = chain.start.args[1]
    width = _shape(rows_of(chain.products[0]))[1]
    results: dict[Node, list[Node]] = {product: [] for product in chain.products}
    gathered = []
    with graph.inserting_before(chain.products[-1].next):
        local = call(graph, _aten.reshape.default, chain.start.args[0], (chain.rows, width))
        for begin, end in pieces:
            wait = _send(graph, chain, call(graph, _aten.slice.Tensor, local, 0, begin, end))
            gathered.append(wait)
            for product, parts in results.items():
                parts.append(_multiply(graph, product, wait))
        for product, parts in results.items():
            product.replace_all_uses_with(_joined(graph, parts, ranks, _shape(product)))
        for product in results:
            graph.erase_node(product)
        if chain.whole:
            chain.wait.replace_all_uses_with(_joined(graph, gathered, ranks, _shape(chain.wait)))


def _joined(graph: Graph, chunks: list[Node], ranks: Any, shape: torch.Size) -> Node:
    """The rows of each rank together. A chunk has some rows of every rank."""
    joined = call(graph, torch.ops.muster.join_chunks.default, chunks, ranks)
    return call(graph, _aten.reshape.default, joined, tuple(shape))


def _cut_reduction(graph: Graph, chain: Chain, pieces: list[tuple[int, int]]) -> None:
    (product,) = chain.products
    rows = rows_of(product)
    results = []
    with graph.inserting_before(chain.wait.next):
        for begin, end in pieces:
            if chain.start.target is _SCATTER:
                piece = call(graph, torch.ops.muster.chunk_of.default, rows, chain.start.args[2], begin, end)
            else:
                piece = call(graph, _aten.slice.Tensor, rows, 0, begin, end)
            results.append(_send(graph, chain, _multiply(graph, product, piece)))
        chain.wait.replace_all_uses_with(_joined(graph, results, 1, _shape(chain.wait)))
