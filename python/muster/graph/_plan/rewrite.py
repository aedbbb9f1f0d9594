"""New nodes for a graph that Inductor has traced."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg


def call(graph: Graph, operator: Any, *arguments: Any) -> Node:
    """A new node, with the shape of its result, which Inductor needs."""
    node = graph.call_function(operator, arguments)
    values = map_arg(arguments, lambda each: each.meta["val"])
    with detect_fake_mode(torch.utils._pytree.tree_leaves(values)):  # type: ignore[union-attr]
        node.meta["val"] = operator(*values)
    return node


def sort(graph: Graph) -> None:
    """Moves each node behind what it needs. All others keep their order."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
