"""MUSTER_REPLACE=gloo: process groups that ask for Gloo get muster for CPU tensors.

Programs see what they asked for: get_backend(), the group's name() and its configuration say "gloo". The type of
torch's backend stays CUSTOM, because torch's C++ code casts a backend of type GLOO to its own class.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from muster import _requirements, _torch_patches

_CUSTOM = ProcessGroup.BackendType.CUSTOM
_printed: set[str] = set()


def new_process_group(
    create: Callable[..., Any],
    size: int,
    rank: int,
    members: list[int],
    backend: Any,
    store: Store,
    group_name: str,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Calls `create`, torch's function for all new process groups, with muster in Gloo's place.

    members: the global ranks of the group; empty for the default group.
    """
    _check_variable()
    config = c10d.BackendConfig(backend)
    asked: dict[str, str] = dict(config.get_device_backend_map())
    member = not members or c10d._get_default_group().rank() in members
    if asked.get("cpu") != "gloo" or not member:
        return create(size, rank, members, backend, store, group_name, *arguments, **named)

    others = {device: name for device, name in asked.items() if device != "cpu"}
    agreement = PrefixStore(f"muster/replace/{group_name}", store)
    timeout = named.get("timeout") or default_pg_timeout
    reason, with_accelerator = _agree(agreement, rank, size, _problem(others), timeout)
    if rank == 0 and 0 in (members or [0]):
        _print_once(reason)
    if reason:
        return create(size, rank, members, backend, store, group_name, *arguments, **named)

    if not with_accelerator:  # torch's Gloo also takes CUDA tensors
        others = {device: name for device, name in others.items() if name != "gloo"}
    replaced = ",".join(f"{device}:{name}" for device, name in [("cpu", "muster"), *others.items()])
    group, prefix_store = create(size, rank, members, c10d.Backend(replaced), store, group_name, *arguments, **named)
    c10d._world.pg_map[group] = (backend, prefix_store)
    c10d._world.pg_backend_config[group] = str(config)
    _look_like_gloo()
    if "nccl" not in others.values():  # torch chose NCCL as the default backend otherwise
        group._set_default_backend(_CUSTOM)
    return group, prefix_store


def _look_like_gloo() -> None:
    """Makes both methods that name a group's backend say "gloo" for replaced groups, instead of "custom". Gives all
    backends the functions with which programs choose Gloo's network interface. Further calls do nothing.
    """
    if not hasattr(ProcessGroup.name, "_muster"):
        if c10d.is_gloo_available():
            for function in ("create_device", "create_default_device"):
                setattr(Backend, function, staticmethod(getattr(c10d.ProcessGroupGloo, function)))
        for method in ("name", "_get_backend_name"):
            setattr(ProcessGroup, method, _naming(getattr(ProcessGroup, method)))


def _naming(original: Callable[[ProcessGroup], str]) -> Callable[[ProcessGroup], str]:
    @functools.wraps(original)
    def name(group: ProcessGroup) -> str:
        found = original(group)
        asked = c10d._world.pg_backend_config.get(group, "")
        return "gloo" if found == "custom" and "cpu:gloo" in asked and _torch_patches._ours(group) else found

    name._muster = True  # type: ignore[attr-defined]
    return name


def _check_variable() -> None:
    given = os.environ["MUSTER_REPLACE"]
    if given != "gloo":
        raise ValueError(f"MUSTER_REPLACE={given!r}: the only backend that muster can replace is gloo")


def _problem(others: dict[str, str]) -> str:
    """Why this rank cannot use muster for the group; empty if it can. `others`: the backends of other devices."""
    sentence = _requirements.problem()
    if sentence is not None:
        return sentence
    custom = [name for name in others.values() if c10d.Backend.backend_type_map.get(name) == _CUSTOM]
    return f"torch keeps one custom backend in a group, and this one has {custom[0]}" if custom else ""


def _agree(store: Store, rank: int, size: int, problem: str, timeout: timedelta) -> tuple[str, bool]:
    """Returns the same at all ranks: why they use Gloo after all, and whether one of them has an accelerator.

    The last rank that arrives decides. torch may use a group's name again after destroy_process_group(), with the same
    ranks. So each rank counts its calls, and every call has keys of its own.
    """
    call = store.add(f"calls/{rank}", 1)
    store = PrefixStore(str(call), store)
    if problem:
        store.set("problem", f"rank {rank}: {problem}")
    if torch.accelerator.is_available():
        store.set("accelerator", "1")
    if store.add("arrived", 1) == size:
        reason = store.get("problem").decode() if store.check(["problem"]) else ""
        store.set("decision", f"{int(store.check(['accelerator']))}{reason}")
    store.wait(["decision"], timeout)
    decision = store.get("decision").decode()
    return decision[1:], decision[0] == "1"


def _print_once(reason: str) -> None:
    line = 'process groups that ask for "gloo" use muster (MUSTER_REPLACE)'
    if reason:
        line = f"a process group uses Gloo despite MUSTER_REPLACE: {reason}"
    if line not in _printed:
        _printed.add(line)
        _print(line)


def _print(line: str) -> None:
    print(f"muster: {line}", file=sys.stderr, flush=True)
