"""Forms of torch's functional collectives, of torch.distributed.nn.functional and of muster.graph.

A form takes x, float32[4, 3], and the group of all ranks. It returns one tensor or several. FORMS has all forms, with
those of graph_forms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import muster.graph
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

Form = Callable[[torch.Tensor, Any], Any]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


@form
def functional_all_reduce(x: torch.Tensor, group: Any) -> Any:
    return funcol.all_reduce(x, "sum", group) * 2


@form
def functional_all_gather(x: torch.Tensor, group: Any) -> Any:
    return funcol.all_gather_tensor(x, 0, group) * 2


@form
def functional_all_gather_dim(x: torch.Tensor, group: Any) -> Any:
    return funcol.all_gather_tensor(x, 1, group) * 2


@form
def functional_reduce_scatter(x: torch.Tensor, group: Any) -> Any:
    return funcol.reduce_scatter_tensor(x.repeat(group.size(), 1), "sum", 0, group) * 2


@form
def functional_all_to_all(x: torch.Tensor, group: Any) -> Any:
    return funcol.all_to_all_single(x.repeat(group.size(), 1), None, None, group) * 2


@form
def functional_broadcast(x: torch.Tensor, group: Any) -> Any:
    return funcol.broadcast(x, 1, group) * 2


@form
def functional_all_reduce_coalesced(x: torch.Tensor, group: Any) -> Any:
    a, b = funcol.all_reduce_coalesced([x, x + 1], "sum", group)
    return a * 2, b * 2


@form
def functional_permute(x: torch.Tensor, group: Any) -> Any:
    return funcol.permute_tensor(x.reshape(-1), [(r + 1) % group.size() for r in range(group.size())], group) * 2


@form
def functional_all_gather_autograd(x: torch.Tensor, group: Any) -> Any:
    return funcol.all_gather_tensor_autograd(x, 0, group) * 2


@form
def functional_reduce_scatter_autograd(x: torch.Tensor, group: Any) -> Any:
    return funcol.reduce_scatter_tensor_autograd(x.repeat(group.size(), 1), "sum", 0, group) * 2


@form
def functional_all_to_all_autograd(x: torch.Tensor, group: Any) -> Any:
    s = [4] * group.size()
    return funcol.all_to_all_single_autograd(x.repeat(group.size(), 1), s, s, group) * 2


@form
def nn_all_reduce(x: torch.Tensor, group: Any) -> Any:
    return dist_nn.all_reduce(x * 1, group=group) * 2


@form
def nn_all_gather(x: torch.Tensor, group: Any) -> Any:
    return torch.cat(dist_nn.all_gather(x, group)) * 2


@form
def nn_reduce_scatter(x: torch.Tensor, group: Any) -> Any:
    return dist_nn.reduce_scatter(torch.empty_like(x), [x + r for r in range(group.size())], group=group) * 2


@form
def nn_all_to_all(x: torch.Tensor, group: Any) -> Any:
    return (
        torch.cat(
            dist_nn.all_to_all(
                [torch.empty_like(x) for _ in range(group.size())], [x + r for r in range(group.size())], group=group
            )
        )
        * 2
    )


@form
def nn_all_to_all_single(x: torch.Tensor, group: Any) -> Any:
    s = x.repeat(group.size(), 1)
    return dist_nn.all_to_all_single(torch.empty_like(s), s, group=group) * 2


@form
def nn_broadcast(x: torch.Tensor, group: Any) -> Any:
    return dist_nn.broadcast(x * 1, 1, group) * 2


@form
def nn_reduce(x: torch.Tensor, group: Any) -> Any:
    y = dist_nn.reduce(x * 1, 1, group=group)
    return y * 2 if group.rank() == 1 else y * 0


@form
def nn_gather(x: torch.Tensor, group: Any) -> Any:
    return torch.cat(dist_nn.gather(x, 1, group)) * (1 if group.rank() == 1 else 0)


@form
def nn_scatter(x: torch.Tensor, group: Any) -> Any:
    return dist_nn.scatter([x + r for r in range(group.size())], 1, group) * 2


@form
def queries(x: torch.Tensor, group: Any) -> Any:
    y = x * dist.get_rank(group) + dist.get_world_size(group)
    if dist.is_initialized() and dist.is_available():
        y = y + dist.get_global_rank(group, 1) + dist.get_group_rank(group, 1) + dist.get_process_group_ranks(group)[1]
    return y + len(dist.get_backend(group))


@form
def all_gather_into_tensor_uneven(x: torch.Tensor, group: Any) -> Any:
    sizes = [r + 1 for r in range(group.size())]
    return muster.graph.all_gather_into_tensor_uneven(x[: sizes[group.rank()]], sizes, group) * 2


@form
def reduce_scatter_tensor_uneven(x: torch.Tensor, group: Any) -> Any:
    sizes = [1] * (group.size() - 1) + [5 - group.size()]
    return muster.graph.reduce_scatter_tensor_uneven(x, sizes, group=group) * 2
