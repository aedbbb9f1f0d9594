"""The forms of calls that a graph can hold, one function for each. FORMS has all of them, with those of
graph_forms_functional.py, which says what a form is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from graph_forms_functional import FORMS as FORMS
from graph_forms_functional import form


@form
def all_reduce(x: torch.Tensor, group: Any) -> Any:
    dist.all_reduce(x, group=group)
    return x * 2


@form
def all_reduce_max(x: torch.Tensor, group: Any) -> Any:
    dist.all_reduce(x, dist.ReduceOp.MAX, group)
    return x * 2


@form
def all_reduce_avg(x: torch.Tensor, group: Any) -> Any:
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
    return x * 2


@form
def all_reduce_default_group(x: torch.Tensor, group: Any) -> Any:
    dist.all_reduce(x)
    return x * 2


@form
def all_reduce_of_a_view(x: torch.Tensor, group: Any) -> Any:
    dist.all_reduce(x[1:3], group=group)
    return x * 2


@form
def all_reduce_async(x: torch.Tensor, group: Any) -> Any:
    work = dist.all_reduce(x, group=group, async_op=True)
    y = torch.ones(3) + 1
    work.wait()
    return x * y


@form
def all_reduce_is_completed(x: torch.Tensor, group: Any) -> Any:
    work = dist.all_reduce(x, group=group, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    return x * 2


@form
def all_reduce_future(x: torch.Tensor, group: Any) -> Any:
    work = dist.all_reduce(x, group=group, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] / 2)
    return future.wait() + 1


@form
def all_reduce_future_chain(x: torch.Tensor, group: Any) -> Any:
    """Each callback runs once, though two futures wait for the first one."""
    runs = []

    def double(done: Any) -> Any:
        runs.append(1)
        return done.value()[0] * 2

    doubled: Any = dist.all_reduce(x, group=group, async_op=True).get_future().then(double)
    doubled.wait()
    sums = [doubled.then(lambda done: done.value() + 1), doubled.then(lambda done: done.wait() + 2)]
    return [each.wait() for each in sums], doubled.value(), len(runs)


@form
def all_reduce_coalesced(x: torch.Tensor, group: Any) -> Any:
    y = x + 1
    dist.all_reduce_coalesced([x, y], group=group)
    return x, y


@form
def all_reduce_coalesced_async(x: torch.Tensor, group: Any) -> Any:
    future: Any = dist.all_reduce_coalesced([x, x + 1], group=group, async_op=True)
    return future.then(lambda done: done.value()[1] * 2).wait(), future.wait(), x


@form
def coalescing_all_reduce(x: torch.Tensor, group: Any) -> Any:
    y = x + 1
    with dist._coalescing_manager(group=group):
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group)
    return x, y


@form
def coalescing_async(x: torch.Tensor, group: Any) -> Any:
    y = x + 1
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group)
    manager.wait()
    return x, y


@form
def coalescing_async_calls(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(4 * group.size(), 3)
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        dist.all_gather_into_tensor(out, x, group=group, async_op=True)
    manager.wait()
    return out * 2


@form
def coalescing_async_calls_in_a_waiting_block(x: torch.Tensor, group: Any) -> Any:
    y = x + 1
    with dist._coalescing_manager(group=group):
        dist.all_reduce(x, group=group, async_op=True)
        dist.all_reduce(y, group=group, async_op=True)
    return x * 2, y


@form
def coalescing_all_gather(x: torch.Tensor, group: Any) -> Any:
    out = [x.new_empty(4 * group.size(), 3) for _ in range(2)]
    with dist._coalescing_manager(group=group):
        for part in out:
            dist.all_gather_into_tensor(part, x, group=group)
    return tuple(out)


@form
def broadcast(x: torch.Tensor, group: Any) -> Any:
    dist.broadcast(x, 1, group=group)
    return x * 2


@form
def broadcast_group_src(x: torch.Tensor, group: Any) -> Any:
    dist.broadcast(x, group=group, group_src=1)
    return x * 2


@form
def broadcast_async(x: torch.Tensor, group: Any) -> Any:
    work = dist.broadcast(x, src=1, group=group, async_op=True)
    work.wait()
    return x * 2


@form
def reduce(x: torch.Tensor, group: Any) -> Any:
    dist.reduce(x, 1, group=group)
    return x * 2 if group.rank() == 1 else torch.zeros(1)


@form
def reduce_async(x: torch.Tensor, group: Any) -> Any:
    dist.reduce(x, dst=0, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
    return x * 2 if group.rank() == 0 else torch.zeros(1)


@form
def all_gather(x: torch.Tensor, group: Any) -> Any:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts) * 2


@form
def all_gather_uneven(x: torch.Tensor, group: Any) -> Any:
    parts = [x.new_empty(rank + 1, 3) for rank in range(group.size())]
    dist.all_gather(parts, x[: group.rank() + 1], group=group)
    return torch.cat(parts) * 2


@form
def all_gather_async(x: torch.Tensor, group: Any) -> Any:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group, async_op=True).wait()
    return torch.cat(parts) * 2


@form
def all_gather_into_tensor(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(4 * group.size(), 3)
    dist.all_gather_into_tensor(out, x, group=group)
    return out * 2


@form
def all_gather_into_stacked_tensor(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(group.size(), 4, 3)
    dist.all_gather_into_tensor(out, x, group=group)
    return out * 2


@form
def all_gather_into_tensor_async(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(4 * group.size(), 3)
    work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
    work.wait()
    return out * 2


def lists_for_two(x: torch.Tensor, group: Any) -> list[list[torch.Tensor]]:
    return [[torch.empty_like(x), x.new_empty(2)] for _ in range(group.size())]


@form
def all_gather_coalesced(x: torch.Tensor, group: Any) -> Any:
    parts = lists_for_two(x, group)
    dist.all_gather_coalesced(parts, [x, x[0, :2] + 1], group=group)
    return parts


@form
def all_gather_coalesced_async(x: torch.Tensor, group: Any) -> Any:
    parts = lists_for_two(x, group)
    future: Any = dist.all_gather_coalesced(parts, [x, x[0, :2] + 1], group=group, async_op=True)
    return future.then(lambda done: done.value()[1] * 2).wait(), future.wait(), parts


@form
def gather(x: torch.Tensor, group: Any) -> Any:
    parts = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 1 else None
    dist.gather(x, parts, dst=1, group=group)
    return torch.cat(parts) * 2 if parts else x


@form
def gather_async(x: torch.Tensor, group: Any) -> Any:
    parts = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(x, parts, group=group, async_op=True).wait()
    return torch.cat(parts) * 2 if parts else x


@form
def all_gather_single(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(4 * group.size(), 3)
    dist.all_gather_single(out, x, group=group)
    return out * 2


@form
def reduce_scatter_single(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(4, 3)
    dist.reduce_scatter_single(out, x.repeat(group.size(), 1), group=group)
    return out * 2


if hasattr(dist, "gather_single"):  # since torch 2.14

    @form
    def gather_single(x: torch.Tensor, group: Any) -> Any:
        out = x.new_empty(4 * group.size(), 3) if group.rank() == 0 else None
        getattr(dist, "gather_single")(x, out, group=group)  # noqa: B009  not in mypy's torch
        return x if out is None else out * 2


@form
def scatter(x: torch.Tensor, group: Any) -> Any:
    parts = [x + rank for rank in range(group.size())] if group.rank() == 1 else None
    out = torch.empty_like(x)
    dist.scatter(out, parts, src=1, group=group)
    return out * 2


@form
def scatter_async(x: torch.Tensor, group: Any) -> Any:
    parts = [x + rank for rank in range(group.size())] if group.rank() == 0 else None
    out = torch.empty_like(x)
    dist.scatter(out, parts, src=0, group=group, async_op=True).wait()
    return out * 2


@form
def reduce_scatter(x: torch.Tensor, group: Any) -> Any:
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x + rank for rank in range(group.size())], group=group)
    return out * 2


@form
def reduce_scatter_uneven(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(group.rank() + 1, 3)
    dist.reduce_scatter(out, [x[: rank + 1] for rank in range(group.size())], group=group)
    return out * 2


@form
def reduce_scatter_async(x: torch.Tensor, group: Any) -> Any:
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x + rank for rank in range(group.size())], group=group, async_op=True).wait()
    return out * 2


@form
def reduce_scatter_tensor(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(4, 3)
    dist.reduce_scatter_tensor(out, x.repeat(group.size(), 1), group=group)
    return out * 2


@form
def reduce_scatter_tensor_async(x: torch.Tensor, group: Any) -> Any:
    out = x.new_empty(4, 3)
    dist.reduce_scatter_tensor(out, x.repeat(group.size(), 1), group=group, async_op=True).wait()
    return out * 2


@form
def all_to_all(x: torch.Tensor, group: Any) -> Any:
    out = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_to_all(out, [x + rank for rank in range(group.size())], group=group)
    return torch.cat(out) * 2


@form
def all_to_all_uneven(x: torch.Tensor, group: Any) -> Any:
    out = [x.new_empty(group.rank() + 1, 3) for _ in range(group.size())]
    dist.all_to_all(out, [x[: rank + 1] for rank in range(group.size())], group=group)
    return torch.cat(out) * 2


@form
def all_to_all_async(x: torch.Tensor, group: Any) -> Any:
    out = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_to_all(out, [x + rank for rank in range(group.size())], group=group, async_op=True).wait()
    return torch.cat(out) * 2


@form
def all_to_all_single(x: torch.Tensor, group: Any) -> Any:
    source = x.repeat(group.size(), 1)
    out = torch.empty_like(source)
    dist.all_to_all_single(out, source, group=group)
    return out * 2


@form
def all_to_all_single_uneven(x: torch.Tensor, group: Any) -> Any:
    sizes = [rank + 1 for rank in range(group.size())]
    source = x.repeat(group.size(), 1)[: sum(sizes)]
    out = x.new_empty((group.rank() + 1) * group.size(), 3)
    dist.all_to_all_single(out, source, [group.rank() + 1] * group.size(), sizes, group=group)
    return out * 2


@form
def all_to_all_single_async(x: torch.Tensor, group: Any) -> Any:
    source = x.repeat(group.size(), 1)
    out = torch.empty_like(source)
    dist.all_to_all_single(out, source, group=group, async_op=True).wait()
    return out * 2


@form
def barrier(x: torch.Tensor, group: Any) -> Any:
    dist.barrier(group=group)
    return x * 2


@form
def barrier_async(x: torch.Tensor, group: Any) -> Any:
    work = dist.barrier(group=group, async_op=True)
    y = x * 2
    work.wait()
    return y


@form
def send_recv(x: torch.Tensor, group: Any) -> Any:
    out = torch.empty_like(x)
    if group.rank() == 0:
        dist.send(x, 1, group=group)
        dist.recv(out, 1, group=group)
    elif group.rank() == 1:
        dist.recv(out, 0, group=group)
        dist.send(x + out, 0, group=group)
    return out * 2 if group.rank() < 2 else x


@form
def isend_irecv(x: torch.Tensor, group: Any) -> Any:
    size, rank = group.size(), group.rank()
    out = torch.empty_like(x)
    works: list[Any] = [dist.isend(x, (rank + 1) % size, group=group), dist.irecv(out, (rank - 1) % size, group=group)]
    for work in works:
        work.wait()
    return out * 2


@form
def batch_isend_irecv(x: torch.Tensor, group: Any) -> Any:
    size, rank = group.size(), group.rank()
    out = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % size, group), dist.P2POp(dist.irecv, out, (rank - 1) % size, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out * 2
