"""torch.distributed.split_group() for groups of the muster backend. torch's own needs an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from muster import _backend


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Every rank of the parent calls it with the same lists. The new group inherits the parent's options and timeout.

    backend: that of the parent, if any.
    """
    world: Any = c10d._world
    parent = parent_pg or c10d._get_default_group()
    members = {own: rank for rank, own in world.pg_group_ranks[parent].items()}
    _check_ranks(split_ranks or [], len(members))
    cpu_backend = c10d.BackendConfig(c10d.Backend(world.pg_map[parent][0])).get_device_backend_map()["cpu"]
    if backend is not None and str(backend) not in (cpu_backend, f"cpu:{cpu_backend}"):
        raise ValueError(f"the parent group has the backend {cpu_backend!r}, not {str(backend)!r}")
    timeout = _backend.timeout_of_split(pg_options, timeout)

    assert split_ranks is not None
    ranks = sorted(next((each for each in split_ranks if parent.rank() in each), split_ranks[0]))
    name: Any = _unused_name(f"{parent.group_name}:split:{'_'.join(map(str, ranks))}")
    desc = group_desc or f"{parent.group_desc}:split"
    group: Any = parent.split_group(ranks, timeout=timeout, group_name=name, group_desc=desc)
    if group is None:
        return None
    tag = f"ptd:{name}"
    world.pg_map[group] = (world.pg_map[parent][0], group.get_group_store())
    world.pg_names[group] = name
    world.pg_backend_config[group] = world.pg_backend_config[parent]
    world.pg_group_ranks[group] = {members[rank]: own for own, rank in enumerate(ranks)}
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault(tag, []).append(group)
    c10d._register_process_group(name, group)
    return group


def _check_ranks(lists: Sequence[Sequence[int]], size: int) -> None:
    if not lists or not all(lists):
        raise ValueError("split_ranks needs at least one list, and each list at least one rank")
    ranks = [rank for each in lists for rank in each]
    for rank in ranks:
        if rank not in range(size):
            raise ValueError(f"split_ranks: rank {rank} is out of range, the parent group has ranks 0 to {size - 1}")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"split_ranks: a rank is listed twice in {list(map(list, lists))}")


def _unused_name(name: str) -> str:
    """All members have the same groups with this name, so all choose the same number."""
    used, number = set(c10d._world.pg_names.values()), 0
    while f"{name}:{number}" in used:
        number += 1
    return f"{name}:{number}"
