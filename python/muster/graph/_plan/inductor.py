"""Gives the order of schedule.py to Inductor."""

from __future__ import annotations

import warnings
from typing import Any

from torch._inductor.dependencies import WeakDep
from torch._inductor.ir import MultiOutput
from torch._inductor.utils import is_collective, is_wait
from torch._inductor.virtualized import V
from torch.distributed import distributed_c10d as c10d

from muster.graph._plan.blocking import make_blocking
from muster.graph._plan.costs import Costs
from muster.graph._plan.graph_tasks import WAITS, by_chunks, flops_of
from muster.graph._plan.native_calls import make_native
from muster.graph._plan.saved import Label, SavedPlan, source_of
from muster.graph._plan.schedule import Kind, Task, order


def reorder(nodes: list[Any], costs: Costs, max_bytes: float, keeps_order: bool, folder: str = "") -> list[Any]:
    """The nodes of Inductor's scheduler in the order of the plan. With a folder, the plan is saved there.

    keeps_order: collectives begin in the order of the program, and before the waits that come after them there, because
    the plans of ranks might differ.
    """
    tasks = tasks_of(nodes, costs, keeps_order)
    planned = order(tasks, max_bytes)
    if folder:
        try:
            SavedPlan(c10d.get_rank(), tasks, [_label(node) for node in nodes], planned).save(folder)
        except OSError as error:
            warnings.warn(f"muster: a plan is not saved: {error}", stacklevel=2)
    in_order = [nodes[index] for index in planned]
    _forget_ancestors(in_order)
    make_blocking(in_order)
    make_native(in_order)
    return in_order


def _forget_ancestors(nodes: list[Any]) -> None:
    """Inductor lets a kernel write over its input once all other readers have run. It takes the kernel's ancestors for
    completed, but some are ancestors only by the order of collectives, which the plan changes. Without them, it looks
    at what has run.
    """
    for node in nodes:
        own = node.get_operation_names()
        for part in node.get_nodes():
            part.ancestors = part.ancestors & own


def _label(node: Any) -> Label:
    kernels = [part.node for part in node.get_nodes() if part.node is not None]
    origins = sorted({origin for kernel in kernels for origin in kernel.get_origins()})
    sources = [source for origin in origins if (source := source_of(origin.meta.get("stack_trace")))]
    if is_collective(node.node) or _is_wait(node.node):
        name = node.node.op_overload.name().rpartition("::")[2].partition(".")[0]
    else:
        name = ", ".join(dict.fromkeys(str(origin.target).split(".")[-2:][0] for origin in origins))
    return Label(name, sources[-1] if sources else "")


def tasks_of(nodes: list[Any], costs: Costs, keeps_order: bool) -> list[Task]:
    last_start: frozenset[int] = frozenset()
    makers = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
    tasks: list[Task] = []
    for index, node in enumerate(nodes):
        needs = frozenset(
            makers[dep.name]
            for dep in node.unmet_dependencies
            if makers.get(dep.name, index) != index and not _only_orders(node, dep)
        )
        if is_collective(node.node):
            tasks.append(_by_chunks(_start(node.node, needs | last_start, costs), node.node, costs))
            if keeps_order:
                last_start = frozenset({index})
        elif _is_wait(node.node):
            # A collective with several results has a node for each, which takes no time.
            parts = {need for need in needs if isinstance(nodes[need].node, MultiOutput)}
            before = needs.union(*(tasks[part].needs for part in parts))
            starts = [need for need in sorted(before) if tasks[need].kind is Kind.START]
            # A rank that waited before it begins a collective of another group might wait for a rank that waits for it.
            needs |= last_start
            wait = Task(Kind.COMPUTE, 0.0, needs)
            if starts:
                wait = Task(Kind.WAIT, 0.0, needs | {starts[0]}, starts[0])
            tasks.append(_by_chunks(wait, node.node, costs))
        else:
            flops = sum(_flops(part) for part in node.get_nodes())
            seconds = costs.compute_seconds(flops, node.get_read_write_buffers_sizes())
            tasks.append(Task(Kind.COMPUTE, seconds, needs))
    return tasks


def _is_wait(kernel: Any) -> bool:
    """True also for an operator that waits for chunks."""
    return is_wait(kernel) or getattr(kernel, "op_overload", None) in WAITS


def _by_chunks(task: Task, kernel: Any, costs: Costs) -> Task:
    for origin in kernel.get_origins():
        if origin.target is kernel.op_overload:
            return by_chunks(task, origin, costs)
    return task


def _flops(part: Any) -> float:
    """FLOPs of a kernel that Inductor calls. Not estimate_flops(), which looks at the last operation on the buffer:
    after a reduction in place, that is the wait.
    """
    if not (part.is_extern() or part.is_template()) or isinstance(part.node, MultiOutput):
        return 0.0
    return sum(flops_of(origin) or 0.0 for origin in part.node.get_origins())


def _only_orders(node: Any, dep: Any) -> bool:
    """True if the dependency only keeps collectives in the order of the program. The plan has an order of its own,
    equal at all ranks.

    Inductor adds such a dependency for the collective's own result. Of one that lets a collective write to a buffer
    only after others have read it, `mutating_buf` is that write, also where the reader is a wait.
    """
    if not (isinstance(dep, WeakDep) and dep.is_fake and is_collective(node.node)):
        return False
    return any(output.get_name() == dep.mutating_buf and not output.get_mutations() for output in node.get_outputs())


def _start(kernel: Any, needs: frozenset[int], costs: Costs) -> Task:
    group_name = next(argument for argument in reversed(kernel.constant_args) if isinstance(argument, str))
    inputs = sum(_bytes(each) for each in kernel.inputs)
    outputs = sum(_bytes(each) for each in getattr(kernel, "outputs", None) or ())
    seconds = costs.wire_seconds(group_name, str(kernel.op_overload), inputs, outputs)
    return Task(Kind.START, seconds, needs, bytes=outputs)


def _bytes(buffer: Any) -> int:
    count = V.graph.sizevars.optimization_hint(buffer.get_numel(), fallback=0)
    return int(count) * buffer.get_dtype().itemsize
