"""Calls that have begun: what ends them if the program does not wait for each.

The compiler keeps a call only if something uses its result. Without a graph, a call ends even if nothing waits for it.
So a graph waits at its end for the calls that nothing else waits for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from muster.graph._capture.work import Work, copy


class CoalescingManager:
    """torch's block, in which calls need not wait for each other. In a graph they never do."""

    def __init__(self, async_ops: bool):
        self._async_ops = async_ops
        self._works: list[Work] = []

    def __enter__(self) -> CoalescingManager:
        _blocks.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _blocks.pop()
        if not self._async_ops:
            self.wait()

    def append(self, work: Work | None = None) -> None:
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


_blocks: list[CoalescingManager] = []  # in which the traced program is


def begin(work: Work) -> Work:
    """For work that the program gets, and waits for or not."""
    for block in _blocks:
        block.append(work)
    _end_calls_of_this_graph()
    for pending, targets in work.results():
        begun(pending, targets)
    return work


def begun(pending: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Stands in Dynamo's graph for a call that has begun. _end_calls() removes it."""


def _end_calls_of_this_graph() -> None:
    """Dynamo runs it while it traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    if _end_calls not in output.register_finalizer_fns:
        output.add_graph_finalizer(_end_calls)


_end_calls_of_this_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in calls.py


def _end_calls(module: torch.fx.GraphModule) -> None:
    for part in module.modules():  # a function under checkpoint() is a module of its own
        if isinstance(part, torch.fx.GraphModule):
            (output,) = part.graph.find_nodes(op="output")
            for call in part.graph.find_nodes(op="call_function", target=begun):
                if len(call.args[0].users) > 1:
                    part.graph.erase_node(call)
                else:
                    call.target = _end
                    output.prepend(call)
            part.recompile()


def _end(pending: torch.Tensor, targets: list[torch.Tensor]) -> None:
    copy(torch.ops._c10d_functional.wait_tensor(pending), targets)
