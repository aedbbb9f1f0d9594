"""New nodes for a graph that Inductor has traced."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from muster.graph._plan import NAMESPACES
from muster.graph._plan.graph_tasks import WAITS


def call(graph: Graph, target: Any, *arguments: Any, like: Any = None) -> Node:
    """A new node, with the shape of its result, which Inductor needs. `like`: that result, if it is known already:
    computing it takes time.
    """
    node = graph.call_function(target, arguments)
    if like is not None:
        node.meta["val"] = like
        return node
    values = map_arg(arguments, lambda each: each.meta["val"])
    with detect_fake_mode(torch.utils._pytree.tree_leaves(values)):  # type: ignore[union-attr]
        node.meta["val"] = target(*values)
    return node


def is_view(node: Node) -> bool:
    """True also for a list of views, and for an item of one."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return node.target is torch.ops.aten._unsafe_view.default or bool(getattr(node.target, "is_view", False))


def is_strided(node: Node) -> bool:
    """True if as_strided() takes a view of it: its numbers are for the memory that the node has now."""
    return any("as_strided" in str(user.target) or (is_view(user) and is_strided(user)) for user in node.users)


def sort(graph: Graph) -> None:
    """Moves each node behind what it needs. All others keep their order."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def keep_inputs(graph: Graph) -> None:
    """Copies the input of a pending collective where an operator that Inductor may run in place uses the same memory
    before the wait. Inductor does not count the wait as a reader.
    """
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    places = {node: place for place, node in enumerate(graph.nodes)}
    in_place = [node for node in graph.nodes if node.target in inplaceable_ops]
    for start in [node for node in graph.nodes if _waits(node)]:
        end = max(places[wait] for wait in _waits(start))
        between = [node for node in in_place if places[start] < places[node] < end]
        used = {_memory(each) for node in between for each in node.all_input_nodes}
        for each in start.all_input_nodes:
            if _memory(each) in used:
                with graph.inserting_before(start):
                    start.replace_input_with(each, call(graph, torch.ops.aten.clone.default, each))


def _waits(start: Node) -> list[Node]:
    """The waits for a collective; through items, where it has several results. None for other nodes."""
    if start.op != "call_function" or str(start.target).partition(".")[0] not in NAMESPACES:
        return []
    items = [user for user in start.users if user.target is operator.getitem]
    users = [*start.users, *(user for item in items for user in item.users)]
    return [user for user in users if user.target in WAITS]


def _memory(node: Node) -> Any:
    """Equal for tensors that share memory."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node
