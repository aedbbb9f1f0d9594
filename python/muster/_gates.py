"""What torch.distributed 2.13 refuses to backends that are not named "gloo" or "nccl", though they could do it.

torch offers no hook for these two, so lift() puts a function in the place of each that asks whose group it is, and
hands every group that is not muster's to torch's own. `import torch` calls it, before anybody has the names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def lift() -> None:
    """Once; further calls do nothing."""
    if not hasattr(c10d.monitored_barrier, "_muster"):
        c10d.monitored_barrier = dist.monitored_barrier = _routed(c10d.monitored_barrier, _monitored_barrier)
        c10d._set_pg_timeout = _routed(c10d._set_pg_timeout, _set_pg_timeout)


def _ours(group: dist.ProcessGroup | None) -> bool:
    group = group or c10d._get_default_group()
    if group not in c10d._world.pg_map:  # a group without this rank, of which torch only hands out a number
        return False
    return "muster" in str(c10d._world.pg_backend_config.get(group, ""))


def _is_group(argument: object) -> bool:
    return isinstance(argument, dist.ProcessGroup) or argument is dist.GroupMember.NON_GROUP_MEMBER


def _routed(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        group = named.get("group", next(filter(_is_group, arguments), None))
        return (ours if _ours(group) else original)(*arguments, **named)

    function._muster = True  # type: ignore[attr-defined]
    return function


def _monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    from muster import _group

    _group.monitored_barrier(group, timeout, wait_all_ranks)


def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    (group or c10d._get_default_group()).set_timeout(timeout)
