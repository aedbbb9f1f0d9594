"""Merges small collectives of a graph that do not need each other.

A small collective costs its latency, whatever its size. A bucket has at most so many bytes that its latency is a small
part of its time: merging more would only make the first tensor wait for the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from muster.graph._rewrite.nodes import call, is_strided, sort

_c10d = torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default
_MERGED = (
    _c10d.all_reduce.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
)
Key = tuple[Any, ...]


@dataclass
class _Bucket:
    key: Key
    bytes: int = 0
    members: list[Node] = field(default_factory=list)


def merge(graph: Graph, buckets: list[list[Node]]) -> None:
    """Merges the collectives of each bucket of find_buckets()."""
    for members in buckets:
        _merge(graph, members)
    if buckets:
        sort(graph)
        graph.lint()


def find_buckets(graph: Graph, most_bytes: Callable[[str], float]) -> list[list[Node]]:
    """Collectives that can be merged, in the order of the graph. Each is awaited once.

    most_bytes: of a bucket, by the name of the group.
    """
    open_buckets: dict[Key, _Bucket] = {}
    bucket_of: dict[Node, _Bucket] = {}
    result: list[_Bucket] = []
    for node in graph.nodes:
        if not _may_merge(node):
            continue
        tensor = node.args[0].meta["val"]
        size = tensor.numel() * tensor.itemsize
        key = (node.target, *node.args[1:], tensor.dtype, tensor.device)
        bucket = open_buckets.get(key)
        if bucket is None or bucket.bytes + size > most_bytes(str(node.args[-1])) or _needs(node, bucket, bucket_of):
            bucket = open_buckets[key] = _Bucket(key)
            result.append(bucket)
        bucket.bytes += size
        bucket.members.append(node)
        bucket_of[node] = bucket
    return [bucket.members for bucket in result if len(bucket.members) > 1]


def _may_merge(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _MERGED or node.kwargs:
        return False
    tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    if not all(isinstance(length, int) for length in tensor.shape) or [user.target for user in node.users] != [_WAIT]:
        return False
    (wait,) = node.users
    return not is_strided(wait)


def _needs(node: Node, bucket: _Bucket, bucket_of: dict[Node, _Bucket]) -> bool:
    """True if the node needs a result of the bucket, also through members of other buckets."""
    seen: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        if (other := bucket_of.get(each)) is not None:
            if other is bucket:
                return True
            stack.extend(other.members)
        stack.extend(each.all_input_nodes)
    return False


def _merge(graph: Graph, members: list[Node]) -> None:
    waits = [next(iter(member.users)) for member in members]
    inputs: list[Node] = [member.args[0] for member in members]  # type: ignore[misc]
    shapes = [tuple(wait.meta["val"].shape) for wait in waits]
    operator, arguments = members[0].target, members[0].args[1:]
    with graph.inserting_before(members[-1].next):
        flat = call(graph, operator, _joined(graph, operator, inputs, arguments), *arguments)
        whole = call(graph, _WAIT, flat)
        flat.meta["stack_trace"] = members[0].meta.get("stack_trace")
        parts = _split(graph, operator, whole, [tensor.meta["val"].numel() for tensor in inputs], arguments)
        for wait, part, shape in zip(waits, parts, shapes, strict=True):
            wait.replace_all_uses_with(call(graph, torch.ops.aten.reshape.default, part, shape))
    for node in (*waits, *members):
        graph.erase_node(node)


def _joined(graph: Graph, operator: Any, inputs: list[Node], arguments: tuple[Any, ...]) -> Node:
    """The inputs in one tensor. Of a reduce_scatter, the parts of a rank are next to each other."""
    if operator is not _c10d.reduce_scatter_tensor.default:
        if operator is _c10d.all_reduce.default:
            # Inductor would let the kernel of a vector write into the bucket, which is then reduced in place.
            clone = torch.ops.aten.clone.default
            inputs = [call(graph, clone, each) if each.meta["val"].dim() == 1 else each for each in inputs]
        flat = [call(graph, torch.ops.aten.reshape.default, tensor, (-1,)) for tensor in inputs]
        return call(graph, torch.ops.aten.cat.default, flat)
    size = arguments[1]
    rows = [call(graph, torch.ops.aten.reshape.default, tensor, (size, -1)) for tensor in inputs]
    joined = call(graph, torch.ops.aten.cat.default, rows, 1)
    return call(graph, torch.ops.aten.reshape.default, joined, (-1,))


def _split(graph: Graph, operator: Any, whole: Node, lengths: list[int], arguments: tuple[Any, ...]) -> list[Node]:
    """The results of the members, whose inputs have these lengths."""
    dimension = 0
    if operator is _c10d.all_gather_into_tensor.default:
        whole, dimension = call(graph, torch.ops.aten.reshape.default, whole, (arguments[0], -1)), 1
    elif operator is _c10d.reduce_scatter_tensor.default:
        lengths = [length // arguments[1] for length in lengths]
    parts, begin = [], 0
    for length in lengths:
        parts.append(call(graph, torch.ops.aten.slice.Tensor, whole, dimension, begin, begin + length))
        begin += length
    return parts
