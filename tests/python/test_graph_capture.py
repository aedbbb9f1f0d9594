"""Every form of call is in one graph, and gives what it gives without a graph."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import muster.graph
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from graph_forms import FORMS
from ranks import run_ranks

# What has a gradient without a graph, too.
DIFFERENTIABLE = [
    name for name in FORMS if name.startswith("nn_") or "autograd" in name or name.endswith("_tensor_uneven")
]


def compare_forms(rank: int, compiler: str, names: list[str], needs_gradient: bool) -> dict[str, str]:
    """The forms that differ in a graph, and how."""
    torch.set_num_threads(1)
    failures = {}
    for name in names:
        torch._dynamo.reset()
        try:
            compare(FORMS[name], compiler, rank, needs_gradient)
        except Exception:
            failures[name] = traceback.format_exc()
    return failures


def compare(form: Any, compiler: str, rank: int, needs_gradient: bool, group: Any = None) -> None:
    results = []
    for function in (form, torch.compile(form, backend=compiler, fullgraph=True)):
        x = (torch.arange(12.0).reshape(4, 3) * (rank + 1)).requires_grad_(needs_gradient)
        output = function(x, group or dist.group.WORLD)
        if needs_gradient:
            weight = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape) + rank
            (output * weight).sum().backward()
        results.append((output, x.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0])


def assert_equal(
    size: int, compiler: str, names: list[str], needs_gradient: bool = False, env: dict[str, str] | None = None
) -> None:
    answers = run_ranks(size, compare_forms, compiler, names, needs_gradient, env=env, timeout=500)
    for rank, failures in enumerate(answers):
        assert not failures, f"rank {rank}, {size} ranks: {list(failures)}\n{next(iter(failures.values()))}"


def test_there_are_forms_of_every_call() -> None:
    assert len(FORMS) >= 60


def test_each_form_is_captured() -> None:
    assert_equal(2, "aot_eager", list(FORMS))


def test_each_form_has_the_gradient_that_it_has_without_a_graph() -> None:
    assert_equal(2, "aot_eager", DIFFERENTIABLE, needs_gradient=True)


def differentiate_uneven(rank: int) -> None:
    """The gradients from their definition: what each rank's input adds to the sum of all ranks' losses."""
    torch.set_num_threads(1)
    sizes = [3, 0, 2]
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    weights = [torch.arange(10.0).reshape(5, 2) + 10 * each for each in range(3)]  # of each rank's loss

    def gather(x: torch.Tensor) -> torch.Tensor:
        return (muster.graph.all_gather_into_tensor_uneven(x, sizes) * weights[rank]).sum()

    def scatter(x: torch.Tensor, op: Any) -> torch.Tensor:
        return (muster.graph.reduce_scatter_tensor_uneven(x, sizes, op) * weights[rank][begin:end]).sum()

    own_rows = torch.cat([weights[each][sum(sizes[:each]) : sum(sizes[: each + 1])] for each in range(3)])
    for make in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        x = torch.ones(sizes[rank], 2, requires_grad=True)
        make(gather)(x).backward()
        torch.testing.assert_close(x.grad, sum(weights)[begin:end])  # type: ignore[index]
        for op, factor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 1 / 3)):
            x = torch.ones(5, 2, requires_grad=True)
            make(scatter)(x, op).backward()
            torch.testing.assert_close(x.grad, own_rows * factor)


def test_uneven_calls_have_the_gradient_of_their_definition() -> None:
    run_ranks(3, differentiate_uneven, timeout=400)


def call_in_part(rank: int) -> None:
    torch.set_num_threads(1)
    group = dist.new_group([0, 1])
    if rank == 2:

        def reduce(x: torch.Tensor) -> Any:
            return dist.all_reduce(x, group=group)

        assert torch.compile(reduce, backend="aot_eager", fullgraph=True)(torch.ones(1)) is None
        return
    for name in ("all_reduce", "broadcast_async", "gather", "all_gather_uneven", "batch_isend_irecv", "nn_scatter"):
        compare(FORMS[name], "aot_eager", rank, False, group)


def test_calls_in_a_part_of_the_ranks_are_captured() -> None:
    run_ranks(3, call_in_part, timeout=400)


def call_in_mesh(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def functional(x: torch.Tensor, group: Any) -> Any:
        return funcol.all_reduce(x, "sum", (mesh, 0)), funcol.all_gather_tensor(x, 0, mesh["b"])

    def in_place(x: torch.Tensor, group: Any) -> Any:
        dist.all_reduce(x, group=mesh.get_group("a"))
        work: Any = dist.broadcast(x, group=mesh.get_group("b"), group_src=1, async_op=True)
        work.wait()
        return x * 2

    for form in (functional, in_place):
        compare(form, "aot_eager", rank, False)


def test_calls_in_the_groups_of_a_mesh_are_captured() -> None:
    run_ranks(4, call_in_mesh, timeout=400)


def keep_work(rank: int) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def begin(x: torch.Tensor) -> Any:
        return dist.all_reduce(x, async_op=True)

    x = torch.ones(3) * (rank + 1)
    work = begin(x)
    assert work.wait()
    assert x.tolist() == [3, 3, 3]


def test_a_work_may_leave_the_graph() -> None:
    run_ranks(2, keep_work, timeout=400)


def send_objects(rank: int) -> None:
    def exchange(x: torch.Tensor) -> Any:
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        return x * 2, objects

    doubled, objects = torch.compile(exchange, backend="aot_eager")(torch.ones(1))
    assert doubled.tolist() == [2]
    assert objects == [{"rank": 0}, {"rank": 1}]
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"all_gather_object\(\) sends Python objects, which a graph cannot hold"):
        torch.compile(exchange, backend="aot_eager", fullgraph=True)(torch.ones(1))


def test_a_call_with_objects_is_outside_the_graph_and_says_so() -> None:
    run_ranks(2, send_objects, timeout=400)


def logged_all_to_all(output: Any, tensor: Any, group: Any = None, log_name: str = "", prof: bool = False) -> Any:
    with open("/dev/null") as log:  # what Dynamo cannot trace
        log.read()
    return dist.all_to_all_single(output, tensor, group=group)


def wrap_calls(rank: int) -> None:
    def exchange(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        logged_all_to_all(output, tensor=x, log_name="layer 1", prof=True)
        return output

    muster.graph.patch(logged_all_to_all, "all_to_all_single")
    muster.graph.patch(f"{__name__}.logged_all_to_all", "all_to_all_single")
    x = torch.arange(4.0) + 10 * rank
    compiled = torch.compile(exchange, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(compiled, exchange(x))
    with pytest.raises(ValueError, match=r"logged_all_to_all: a graph cannot hold torch.distributed.logged_all_to_all"):
        muster.graph.patch(logged_all_to_all)


def test_a_wrapper_of_another_package_can_be_captured() -> None:
    run_ranks(2, wrap_calls, timeout=400)


def timed(*args: Any, **kwargs: Any) -> Any:
    with open("/dev/null") as log:
        log.read()
    return dist.all_reduce(*args, **kwargs)


def labelled(label: str, tensor: Any, *args: Any, op: Any = dist.ReduceOp.MAX, **kwargs: Any) -> Any:
    return timed(tensor, op, *args, **kwargs)


def pass_arguments(rank: int) -> None:
    alone = [dist.new_group([each]) for each in range(2)][rank]
    muster.graph.patch(timed, "all_reduce")
    muster.graph.patch(labelled, "all_reduce")
    calls: list[Callable[[Any], Any]] = [
        lambda x: timed(x),
        lambda x: timed(x, dist.ReduceOp.MAX),
        lambda x: timed(x, op=dist.ReduceOp.MAX, group=alone),
        lambda x: timed(tensor=x, group=alone),
        lambda x: labelled("layer 1", x),
        lambda x: labelled("layer 1", x, alone),
        lambda x: labelled("layer 1", tensor=x, op=dist.ReduceOp.MIN, async_op=False),
    ]
    for number, call in enumerate(calls):
        eager, captured = (torch.arange(3.0) * (1 - 3 * rank) for _ in range(2))
        call(eager)
        torch._dynamo.reset()
        torch.compile(call, backend="aot_eager", fullgraph=True)(captured)
        assert torch.equal(eager, captured), number
    mistakes: list[tuple[str, Callable[[Any], Any]]] = [
        (r"torch.distributed.all_reduce\(\) has no argument 'color'", lambda x: timed(x, color=1)),
        ("5 arguments by position, but at most 4 are known", lambda x: timed(x, dist.ReduceOp.SUM, None, False, 1)),
    ]
    for words, wrong in mistakes:
        with pytest.raises(Exception, match=words):
            torch.compile(wrong, backend="aot_eager", fullgraph=True)(torch.ones(1))


def test_a_wrapper_passes_on_what_the_caller_gives() -> None:
    run_ranks(2, pass_arguments, timeout=400)


def make_mistakes(rank: int) -> None:
    x = torch.ones(4, 2)
    mistakes: list[tuple[str, Any]] = [
        ("split_sizes has 1 numbers for 2 ranks", lambda: muster.graph.all_gather_into_tensor_uneven(x, [4])),
        ("has 4 rows, not 7 as in split_sizes", lambda: muster.graph.reduce_scatter_tensor_uneven(x, [3, 4])),
    ]
    for words, call in mistakes:
        with pytest.raises(ValueError, match=words):
            call()
    gathers = torch.compile(lambda x: dist.gather(x, None, dst=0), backend="aot_eager", fullgraph=True)
    receives = torch.compile(lambda x: dist.recv(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot receive from any rank; give src or group_src"):
        receives(x)
    if rank == 0:
        with pytest.raises(Exception, match="the root, and only the root, needs gather_list"):
            gathers(x)


def test_mistakes_are_errors() -> None:
    run_ranks(2, make_mistakes, timeout=400)


calls: Any = dist  # mypy does not know the lists of tensors
nn_calls: Any = dist_nn
Mistakes = list[tuple[str, Callable[[], Any]]]  # what the error says, and the call


def empties(*sizes: int, dtype: Any = None) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=dtype) for size in sizes]


def wrong_gathers(x: torch.Tensor) -> Mistakes:
    return [
        (r"all_gather: tensor_list\[\d\] has 2 elements, but needs 4", lambda: calls.all_gather(empties(2, 2), x)),
        ("all_gather: tensor_list has length 1, but the group has 2", lambda: calls.all_gather(empties(4), x)),
        (
            "all_gather: .*torch.float32 and torch.float64",
            lambda: calls.all_gather(empties(4, 4, dtype=torch.float64), x),
        ),
        (
            "all_gather_into_tensor: output_tensor has 7 elements, but needs 8",
            lambda: calls.all_gather_into_tensor(*empties(7), x),
        ),
        (
            "all_gather_into_tensor: .*torch.float32 and torch.int64",
            lambda: calls.all_gather_into_tensor(*empties(8, dtype=torch.int64), x),
        ),
        (
            "all_gather_coalesced: output_tensor_lists has length 1, but the group has 2 ranks",
            lambda: calls.all_gather_coalesced([empties(4)], [x]),
        ),
        (
            r"all_gather_coalesced: output_tensor_lists\[0\] has 1 tensors for 2 inputs",
            lambda: calls.all_gather_coalesced([empties(4), empties(4)], [x, x]),
        ),
        (
            r"all_gather_coalesced: the list of outputs for input 0\[0\] has 3 elements, but needs 4",
            lambda: calls.all_gather_coalesced([empties(3), empties(5)], [x]),
        ),
    ]


def wrong_reductions(x: torch.Tensor) -> Mistakes:
    return [
        (
            "all_reduce_coalesced: .*torch.float32 and torch.int32",
            lambda: calls.all_reduce_coalesced([x, x.to(torch.int32)]),
        ),
        ("reduce_scatter: output has 3 elements, but needs 4", lambda: calls.reduce_scatter(*empties(3), [x, x])),
        (
            "reduce_scatter: input_list has length 3, but the group has 2 ranks",
            lambda: calls.reduce_scatter(*empties(4), [x, x, x]),
        ),
        (
            "reduce_scatter: .*torch.float32 and torch.float64",
            lambda: calls.reduce_scatter(*empties(4), [x, x.double()]),
        ),
        (
            "reduce_scatter_tensor: input has 4 elements, but needs 8",
            lambda: calls.reduce_scatter_tensor(*empties(4), x),
        ),
    ]


def wrong_all_to_alls(x: torch.Tensor) -> Mistakes:
    return [
        (
            "all_to_all: output_tensor_list has length 1, but the group has 2 ranks",
            lambda: calls.all_to_all(empties(8), [x, x]),
        ),
        ("all_to_all: .*torch.float32 and torch.float64", lambda: calls.all_to_all(empties(4, 4), [x, x.double()])),
        (
            "all_to_all_single: output_split_sizes has length 1, but the group has 2 ranks",
            lambda: calls.all_to_all_single(*empties(4), x, [4], [2, 2]),
        ),
        (
            "all_to_all_single: the input has 3 rows, which cannot be split evenly among 2 ranks",
            lambda: calls.all_to_all_single(*empties(4), x[:3]),
        ),
        (
            "all_to_all_single: .*torch.float32 and torch.int64",
            lambda: calls.all_to_all_single(*empties(4, dtype=torch.int64), x),
        ),
    ]


def wrong_at_root(x: torch.Tensor) -> Mistakes:
    return [
        ("gather: gather_list has length 3, but the group has 2", lambda: calls.gather(x, empties(4, 4, 4), dst=0)),
        (r"gather: gather_list\[1\] has 5 elements, but needs 4", lambda: calls.gather(x, empties(4, 5), dst=0)),
        ("scatter: scatter_list has length 1, but the group has 2", lambda: calls.scatter(x, empties(4), src=0)),
        (r"scatter: scatter_list\[0\] has 3 elements, but needs 4", lambda: calls.scatter(x, empties(3, 3), src=0)),
    ]


def wrong_calls_with_gradients(x: torch.Tensor) -> Mistakes:
    """Without a graph, torch does not check these at all ranks."""
    return [
        (
            r"reduce_scatter: input_list\[1\] has 2 elements, but needs 4",
            lambda: nn_calls.reduce_scatter(*empties(4), [x, x[:2]]),
        ),
        (
            "all_to_all: input_tensor_list has length 1, but the group has 2 ranks",
            lambda: nn_calls.all_to_all(empties(4, 4), [x]),
        ),
    ]


def give_wrong_tensors(rank: int) -> None:
    x = torch.ones(4)
    mistakes = wrong_gathers(x) + wrong_reductions(x) + wrong_all_to_alls(x) + (wrong_at_root(x) if rank == 0 else [])
    for _, call in mistakes:
        with pytest.raises((ValueError, RuntimeError)):
            call()
    for words, call in mistakes + wrong_calls_with_gradients(x):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            torch.compile(call, backend="aot_eager", fullgraph=True)()


def test_wrong_sizes_and_dtypes_are_errors() -> None:
    run_ranks(2, give_wrong_tensors, timeout=400)
