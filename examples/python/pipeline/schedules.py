"""Pipeline schedules: in which order each rank runs its forward and backward passes, and how long it has to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


@dataclass(frozen=True)
class Action:
    """A pass of one microbatch through one stage.

    kind: FORWARD, BACKWARD, or WEIGHTS: the gradients of the weights, which zero-bubble takes out of the backward pass.
    """

    kind: str
    stage: int
    microbatch: int

    def needs(self, stages: int) -> Action | None:
        """The action whose result this one takes: of a neighboring stage, or of its own."""
        if self.kind == FORWARD:
            return Action(FORWARD, self.stage - 1, self.microbatch) if self.stage > 0 else None
        if self.kind == BACKWARD and self.stage < stages - 1:
            return Action(BACKWARD, self.stage + 1, self.microbatch)
        return Action(FORWARD if self.kind == BACKWARD else BACKWARD, self.stage, self.microbatch)


@dataclass(frozen=True)
class Timed:
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """orders: the actions of each rank, in their order. Stage s is on rank s % ranks."""

    name: str
    stages: int
    microbatches: int
    orders: list[list[Action]]

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of the weights are actions of their own."""
        return self.name == "zero-bubble"

    def expected_bubble(self) -> float:
        """The share of a step in which a rank waits, by formula: all stages are alike, a backward pass takes twice as
        long as a forward pass, half of it is for the weights, and messages take no time.
        """
        waiting = 3.0 * (self.ranks - 1)  # 1 for each forward pass, 2 for each backward pass
        if self.name == "interleaved":
            waiting /= self.stages // self.ranks  # a pass through one stage is so much shorter
        if self.splits_backward:
            waiting /= 3  # only the forward pass remains
        return waiting / (3 * self.microbatches + waiting)

    def simulate(self) -> list[list[Timed]]:
        """The times of each rank's actions under the assumptions of expected_bubble()."""
        stages_per_rank = self.stages // self.ranks
        backward = 1.0 if self.splits_backward else 2.0
        cost = {FORWARD: 1 / stages_per_rank, BACKWARD: backward / stages_per_rank, WEIGHTS: 1 / stages_per_rank}
        ended: dict[Action, float] = {}
        times: list[list[Timed]] = [[] for _ in self.orders]
        while sum(map(len, times)) < sum(map(len, self.orders)):
            before = len(ended)
            for order, done in zip(self.orders, times, strict=True):
                for action in order[len(done) :]:
                    needed = action.needs(self.stages)
                    if needed is not None and needed not in ended:
                        break
                    start = max(done[-1].end if done else 0, ended[needed] if needed else 0)
                    ended[action] = start + cost[action.kind]
                    done.append(Timed(action, start, ended[action]))
            if len(ended) == before:
                raise ValueError(f"schedule {self.name!r}: the ranks wait for each other")
        return times


def bubble_of(times: Sequence[Sequence[Timed]]) -> float:
    """The share of the time in which the ranks wait, from the first start to the last end on any rank."""
    begin, end = min(rank[0].start for rank in times), max(rank[-1].end for rank in times)
    busy = sum(one.end - one.start for rank in times for one in rank)
    return 1 - busy / (len(times) * (end - begin))


def _gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al. 2019). Keeps the activations of all microbatches."""
    return [Action(kind, rank, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """A backward pass follows as soon as possible, then the next forward pass (Narayanan et al. 2019). Rank r keeps the
    activations of ranks - r microbatches.
    """
    forwards = [Action(FORWARD, rank, m) for m in range(microbatches)]
    backwards = [Action(BACKWARD, rank, m) for m in range(microbatches)]
    return _alternate(forwards, backwards, ranks - rank - 1)


def _interleaved(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B with two stages on each rank, so that a rank waits for half as long (Narayanan et al. 2021)."""
    if microbatches % ranks:
        raise ValueError(f"interleaved: {microbatches} microbatches are not a multiple of {ranks} ranks")
    passes = []
    for index in range(2 * microbatches):  # `ranks` microbatches through one stage, then through the other one
        group, place = divmod(index, 2 * ranks)
        passes.append((place // ranks, group * ranks + place % ranks))
    forwards = [Action(FORWARD, rank + half * ranks, m) for half, m in passes]
    backwards = [Action(BACKWARD, rank + (1 - half) * ranks, m) for half, m in passes]
    return _alternate(forwards, backwards, min(len(passes), 2 * (ranks - rank - 1) + ranks))


def _zero_bubble(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B whose gradients of weights fill the gaps: ZB-H1 (Qi et al. 2023). Keeps no more activations than 1F1B does
    on its first rank.
    """
    forwards = [Action(FORWARD, rank, m) for m in range(microbatches)]
    backwards = [Action(BACKWARD, rank, m) for m in range(microbatches)]
    order: list[Action] = []
    late = 0
    for action in _alternate(forwards, backwards, ranks - rank - 1):
        order.append(action)
        if action.kind == BACKWARD and action.microbatch >= rank:  # each rank is that far behind with the weights
            order.append(Action(WEIGHTS, rank, late))
            late += 1
    return order + [Action(WEIGHTS, rank, m) for m in range(late, microbatches)]


def _alternate(forwards: list[Action], backwards: list[Action], first: int) -> list[Action]:
    """`first` forward passes, then one forward and one backward pass in turn, then the other backward passes."""
    first = min(first, len(forwards))
    pairs = zip(forwards[first:], backwards[: len(forwards) - first], strict=True)
    return forwards[:first] + [action for pair in pairs for action in pair] + backwards[len(forwards) - first :]


_ORDERS: dict[str, tuple[Callable[[int, int, int], list[Action]], int]] = {
    "gpipe": (_gpipe, 1),
    "1f1b": (_one_f_one_b, 1),
    "interleaved": (_interleaved, 2),
    "zero-bubble": (_zero_bubble, 1),
}
NAMES = tuple(_ORDERS)


def make(name: str, ranks: int, microbatches: int) -> Schedule:
    """Raises ValueError if the schedule cannot do with this number of microbatches."""
    order, stages_per_rank = _ORDERS[name]
    orders = [order(rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(name, stages_per_rank * ranks, microbatches, orders)
