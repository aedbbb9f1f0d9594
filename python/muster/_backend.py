"""Makes the c10d backend of a process group."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Backend, PrefixStore
from torch.distributed.constants import default_pg_timeout

from muster import _C
from muster._group import backend_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store, _DistributedBackendOptions

Options = Backend.Options


def create(options: _DistributedBackendOptions, given: object = None) -> Backend:
    """Meets the other ranks of a process group through torch's store.

    Which of the groups that torch has given this name it is, the ranks find out in the store. Nothing that this process
    alone knows goes into its name, such as how many groups it made or how often it was restarted: a rank that is new
    to the job could not guess it.

    given: the caller's `pg_options`.
    """
    _check(given, options.timeout)
    return _C.create_backend(
        store=_store_of(options.store, options.global_ranks_in_group),
        rank=options.group_rank,
        size=options.group_size,
        timeout=_timeout(options.timeout),
        name=options.group_id,
    )


def _check(given: object, timeout: timedelta) -> None:
    """torch gives one `pg_options` to every backend of a group ("cpu:muster,cuda:nccl"), so it may be for another."""
    if given is None:
        return
    if isinstance(given, Options) and given.backend != "muster":
        warnings.warn(
            f"pg_options are of the backend {given.backend!r}; this group's muster backend takes nothing from them",
            stacklevel=2,
        )
    elif type(given) is not Options:
        raise TypeError(
            f"the muster backend has no pg_options, but was given {given!r}: use the argument timeout= and the "
            "environment variables of docs/reference/environment.md"
        )
    elif given._timeout != timeout:
        raise ValueError(
            f"pg_options say a timeout of {given._timeout} and the argument timeout= says {timeout}: give one of them"
        )


def _store_of(store: Store, members: list[int]) -> Store:
    """Ranks that form sub-groups of different groups may give groups with different members the same name."""
    if not members:  # the default group
        return store
    return PrefixStore(hashlib.sha256(repr(members).encode()).hexdigest()[:16], store)


def _timeout(asked: timedelta) -> timedelta:
    """MUSTER_TIMEOUT (seconds) stands in for torch's default, never for a timeout that the program names."""
    given = os.environ.get("MUSTER_TIMEOUT")
    if not given or asked != default_pg_timeout:
        return asked
    with contextlib.suppress(ValueError, OverflowError):
        if (seconds := float(given)) > 0:
            return timedelta(seconds=seconds)
    raise ValueError(f"MUSTER_TIMEOUT={given!r} is not a number of seconds above 0")


def transport(group: ProcessGroup | None = None) -> str:
    """How the ranks of `group` (default: all) are linked: "shm" within this host's memory, else as "unix" or "tcp"."""
    return _C.Group(backend_of(group)).transport
