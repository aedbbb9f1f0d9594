"""Ranks compare what they have compiled, before a graph runs.

A rank whose graph has other collectives would wait in them for ever, or get wrong data. So would one that compiles
again although the others do not.

The keys are in the store of the default group, so that a rank can read those of groups that it is not in. Rank 0 of a
group collects what its ranks have, and writes it to one key, which the others read. A store may hold keys of an earlier
group of the same name, so keys have the group's id. It may hold what ranks wrote before one of them gave up, so each
rank looks for the number that it has drawn.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import secrets
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from muster import _C
from muster._group import backend_of
from muster.errors import MismatchError, TimeoutError  # noqa: A004

_POLL = 0.01  # seconds
# By the default group, and by the phase and the name of a group. After the default group has formed again, all ranks
# begin at 0. The names of its groups may be those of earlier ones.
_rounds: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Call:
    """A collective of a graph."""

    compared: str  # equal at all ranks
    details: str = ""  # may differ: its shape, and the line of the program

    def __str__(self) -> str:
        return f"{self.compared} {self.details}".rstrip()


@dataclass(frozen=True)
class Digest:
    """Of a graph. operators: what it calls, with which groups, and on which results. sizes: of all tensors, too."""

    operators: str
    sizes: str


def agree(groups: list[Any], calls: dict[str, list[Call]], timeout: timedelta) -> None:
    """Compares the calls of each group, by its name, in the order in which they begin.

    Raises MismatchError if ranks have other calls, with the first difference, and TimeoutError if a rank has nothing to
    compare.
    """
    _exchange(groups, "calls", {}, calls, timeout)


def compare(groups: list[Any], digest: Digest, calls: dict[str, list[Call]], timeout: timedelta) -> tuple[bool, bool]:
    """True, True if all ranks of the groups have the same digest; True, False if only sizes differ. Compares calls, as
    agree() does.

    Ranks that are connected through groups get the same answer, also if they share none. Ranks may use different
    groups. If they use the same ones in different orders, their operators differ.
    """
    own = {"operators": digest.operators, "sizes": digest.sizes}
    answers = _exchange(groups, "graphs", own, calls, timeout)
    entries = [entry for found in answers.values() for _, entry in found]
    places = [{entry["place"] for _, entry in found} for found in answers.values()]
    same_operators = len({entry["operators"] for entry in entries}) == 1 and all(len(each) == 1 for each in places)
    return same_operators, same_operators and len({entry["sizes"] for entry in entries}) == 1


# What a rank has for a group, with the first rank of the group that has it.
Answers = list[tuple[int, dict[str, Any]]]


def _exchange(
    groups: list[Any], phase: str, own: dict[str, Any], calls: dict[str, list[Call]], timeout: timedelta
) -> dict[str, Answers]:
    """What differs among the ranks of each group that is connected with these, by its name. All have the same calls."""
    store = c10d._world.pg_map[c10d._get_default_group()][1]
    rounds = _rounds.setdefault(c10d._get_default_group(), collections.Counter())
    connected = [
        (group.group_name, group.size(), f"muster/graph/{phase}/{_id(group)}/{rounds[phase + group.group_name]}")
        for group in groups
    ]
    token = secrets.token_hex(4)
    reader = _Reader(store, time.monotonic() + timeout.total_seconds(), timeout)
    for place, (group, (name, _, key)) in enumerate(zip(groups, connected, strict=True)):
        entry = {**own, "place": place, "calls": _hash(calls.get(name, [])), "groups": connected}
        store.set(f"{key}/{group.rank()}", json.dumps([token, entry]))
    try:
        for group, (name, size, key) in zip(groups, connected, strict=True):
            if group.rank() == 0:
                store.set(key, json.dumps(_collect(reader, group, name, size, key)))
        answers: dict[str, Answers] = {}
        unread = list(connected)
        for name, size, key in unread:  # grows
            if name not in answers:
                answers[name] = reader.collected(name, size, key, token if len(answers) < len(connected) else None)
                unread += [each for _, entry in answers[name] for each in entry["groups"]]
    except TimeoutError:
        for group, (_, _, key) in zip(groups, connected, strict=True):  # the next graph is not compared with this one
            with contextlib.suppress(Exception):
                store.delete_key(f"{key}/{group.rank()}")
                if group.rank() == 0:
                    store.delete_key(key)
        raise
    rounds.update(phase + name for name, _, _ in connected)
    for name, found in sorted(answers.items()):
        _check_calls(reader, name, found, calls.get(name, []))
    return answers


def _id(group: Any) -> str:
    try:
        backend = backend_of(group)
    except RuntimeError:  # it has no CPU backend
        return str(group.group_name)
    return f"{group.group_name}.{_C.backend_id(backend):x}" if backend.name() == "muster" else group.group_name


def _collect(reader: _Reader, group: Any, name: str, size: int, key: str) -> tuple[list[str], Answers]:
    """The numbers that the ranks have drawn, and their entries."""
    tokens: list[str] = []
    first: dict[str, int] = {}
    for rank in range(size):
        token, entry = reader.read(f"{key}/{rank}", name, size, key)
        tokens.append(token)
        first.setdefault(json.dumps(entry), c10d.get_global_rank(group, rank))
    return tokens, [(rank, json.loads(entry)) for entry, rank in first.items()]


class _Reader:
    """Reads keys of the store until a deadline."""

    def __init__(self, store: Any, deadline: float, timeout: timedelta):
        self.store = store
        self._deadline = deadline
        self._timeout = timeout

    def collected(self, group_name: str, size: int, key: str, token: str | None) -> Answers:
        """What rank 0 of the group has collected, with the entry of this rank if that has drawn a number."""
        while True:
            tokens, answers = self.read(key, group_name, size, key)
            if token is None or token in tokens:
                return answers  # type: ignore[no-any-return]
            if time.monotonic() > self._deadline:
                raise self._late(group_name, size, key)
            time.sleep(_POLL)  # tidy: allow(sleep) rank 0 replaces an old value, for which c10d has no event

    def read(self, key: str, group_name: str, size: int, entries: str) -> Any:
        """Raises TimeoutError with the rank of the group whose entry is missing."""
        try:
            self.store.wait([key], timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
            return json.loads(self.store.get(key))
        except Exception as error:
            raise self._late(group_name, size, entries) from error

    def _late(self, group_name: str, size: int, entries: str) -> TimeoutError:
        missing, own, limit = self._missing(size, entries), c10d.get_rank(), f"{self._timeout.total_seconds():g} s"
        if missing is None:
            return TimeoutError(
                f"rank 0 of group {group_name} waits for a rank of another group, which has not compiled the graph "
                f"that rank {own} compiles within {limit}. The error of that rank 0 says which one."
            )
        return TimeoutError(
            f"rank {missing} of group {group_name} has not compiled the graph that rank {own} compiles within {limit}. "
            f"It may have taken another branch, or rank {own} alone compiles again, for an input of another shape."
        )

    def _missing(self, size: int, entries: str) -> int | None:
        """The first rank that reaches its deadline says which one is missing: its own entry is about to be deleted."""
        found = f"{entries}/missing"
        if self.store.check([found]):
            rank = int(self.store.get(found))
            if not self.store.check([f"{entries}/{rank}"]):
                return rank
        missing = next((rank for rank in range(size) if not self.store.check([f"{entries}/{rank}"])), None)
        if missing is not None:
            self.store.set(found, str(missing))
        return missing


def _hash(calls: list[Call]) -> str:
    return hashlib.sha256("\n".join(call.compared for call in calls).encode()).hexdigest()


def _check_calls(reader: _Reader, name: str, found: Answers, calls: list[Call]) -> None:
    """Raises MismatchError if ranks of the group have other calls than its first rank. Both ranks then publish theirs,
    so that all that are connected with them can name the difference.
    """
    first, other = found[0], next((each for each in found if each[1]["calls"] != found[0][1]["calls"]), None)
    if other is None:
        return
    lists = []
    for rank, entry in (first, other):
        _, size, key = next(each for each in entry["groups"] if each[0] == name)
        if rank == c10d.get_rank():
            reader.store.set(f"{key}/calls of {rank}", json.dumps([(call.compared, call.details) for call in calls]))
        lists.append([Call(*each) for each in reader.read(f"{key}/calls of {rank}", name, size, key)])
    raise MismatchError(_difference(name, first[0], lists[0], other[0], lists[1]))


def _difference(group_name: str, rank: int, ours: list[Call], other: int, theirs: list[Call]) -> str:
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        if mine.compared != its.compared:
            return f"collective {number} of group {group_name} is {mine} at rank {rank}, and {its} at rank {other}"
    shorter = min(len(ours), len(theirs))
    longer, more, lacking = (rank, ours, other) if len(ours) > len(theirs) else (other, theirs, rank)
    return (
        f"collective {shorter} of group {group_name} is {more[shorter]} at rank {longer}, and the graph of rank "
        f"{lacking} has only {shorter}"
    )
