"""In which order the tasks of a graph run, so that ranks compute while their messages are on the way.

Pure functions: they know neither torch nor Inductor. A rank has two resources: it computes one task at a time, and its
messages use the wire one after the other, in the order in which they begin.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_SLACK = 2.0  # a late message begins early enough for costs that are wrong by this factor


class Kind(enum.Enum):
    COMPUTE = "compute"
    START = "start"  # of a collective; it does not wait for it
    WAIT = "wait"  # for a collective


@dataclass(frozen=True)
class Task:
    kind: Kind
    seconds: float  # of computing; START: on the wire
    needs: frozenset[int] = frozenset()  # indices of tasks that run before this one
    start: int = -1  # WAIT: the index of its START, which is also in `needs`
    bytes: int = 0  # START: memory of the result, from the start until all that need it have run
    # To begin a message takes the rank some time. A START or WAIT that works by chunks computes, too, mostly beside its
    # own message: START sends the first chunk when it is computed, WAIT computes with the first chunk when it is there.
    chunks: int = 1
    computing: float = 0.0

    @property
    def rank_seconds(self) -> float:
        """Of computing."""
        return self.seconds if self.kind is Kind.COMPUTE else self.computing


def _message(start: Task, now: float, wire: float) -> tuple[float, float]:
    """When the message of a START that runs at `now` is on the wire, which is busy until `wire`."""
    begin = max(now + start.computing / start.chunks, wire) if start.computing else max(now, wire)
    # The last chunk is sent when all are computed.
    return begin, max(begin + start.seconds, now + start.computing + start.seconds / start.chunks)


def _arrival(wait: Task, start: Task, end: float) -> float:
    """When a WAIT can go on, whose message ends at `end`: when its first chunk is there."""
    return end - start.seconds * (1 - 1 / wait.chunks)


def _finish(wait: Task, now: float, end: float) -> float:
    """When a WAIT that goes on at `now` has computed: the last chunk after the end of the message."""
    return max(now + wait.computing, end + wait.computing / wait.chunks if wait.computing else now)


@dataclass
class Timeline:
    """When each task runs, in seconds from the beginning; START: when its message is on the wire; WAIT: when the rank
    does nothing but wait.
    """

    begin: list[float]
    end: list[float]
    computing: list[tuple[float, float]]  # when the rank computes
    total: float = 0.0
    exposed: float = 0.0  # how long the rank computes nothing because it waits

    @classmethod
    def of(cls, count: int) -> Timeline:
        """For so many tasks."""
        return cls([0.0] * count, [0.0] * count, [(0.0, 0.0)] * count)


@dataclass
class _State:
    """What has happened up to `now`."""

    now: float = 0.0
    wire: float = 0.0  # when the last message that has begun ends
    pending: int = 0  # bytes of results that are still needed
    ends: dict[int, float] = field(default_factory=dict)  # of messages, by START


def timeline(tasks: Sequence[Task], order: Sequence[int]) -> Timeline:
    """When the tasks run in this order."""
    result = Timeline.of(len(tasks))
    now = wire = 0.0
    for index in order:
        task = tasks[index]
        begin, before = now, now
        if task.kind is Kind.START:
            result.begin[index], wire = _message(task, now, wire)
            result.end[index] = wire
            now += task.computing
        elif task.kind is Kind.WAIT:
            end = result.end[task.start]
            begin = max(now, _arrival(task, tasks[task.start], end))
            now = _finish(task, begin, end)
            result.begin[index], result.end[index] = before, begin
        else:
            now += task.seconds
            result.begin[index], result.end[index] = before, now
        result.computing[index] = begin, now
        result.exposed += now - before - task.rank_seconds
    result.total = max(now, wire)
    return result


def most_bytes(tasks: Sequence[Task], order: Sequence[int]) -> int:
    """The most memory that results of collectives take at a time, if the tasks run in this order."""
    holds = _holds(tasks, _users(tasks))
    held = most = 0
    for index in order:
        if tasks[index].kind is Kind.START:
            held += tasks[index].bytes
            most = max(most, held)
        held -= sum(tasks[start].bytes for start in holds.freed_by(index))
    return most


def lower_bound(tasks: Sequence[Task]) -> float:
    """No order takes less: all computing, all messages, and the longest path."""
    computing = sum(task.rank_seconds for task in tasks)
    messages = sum(task.seconds for task in tasks if task.kind is Kind.START)
    return max(computing, messages, *_tails(tasks))


def order(tasks: Sequence[Task], max_bytes: float = float("inf")) -> list[int]:
    """An order in which waits cost little: list scheduling (Graham 1969) by four rules; the best order is taken. The
    task that runs first is the one with (1) the longest path to the end, which delays messages while much computing is
    left; (2) the longest path of messages, which ignores computing; (3) the least computing before the next message,
    which keeps the wire busy. Messages begin as soon as they can. (4) sends first what is needed first: of messages,
    the path after them counts, and none begins before the wire needs it, because a more urgent one may be ready then.

    max_bytes: results of collectives that are started early may take so much memory. It is exceeded only if nothing
    else can run.

    Equal tasks give equal orders, so ranks that have the same tasks start their collectives in the same order.
    """
    tails = _tails(tasks)
    on_wire = _tails([_without_computing(task) for task in tasks])
    soonest = [-seconds for seconds in _seconds_to_start(tasks)]
    after = [tail - task.seconds if task.kind is Kind.START else tail for tail, task in zip(tails, tasks, strict=True)]
    rules = (tails, list(zip(on_wire, tails, strict=True)), list(zip(soonest, tails, strict=True)))
    orders = [_list_schedule(tasks, each, max_bytes) for each in rules]
    orders.append(_list_schedule(tasks, after, max_bytes, _SLACK))
    return min(orders, key=lambda each: timeline(tasks, each).total)


def _list_schedule(
    tasks: Sequence[Task], urgencies: Sequence[Any], max_bytes: float, slack: float = math.inf
) -> list[int]:
    """Of the tasks that can run, the most urgent one runs first. Messages begin as soon as they can, or, with a finite
    slack, when the wire would be idle before the rank has done what comes next.
    """
    users = _users(tasks)
    missing = [len(task.needs) for task in tasks]
    holds = _holds(tasks, users)
    places = {urgency: place for place, urgency in enumerate(sorted(set(urgencies), reverse=True))}
    starts: list[tuple[float, int]] = []
    waits: list[tuple[float, int]] = []  # by the end of their messages
    ready: list[tuple[float, int]] = []  # tasks to compute, and waits for messages that have ended
    state = _State()
    result: list[int] = []

    def offer(index: int) -> None:
        task = tasks[index]
        if task.kind is Kind.START:
            heapq.heappush(starts, (places[urgencies[index]], index))
        elif task.kind is Kind.WAIT:
            heapq.heappush(waits, (_arrival(task, tasks[task.start], state.ends[task.start]), index))
        else:
            heapq.heappush(ready, (places[urgencies[index]], index))

    def run(index: int) -> None:
        task = tasks[index]
        if task.kind is Kind.START:
            state.wire = state.ends[index] = _message(task, state.now, state.wire)[1]
            state.pending += task.bytes
            state.now += task.computing
        elif task.kind is Kind.WAIT:
            end = state.ends[task.start]
            state.now = _finish(task, max(state.now, _arrival(task, tasks[task.start], end)), end)
        else:
            state.now += task.seconds
        result.append(index)
        for start in holds.freed_by(index):
            state.pending -= tasks[start].bytes
        for user in users[index]:
            missing[user] -= 1
            if missing[user] == 0:
                offer(user)

    for index, count in enumerate(missing):
        if count == 0:
            offer(index)
    while starts or waits or ready:
        while waits and waits[0][0] <= state.now:
            index = heapq.heappop(waits)[1]
            heapq.heappush(ready, (places[urgencies[index]], index))
        done = state.now + tasks[ready[0][1]].rank_seconds if ready else waits[0][0] if waits else math.inf
        needed = slack == math.inf or state.wire <= state.now + slack * (done - state.now)
        fits = starts and state.pending + tasks[starts[0][1]].bytes <= max_bytes
        run(heapq.heappop(starts if fits and needed else ready or waits or starts)[1])
    if len(result) != len(tasks):
        raise ValueError("the tasks need each other in a circle")
    return result


def _users(tasks: Sequence[Task]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for need in sorted(task.needs):
            users[need].append(index)
    return users


def _without_computing(task: Task) -> Task:
    return replace(task, seconds=task.seconds if task.kind is Kind.START else 0.0, computing=0.0, chunks=1)


def _tails(tasks: Sequence[Task]) -> list[float]:
    """The length of the longest path from the beginning of each task to the end."""
    users = _users(tasks)
    tails = [0.0] * len(tasks)
    for index in reversed(_sorted(tasks, users)):
        task = tasks[index]
        longest = end = _message(task, 0.0, 0.0)[1] if task.kind is Kind.START else task.rank_seconds
        for user in users[index]:
            is_wait = task.kind is Kind.START and tasks[user].start == index
            longest = max(longest, tails[user] + (_arrival(tasks[user], task, end) if is_wait else task.rank_seconds))
        tails[index] = longest
    return tails


def _seconds_to_start(tasks: Sequence[Task]) -> list[float]:
    """The least computing from each task, with it, to the next start of a collective. Infinite if none follows."""
    users = _users(tasks)
    result = [math.inf] * len(tasks)
    for index in reversed(_sorted(tasks, users)):
        if tasks[index].kind is Kind.START:
            result[index] = tasks[index].computing / tasks[index].chunks
        else:
            result[index] = tasks[index].rank_seconds + min((result[user] for user in users[index]), default=math.inf)
    return result


def _sorted(tasks: Sequence[Task], users: list[list[int]]) -> list[int]:
    missing = [len(task.needs) for task in tasks]
    result = [index for index, count in enumerate(missing) if count == 0]
    for index in result:  # grows
        for user in users[index]:
            missing[user] -= 1
            if missing[user] == 0:
                result.append(user)
    return result


class _Holds:
    """Which tasks must have run before the result of a collective is not needed any more."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # by START
        self._starts: dict[int, list[int]] = {}  # by the task that needs its result

    def add(self, start: int, users: set[int]) -> None:
        self._left[start] = self._left.get(start, 0) + len(users)
        for user in users:
            self._starts.setdefault(user, []).append(start)

    def freed_by(self, index: int) -> list[int]:
        freed = []
        for start in self._starts.pop(index, ()):
            self._left[start] -= 1
            if self._left[start] == 0:
                freed.append(start)
        return freed


def _holds(tasks: Sequence[Task], users: list[list[int]]) -> _Holds:
    holds = _Holds()
    for index, task in enumerate(tasks):
        if task.kind is Kind.WAIT:
            holds.add(task.start, {index, *users[index]})
    return holds
