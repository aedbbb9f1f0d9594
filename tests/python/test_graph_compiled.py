"""Graphs with collectives that Inductor has compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from graph_forms import FORMS
from ranks import run_ranks
from test_graph_capture import assert_equal

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


def test_memory_of_a_pending_send_is_not_used_again(tmp_path: Path) -> None:
    run_ranks(2, send_late, env={"MUSTER_TRANSPORT": "tcp", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, timeout=400)
