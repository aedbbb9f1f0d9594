"""Brings a graph into the forms that the plan knows.

A call that has a gradient leaves an operator of another namespace in the forward graph. Calls that take or give lists
of tensors split a tensor and join its parts again.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from muster.graph._rewrite.nodes import call

_WITH_GRADIENTS = "_c10d_functional_autograd"
_CAT = torch.ops.aten.cat.default


def simplify(graph: Graph) -> None:
    """Changes the graph in place. Its results stay the same."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == _WITH_GRADIENTS:
            node.target = getattr(torch.ops._c10d_functional, node.target._opname).default
        elif node.target is _CAT and (whole := _whole_of(node)):
            with graph.inserting_before(node):
                view = call(graph, torch.ops.aten.reshape.default, whole, tuple(node.meta["val"].shape))
            node.replace_all_uses_with(view)
            _erase(graph, node)


def _whole_of(cat: Node) -> Node | None:
    """The tensor whose parts `cat` joins again, if all of them are there, and in order.

    A result of the graph must not share memory with another result, or with an input.
    """
    parts: Any = cat.args[0]
    wholes = {_source_of(part) for part in parts}
    whole, *others = wholes
    if cat.args[1:] not in ((), (0,)) or others or whole.op != "call_function" or _is_result(whole):
        return None
    value = whole.meta["val"]
    values = [value, *(part.meta["val"] for part in parts)]
    if any(not isinstance(length, int) for each in values for length in each.shape):
        return None
    place = value.storage_offset()
    for part in values[1:]:
        if not part.is_contiguous() or part.storage_offset() != place:
            return None
        place += part.numel()
    return whole if value.is_contiguous() and place == value.storage_offset() + value.numel() else None


def _source_of(node: Node) -> Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    """True also for a list of views, and for an item of one."""
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return bool(getattr(node.target, "is_view", False))


def _is_result(node: Node) -> bool:
    """True if the graph returns the node's memory."""
    return any(user.op == "output" or (_is_view(user) and _is_result(user)) for user in node.users)


def _erase(graph: Graph, node: Node) -> None:
    """Erases the node, and the views that nothing else uses."""
    inputs = node.all_input_nodes
    graph.erase_node(node)  # which clears its inputs
    for each in inputs:
        if not each.users and _is_view(each):
            _erase(graph, each)
