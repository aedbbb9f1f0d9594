"""Ranks compare what they have compiled, before a graph runs.

A rank whose graph has other collectives would wait in them for ever, or get wrong data. So would one that compiles
again although the others do not.
"""

from __future__ import annotations

import collections
import contextlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from muster.errors import MismatchError, TimeoutError  # noqa: A004

_rounds: collections.Counter[str] = collections.Counter()  # by the phase and the name of the group


@dataclass(frozen=True)
class Digest:
    """Of a graph. operators: what it calls, with which groups, and on which results. sizes: of all tensors, too."""

    operators: str
    sizes: str


def agree(group: Any, what: list[str], timeout: timedelta) -> None:
    """Compares `what` of all ranks of the group: the collectives of a graph in the order in which they begin.

    Raises MismatchError if it differs, with the first difference, and TimeoutError if a rank has nothing to compare.
    """
    (answers,) = _exchange([group], "calls", what, timeout)
    for other, theirs in enumerate(answers):
        if theirs != what:
            raise MismatchError(_difference(group.rank(), what, other, theirs))


def compare(groups: list[Any], digest: Digest, timeout: timedelta) -> tuple[bool, bool]:
    """True, True if all ranks of the groups have the same digest; True, False if only sizes differ. All ranks get the
    same answer, also in a mesh, where a difference in a group of another rank arrives through the groups that they
    share. Ranks may use different groups, in any order.
    """
    seen = {(digest.operators, digest.sizes)}
    rounds = dict.fromkeys(groups, 1)  # the most groups that one of its ranks uses: as many rounds reach all
    number = 0
    while taking_part := [group for group in groups if number < rounds[group]]:
        mine = {"seen": sorted(seen), "groups": len(groups)}
        for group, answers in zip(taking_part, _exchange(taking_part, "digests", mine, timeout), strict=True):
            rounds[group] = max(rounds[group], *(answer["groups"] for answer in answers))
            seen.update(tuple(each) for answer in answers for each in answer["seen"])
        number += 1
    return len({operators for operators, _ in seen}) == 1, len(seen) == 1


def _exchange(groups: list[Any], phase: str, what: Any, timeout: timedelta) -> list[list[Any]]:
    """What each rank of each group has."""
    keys = [f"muster/graph/{phase}/{_rounds[phase + group.group_name]}" for group in groups]
    for group, key in zip(groups, keys, strict=True):
        _store(group).set(f"{key}/{group.rank()}", json.dumps(what))
    try:
        answers = [_answers(group, key, timeout) for group, key in zip(groups, keys, strict=True)]
    except TimeoutError:
        for group, key in zip(groups, keys, strict=True):  # so that the next graph is not compared with this one
            with contextlib.suppress(Exception):
                _store(group).delete_key(f"{key}/{group.rank()}")
        raise
    _rounds.update(phase + group.group_name for group in groups)
    return answers


def _store(group: Any) -> Any:
    return c10d._world.pg_map[group][1]


def _answers(group: Any, key: str, timeout: timedelta) -> list[Any]:
    answers = []
    for other in range(group.size()):
        try:
            _store(group).wait([f"{key}/{other}"], timeout)
        except Exception as error:
            raise TimeoutError(
                f"rank {other} of group {group.group_name} has not compiled the graph that rank {group.rank()} "
                f"compiles within {timeout.total_seconds():g} s. It may have taken another branch, or rank "
                f"{group.rank()} alone compiles again, for an input of another shape."
            ) from error
        answers.append(json.loads(_store(group).get(f"{key}/{other}")))
    return answers


def _difference(rank: int, ours: list[str], other: int, theirs: list[str]) -> str:
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        if mine != its:
            return f"collective {number} of the graph is {mine} at rank {rank}, and {its} at rank {other}"
    longer, more = (rank, ours) if len(ours) > len(theirs) else (other, theirs)
    shorter = min(len(ours), len(theirs))
    return f"the graph of rank {longer} has collective {shorter}, {more[shorter]}; that of the other rank has none"
