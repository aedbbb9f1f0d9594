"""Runs the actions of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import model
from schedules import BACKWARD, FORWARD, Action, Schedule, Timed
from torch import Tensor, nn
from transports import P2P, Rpc


class Runner:
    """The stages of one rank. Gradients go to the parameters, as those of the mean loss of all microbatches."""

    def __init__(self, schedule: Schedule, rank: int, stages: dict[int, nn.Sequential], transport: P2P | Rpc) -> None:
        self.schedule, self.rank, self.stages, self.transport = schedule, rank, stages, transport
        self._alive: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output, by stage and microbatch
        self._weights: dict[tuple[int, int], list[Callable[[], None]]] = {}  # gradients that are not computed yet
        self._loss = 0.0
        if schedule.splits_backward:
            for stage in stages:
                self._collect_weights(stage, [])

    def step(self, rows: Tensor) -> tuple[float, list[Timed]]:
        """Runs the passes of int64[pieces, CONTEXT + 1]. Returns the loss, which is 0 except on the rank of the last
        stage, and the times of this rank's actions in seconds. Time that is not in an action is spent waiting.
        """
        begun = time.monotonic()
        self._loss = 0.0
        microbatches = rows.chunk(self.schedule.microbatches)
        shape = (len(microbatches[0]), model.CONTEXT, model.WIDTH)
        order = [(action, self._arrives(action)) for action in self.schedule.orders[self.rank]]
        for _, needed in order:
            if needed is not None:
                self.transport.expect(needed.stage % self.schedule.ranks, needed, shape)
        times = []
        for action, needed in order:
            arrived = self.transport.receive(needed) if needed is not None else None
            start = time.monotonic() - begun
            result = self._run(action, arrived, microbatches[action.microbatch])
            times.append(Timed(action, start, time.monotonic() - begun))
            if result is not None:
                following = action.stage + (1 if action.kind == FORWARD else -1)
                self.transport.send(following % self.schedule.ranks, action, result)
        self.transport.finish()
        return self._loss, times

    def _arrives(self, action: Action) -> Action | None:
        """The action on another rank whose result this action takes."""
        needed = action.needs(self.schedule.stages)
        return needed if needed is not None and needed.stage != action.stage else None

    def _run(self, action: Action, arrived: Tensor | None, rows: Tensor) -> Tensor | None:
        """Returns what the next or the previous stage needs."""
        key = (action.stage, action.microbatch)
        if action.kind == FORWARD:
            return self._forward(key, arrived, rows)
        if action.kind == BACKWARD:
            return self._backward(key, arrived)
        for add_gradients in self._weights.pop(key):
            add_gradients()
        return None

    def _forward(self, key: tuple[int, int], arrived: Tensor | None, rows: Tensor) -> Tensor | None:
        given = rows[:, :-1] if arrived is None else arrived.requires_grad_()
        output = self.stages[key[0]](given)
        is_last = key[0] == self.schedule.stages - 1
        if is_last:
            output = model.loss_of(output, rows[:, 1:]) / self.schedule.microbatches
            self._loss += output.item()
        self._alive[key] = (given, output)
        return None if is_last else output.detach()

    def _backward(self, key: tuple[int, int], arrived: Tensor | None) -> Tensor | None:
        given, output = self._alive.pop(key)
        if self.schedule.splits_backward:
            self._weights[key] = []
            self._collect_weights(key[0], self._weights[key])
        output.backward(arrived)
        return given.grad

    def _collect_weights(self, stage: int, later: list[Callable[[], None]]) -> None:
        for layer in self.stages[stage].modules():
            if isinstance(layer, model.Linear):
                layer.later = later
