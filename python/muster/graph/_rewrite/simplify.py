"""Brings a graph into the forms that the plan knows.

A call that has a gradient leaves an operator of another namespace in the forward graph. Calls that take or give lists
of tensors split a tensor and join its parts again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from muster.graph._rewrite.nodes import call, is_strided, is_view

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
    """The tensor whose parts `cat` joins again, if all of them are there, and in order."""
    parts: Any = cat.args[0]
    whole, *others = {_source_of(part) for part in parts}
    if cat.args[1:] not in ((), (0,)) or cat.kwargs or others or whole.op != "call_function":
        return None
    value = whole.meta["val"]
    values: list[torch.Tensor] = [part.meta["val"] for part in parts]
    if not all(_has_known_place(each) and _has_kind_of(each, value) for each in (value, *values, cat.meta["val"])):
        return None
    place = value.storage_offset()
    for part in values:
        if part.storage_offset() != place:
            return None
        place += part.numel()
    if place != value.storage_offset() + value.numel() or is_strided(cat) or _escapes(whole):
        return None
    return whole


def _has_known_place(value: torch.Tensor) -> bool:
    numbers = (*value.shape, value.storage_offset())
    return all(isinstance(number, int) for number in numbers) and value.is_contiguous()


def _has_kind_of(value: torch.Tensor, other: torch.Tensor) -> bool:
    """False if a view shows the memory of the other tensor as other numbers."""
    return (value.dtype, value.is_conj(), value.is_neg()) == (other.dtype, other.is_conj(), other.is_neg())


def _source_of(node: Node) -> Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _escapes(node: Node) -> bool:
    """True if the node's memory is a result of the graph, or is copied to an input: no other result may share it."""
    return any(user.op == "output" or _writes(user) or (is_view(user) and _escapes(user)) for user in node.users)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _erase(graph: Graph, node: Node) -> None:
    """Erases the node, and the views that nothing else uses."""
    inputs = node.all_input_nodes
    graph.erase_node(node)  # which clears its inputs
    for each in inputs:
        if not each.users and is_view(each):
            _erase(graph, each)
