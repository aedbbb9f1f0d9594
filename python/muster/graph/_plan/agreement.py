"""Ranks compare what they have compiled, before a graph runs.

A rank whose graph has other collectives would wait in them for ever, or get wrong data. So would one that compiles
again although the others do not.
"""

from __future__ import annotations

import collections
import json
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from muster.errors import MismatchError, TimeoutError  # noqa: A004

_rounds: collections.Counter[str] = collections.Counter()  # by the name of the group


def agree(group: Any, what: list[str], timeout: timedelta) -> None:
    """Compares `what` of all ranks of the group: the collectives of a graph in the order in which they begin.

    Raises MismatchError if it differs, with the first difference, and TimeoutError if a rank has nothing to compare.
    """
    for other, theirs in enumerate(_exchange(group, what, timeout)):
        if theirs != what:
            raise MismatchError(_difference(group.rank(), what, other, theirs))


def are_equal(groups: list[Any], digest: str, timeout: timedelta) -> bool:
    """True if all ranks of the groups have the same digest. All of them get the same answer, also in a mesh, where a
    difference in a group of another rank arrives through the groups that they share.
    """
    seen = {digest}
    for group in groups * len(groups):
        seen.update(*_exchange(group, sorted(seen), timeout))
    return len(seen) == 1


def _exchange(group: Any, what: list[str], timeout: timedelta) -> list[list[str]]:
    """What each rank of the group has."""
    size, rank = group.size(), group.rank()
    if size == 1:
        return [what]
    store = c10d._world.pg_map[group][1]
    key = f"muster/graph/{_rounds[group.group_name]}"
    _rounds[group.group_name] += 1
    store.set(f"{key}/{rank}", json.dumps(what))
    answers = []
    for other in range(size):
        try:
            store.wait([f"{key}/{other}"], timeout)
        except Exception as error:
            raise TimeoutError(
                f"rank {other} of group {group.group_name} has not compiled the graph that rank {rank} compiles within "
                f"{timeout.total_seconds():g} s. It may have taken another branch, or rank {rank} alone compiles "
                "again, for an input of another shape."
            ) from error
        answers.append(json.loads(store.get(f"{key}/{other}")))
    return answers


def _difference(rank: int, ours: list[str], other: int, theirs: list[str]) -> str:
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        if mine != its:
            return f"collective {number} of the graph is {mine} at rank {rank}, and {its} at rank {other}"
    longer, more = (rank, ours) if len(ours) > len(theirs) else (other, theirs)
    shorter = min(len(ours), len(theirs))
    return f"the graph of rank {longer} has collective {shorter}, {more[shorter]}; that of the other rank has none"
