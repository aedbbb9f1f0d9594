"""Graphs with collectives that Inductor has compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from graph_forms import FORMS
from ranks import run_ranks
from test_graph_capture import assert_equal

ROWS = 1 << 20


def test_each_form_gives_the_same_when_it_is_compiled() -> None:
    assert_equal(2, "inductor", list(FORMS))


def test_each_form_is_captured_at_three_ranks() -> None:
    assert_equal(3, "aot_eager", list(FORMS))


def send_late(rank: int) -> None:
    """Rank 0 computes between the beginning and the end of a send, rank 1 receives only after that."""

    @torch.compile(fullgraph=True)
    def send(x: torch.Tensor) -> torch.Tensor:
        message = x * 2
        work: Any = dist.isend(message, 1)
        between = x
        for step in range(8):
            between = (between @ between) / (1 + step)  # needs new memory each time
        dist.barrier()
        work.wait()
        return between

    @torch.compile(fullgraph=True)
    def receive(x: torch.Tensor) -> torch.Tensor:
        message = torch.empty_like(x)
        dist.barrier()
        dist.recv(message, 0)
        return message

    x = torch.ones(1024, ROWS // 1024)
    for _ in range(3):
        message = send(x) if rank == 0 else receive(x)
        if rank == 1:
            assert torch.equal(message, x * 2)


def test_memory_of_a_pending_send_is_not_used_again() -> None:
    run_ranks(2, send_late, env={"MUSTER_TRANSPORT": "tcp"})
