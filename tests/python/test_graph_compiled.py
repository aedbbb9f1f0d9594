"""Graphs with collectives that Inductor has compiled."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from graph_forms import FORMS
from ranks import run_ranks
from test_graph_capture import assert_equal
from torch.utils.checkpoint import checkpoint

SIDE = 2048


def test_each_form_gives_the_same_when_it_is_compiled() -> None:
    assert_equal(2, "inductor", list(FORMS))


def test_a_rank_finds_its_own_code_in_the_cache(tmp_path: Path) -> None:
    """What the graphs of two ranks differ in must be in the key of Inductor's cache, which they share."""
    names = [name for name in FORMS if "uneven" in name or "gather" in name or "scatter" in name]
    for _ in ("compiles", "finds"):
        assert_equal(2, "inductor", names, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})


def test_each_form_is_captured_at_three_ranks() -> None:
    assert_equal(3, "aot_eager", list(FORMS))


def send_late(rank: int) -> None:
    """Rank 1 receives only after a reduction. For its tensor rank 0 needs memory while the send is pending."""

    @torch.compile(fullgraph=True)
    def send(x: torch.Tensor) -> torch.Tensor:
        work: Any = dist.isend(x * 2, 1)
        product = x @ x
        dist.all_reduce(product)
        work.wait()
        return product

    @torch.compile(fullgraph=True)
    def receive(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ x
        dist.all_reduce(product)
        message = torch.empty_like(product)
        dist.recv(message, 0)
        return product, message

    torch.set_num_threads(1)
    x = torch.eye(SIDE) * 3
    for _ in range(3):
        if rank == 0:
            product = send(x)
        else:
            product, message = receive(x)
            assert torch.equal(message, x * 2)
        assert torch.equal(product, x * 6)


def send_equal_messages(rank: int) -> None:
    """torch merges equal calls in graphs with gradients."""
    weights = torch.ones(4, requires_grad=True)
    message = torch.arange(4.0)

    @torch.compile(fullgraph=True)
    def send(weights: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        result = weights * message
        for each in (message, message, 2 * message):
            dist.send(each, 1)
        return result.sum()

    @torch.compile(fullgraph=True)
    def receive(weights: torch.Tensor) -> torch.Tensor:
        messages = [torch.zeros(4) for _ in range(3)]
        for each in messages:
            dist.recv(each, 0)
        return (weights * (messages[0] + 10 * messages[1] + 100 * messages[2])).sum()

    if rank == 0:
        send(weights, message).backward()  # type: ignore[no-untyped-call]
    else:
        receive(weights).backward()  # type: ignore[no-untyped-call]
        assert torch.equal(weights.grad, 211 * message)  # type: ignore[arg-type]


def test_equal_messages_are_not_merged() -> None:
    run_ranks(2, send_equal_messages, timeout=100)


def begin_only(rank: int, compiler: str) -> None:
    """Nothing waits for these calls. The tensor of the gradient must be sent once, not in backward again."""
    torch.set_num_threads(1)

    @torch.compile(backend=compiler, fullgraph=True)
    def step(x: torch.Tensor, message: torch.Tensor, weights: torch.Tensor) -> Any:
        parts, whole = [torch.empty_like(x) for _ in range(2)], x.new_empty(8)
        dist.all_reduce(x[1:], async_op=True)
        dist.all_gather(parts, message, async_op=True)
        dist.all_gather_into_tensor(whole, message, async_op=True).get_future()
        received = torch.empty_like(message)
        if rank == 0:
            dist.isend(message, 1)
        else:
            dist.irecv(received, 0)
        return (message * weights).sum(), parts, whole, received

    for number in range(2):
        x, weights = torch.ones(4) + rank, torch.ones(4, requires_grad=True)
        message = torch.arange(4.0) + 10 * rank + number
        loss, parts, whole, received = step(x, message, weights)
        loss.backward()
        first = torch.arange(4.0) + number
        both = torch.cat([first, first + 10])
        assert x.tolist() == [1 + rank, 3, 3, 3]
        assert torch.equal(torch.cat(parts), both)
        assert torch.equal(whole, both)
        assert rank == 0 or torch.equal(received, first)
        assert torch.equal(weights.grad, message)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor", "muster"])
def test_calls_that_nothing_waits_for_end_with_the_graph(compiler: str) -> None:
    run_ranks(2, begin_only, compiler, timeout=400)


def wait_in_next_graph(rank: int) -> None:
    """The work leaves the first graph, which must not wait for it: rank 1 would send only then."""
    torch.set_num_threads(1)

    @torch.compile
    def receive(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        work: Any = dist.irecv(out, 1)
        x = x * 2
        torch._dynamo.graph_break()
        dist.send(x, 1)
        work.wait()
        return out + x

    x = torch.ones(4)
    if rank == 0:
        assert receive(x).tolist() == [7, 7, 7, 7]
    else:
        message = torch.empty(4)
        dist.recv(message, 0)
        dist.send(message + 3, 0)


def test_a_work_may_cross_a_graph_break() -> None:
    run_ranks(2, wait_in_next_graph, timeout=400)


def mix_dtypes(rank: int) -> None:
    torch.set_num_threads(1)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        tensors = [x.to(dtype) for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.uint8)]
        for each in tensors:
            dist.all_reduce(each)
        gathered = [each.new_empty(2 * len(x)) for each in tensors]
        for whole, part in zip(gathered, tensors, strict=True):
            dist.all_gather_into_tensor(whole, part + rank)
        return tensors + gathered

    compiled = torch.compile(step, backend="muster", fullgraph=True)
    inputs = [torch.arange(5.0) + rank for _ in range(2)]
    for actual, expected in zip(compiled(inputs[0]), step(inputs[1]), strict=True):
        torch.testing.assert_close(actual, expected)  # also compares dtypes


def test_collectives_of_several_dtypes_are_not_mixed_up() -> None:
    run_ranks(2, mix_dtypes, timeout=400)


def alias_inputs(rank: int, compiler: str) -> None:
    """The arguments share memory. What a collective writes to one must be in the other."""
    torch.set_num_threads(1)

    def step(whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(rows)
        dist.all_gather_into_tensor(whole[1:3].view(-1), rows[0] + whole[0] + rank)
        return whole * 2 + rows.sum()

    results = []
    for function in (step, torch.compile(step, backend=compiler, fullgraph=True)):
        whole = torch.arange(10.0).reshape(5, 2) + rank
        results.append((function(whole, whole[2:4]), whole))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("compiler", ["aot_eager", "muster"])
def test_arguments_may_share_memory(compiler: str) -> None:
    run_ranks(2, alias_inputs, compiler, timeout=400)


def branch_on_data(rank: int) -> None:
    torch.set_num_threads(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        dist.all_reduce(total)
        if total > 0:  # equal at all ranks
            dist.all_reduce(x)
        return x * 2

    compiled = torch.compile(step, backend="muster")
    for sign in (1, -1):
        inputs = [torch.ones(3) * sign * (rank + 1) for _ in range(2)]
        assert torch.equal(compiled(inputs[0]), step(inputs[1]))
        assert torch.equal(inputs[0], inputs[1])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Dd]ata-dependent"):
        torch.compile(step, backend="muster", fullgraph=True)(torch.ones(3))


def test_a_branch_on_data_ends_the_graph() -> None:
    run_ranks(2, branch_on_data, timeout=400)


def branch_in_the_graph(rank: int, differ: bool) -> None:
    torch.set_num_threads(1)
    reduced: Any = functools.partial(
        functional.all_reduce, reduceOp="sum", group=dist.distributed_c10d._get_default_group()
    )

    def step(x: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        total = x @ x
        dist.all_reduce(total)

        def shrink(y: torch.Tensor) -> torch.Tensor:
            return reduced(reduced(y) / 4) if differ and rank == 1 else reduced(y) / 2

        branched: torch.Tensor = torch.cond(positive, lambda y: reduced(y @ y), shrink, (total,))
        other = x @ x + 1
        dist.all_reduce(other)
        return branched + other

    compiled = torch.compile(step, backend="muster", fullgraph=True)
    x = torch.ones(8, 8) + rank
    for positive in torch.tensor([True, False]):
        if differ:
            with pytest.raises(Exception, match=r"collective 4 of group \w+ is all_reduce.* only 4"):
                compiled(x, positive)
        else:
            torch.testing.assert_close(compiled(x, positive), step(x, positive))


@pytest.mark.parametrize("differ", [False, True])
def test_branches_of_cond_hold_collectives(differ: bool) -> None:
    run_ranks(2, branch_in_the_graph, differ, timeout=400)


def test_memory_of_a_pending_send_is_not_used_again(tmp_path: Path) -> None:
    run_ranks(2, send_late, env={"MUSTER_TRANSPORT": "tcp", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, timeout=400)


def recompute(rank: int, compiler: str) -> None:
    """Backward runs the collectives of forward again."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = [torch.randn(8, 8) for _ in range(3)]

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = differentiable.all_reduce(x @ weight)
        return torch.tanh(total / 8)

    def step(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = checkpoint(block, x, weight, use_reentrant=False)
        return x.square().sum()

    gradients = []
    for function in (step, torch.compile(step, backend=compiler, fullgraph=True)):
        own = [weight.clone().requires_grad_() for weight in weights]
        function(torch.ones(4, 8) + rank, own).backward()  # type: ignore[no-untyped-call]
        gradients.append([weight.grad for weight in own])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("compiler", ["inductor", "muster"])
def test_checkpointed_blocks_run_their_collectives_again(compiler: str) -> None:
    run_ranks(2, recompute, compiler, timeout=400)
