"""The backend "muster-mpi": groups over MPI. Rank and size come from MPI.

init_process_group("muster-mpi") needs no arguments in a program that a launcher of MPI has started. It leaves the
variables of `muster run` in the environment, so the program can also form groups of the muster backend, and use stores
and remote calls.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from torch.distributed.constants import default_pg_timeout

from muster import _C, _backend, _store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store, _DistributedBackendOptions


def create(options: _DistributedBackendOptions, given: object = None) -> Backend:
    """Forms a group over MPI. given: the caller's `pg_options`."""
    ours = _backend.options_of(given)
    for name in _backend.LINK_OPTIONS:
        if getattr(ours, name) is not None:
            raise ValueError(f"a group over MPI has no {name}: MPI chooses how ranks are linked")
    position = _C.mpi_position()
    members = list(options.global_ranks_in_group)
    if not members:
        _check_rank_and_size(options.group_rank, options.group_size, position)
        members = list(range(options.group_size))
    if members[options.group_rank] != position[0]:
        raise ValueError(
            f"a group over MPI needs the ranks of MPI: rank {members[options.group_rank]} of the job is rank "
            f"{position[0]} of {position[1]} in {position[2]}"
        )
    _end_job_after_an_error()
    timeout = _backend.timeout_of(ours, options.timeout)
    return _backend.formed(lambda: _C.create_mpi_backend(options.store, members, timeout, options.group_id))


def rendezvous(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """A handler for torch.distributed.register_rendezvous_handler()."""
    rank, size, library = _C.mpi_position()
    given = dict(parse_qsl(urlsplit(url).query))
    _check_rank_and_size(int(given.get("rank", rank)), int(given.get("world_size", size)), (rank, size, library))
    for name, value in _C.mpi_job_environment(timeout).items():
        os.environ.setdefault(name, value)
    yield _store.store(timeout=timeout), rank, size
    raise RuntimeError("the ranks of MPI do not change: call init_process_group() again")


def _check_rank_and_size(rank: int, size: int, position: tuple[int, int, str]) -> None:
    own_rank, own_size, library = position
    if (rank, size) != (own_rank, own_size):
        raise ValueError(
            f"init_process_group() was given rank {rank} of {size}, but this is rank {own_rank} of {own_size} in "
            f"{library}: leave out rank= and world_size="
        )


@functools.cache
def _end_job_after_an_error() -> None:
    """MPI_Finalize(), at the end of the process, waits for all ranks, and they may wait for this one in a collective.
    So a rank that ends by an exception ends the job. mpi4py's `-m mpi4py` does the same.
    """
    shown, errors = sys.excepthook, list[str]()

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        errors.append(f"{kind.__name__}: {error}")
        shown(kind, error, traceback)

    sys.excepthook = hook
    # Not in the hook: torch's hook shows what this one prints only after it has returned.
    atexit.register(lambda: _C.mpi_abort_job(errors[0]) if errors else None)
