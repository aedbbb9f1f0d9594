"""Two ways to bring activations and gradients to the next rank: messages of torch.distributed, and remote calls."""

from __future__ import annotations

import queue

import torch
import torch.distributed as dist
from schedules import BACKWARD, Action
from torch import Tensor

from muster import rpc

_DEADLINE = 60.0  # seconds


class P2P:
    """isend and irecv, with a tag for each message, because neighbors send and receive in different orders."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._arriving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._leaving: list[dist.Work] = []

    def expect(self, sender: int, action: Action, shape: tuple[int, ...]) -> None:
        """Before a step: the result of this action will come from that rank."""
        message = torch.empty(shape)
        work = dist.irecv(message, sender, tag=self._tag(action))
        assert work is not None, "this rank is in the group"
        self._arriving[action] = (work, message)

    def receive(self, action: Action) -> Tensor:
        work, message = self._arriving.pop(action)
        work.wait()
        return message

    def send(self, receiver: int, action: Action, result: Tensor) -> None:
        work = dist.isend(result, receiver, tag=self._tag(action))
        assert work is not None, "this rank is in the group"
        self._leaving.append(work)

    def finish(self) -> None:
        """After a step: returns when all messages have left."""
        for work in self._leaving:
            work.wait()
        self._leaving.clear()

    def _tag(self, action: Action) -> int:
        return ((action.kind == BACKWARD) * self._stages + action.stage) * self._microbatches + action.microbatch


_mailbox: dict[Action, queue.SimpleQueue[Tensor]] = {}


@rpc.export
def deliver(kind: str, stage: int, microbatch: int, result: Tensor) -> None:
    _mailbox.setdefault(Action(kind, stage, microbatch), queue.SimpleQueue()).put(result)


class Rpc:
    """Each message is a call of deliver() at the worker `stage<rank>`."""

    def __init__(self) -> None:
        self._leaving: list[rpc.Future[None]] = []

    def expect(self, sender: int, action: Action, shape: tuple[int, ...]) -> None:
        pass

    def receive(self, action: Action) -> Tensor:
        return _mailbox.setdefault(action, queue.SimpleQueue()).get(timeout=_DEADLINE)

    def send(self, receiver: int, action: Action, result: Tensor) -> None:
        arguments = (action.kind, action.stage, action.microbatch, result)
        self._leaving.append(rpc.rpc_async(f"stage{receiver}", deliver, args=arguments))

    def finish(self) -> None:
        for call in self._leaving:
            call.wait()
        self._leaving.clear()
