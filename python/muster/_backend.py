"""Creates the c10d backend of a process group."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import util
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroup
from torch.distributed.constants import default_pg_timeout

from muster import _C
from muster._group import as_timedelta, backend_of
from muster._options import Options
from muster.graph._capture.install import install

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, _DistributedBackendOptions


LINK_OPTIONS = ("transport", "interface", "streams", "label")  # of muster.Options: how ranks are linked


def create(options: _DistributedBackendOptions, given: object = None) -> Backend:
    """Forms a group with the other ranks through torch's store.

    torch may use a group's name several times; the ranks agree in the store on which use this is. The name does not
    depend on facts that only this process knows, such as its number of groups or restarts, because a new rank cannot
    know them.

    given: the caller's `pg_options`.
    """
    ours = options_of(given)
    store = _store_of(options.store, options.global_ranks_in_group)
    unformed: bool = getattr(options, "enable_reconfigure", False)  # from torch 2.14 on
    return form(store, options.group_rank, options.group_size, options.timeout, options.group_id, ours, unformed)


def form(
    store: Store, rank: int, size: int, timeout: timedelta, name: str, options: Options, unformed: bool = False
) -> Backend:
    """timeout: the caller's argument, or torch's default. unformed: reconfigure() will form the group."""
    links = {option: getattr(options, option) for option in LINK_OPTIONS}
    asked = timeout_of(options, timeout)
    return formed(
        lambda: _C.create_backend(
            store=store, rank=rank, size=size, timeout=asked, name=name, **links, unformed=unformed
        )
    )


def formed(create: Callable[[], Backend]) -> Backend:
    """Forms a group of this process."""
    _leave_at_exit(os.getpid())
    install()
    return create()


def timeout_of(options: Options, timeout: timedelta) -> timedelta:
    """timeout: the caller's argument, or torch's default."""
    if options.timeout is not None and timeout not in (default_pg_timeout, options.timeout):
        raise ValueError(_two_timeouts(options.timeout, timeout))
    return options.timeout or _timeout(timeout)


def process_group(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta | float = default_pg_timeout,
    options: Options | None = None,
) -> ProcessGroup:
    """Forms a process group of `size` ranks that meet in `store`, without init_process_group(). For managers that
    replace ranks while a program runs, such as torchft.

    Use the group's own methods (allreduce(), send(), ...), muster.group(), or torch.distributed's collectives of
    tensors with group=, and group_src= or group_dst= instead of src= or dst=. torch.distributed does not list the
    group: calls that look it up, such as get_backend() or all_gather_object, raise an error. abort() ends its
    pending calls at all ranks that can be reached. After the death of a peer, call shutdown() and form the next group,
    of any size, with other processes or ranks: give each try a store, or a prefix of one, that no other try has used
    (torch.distributed.PrefixStore).

    store: any torch.distributed.Store.
    timeout: for forming the group, and for each operation without its own timeout; a number is in seconds.
    options: transports and so on; by default those of the environment.

    Raises muster.TimeoutError, which names the missing ranks, if they do not come in time.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is out of range for world size {size}")
    name: Any = "process_group"  # torch's GroupName is a str
    custom = ProcessGroup.BackendType.CUSTOM
    backend = form(store, rank, size, as_timedelta(timeout), name, options or Options())
    group = ProcessGroup(store, rank, size)
    for device in {"cpu", torch._C._get_accelerator().type}:
        group._register_backend(torch.device(device), custom, backend)
    group._set_default_backend(custom)
    group._set_group_name(name)
    group._set_group_desc("muster.process_group")
    return group


def timeout_of_split(given: object, timeout: timedelta | None) -> timedelta | None:
    """The timeout of a group that is split off another; None for the parent's."""
    options = options_of(given)
    for name in LINK_OPTIONS:
        if getattr(options, name) is not None:
            raise ValueError(f"a group has the {name} of the group that it is split off: use new_group() for another")
    if timeout is not None and options.timeout not in (None, timeout):
        raise ValueError(_two_timeouts(options.timeout, timeout))
    return timeout or options.timeout


def options_of(given: object) -> Options:
    """torch passes `pg_options` to all backends of a group ("cpu:muster,cuda:nccl"), so they may belong to another
    backend. torch's own code makes plain Backend.Options.
    """
    if given is None or isinstance(given, Options):
        return given or Options()
    if not isinstance(given, Backend.Options):
        raise TypeError(f"the muster backend takes pg_options=muster.Options(...), but was given {given!r}")
    if given.backend == "muster":
        return Options(None if given._timeout == default_pg_timeout else given._timeout)
    warnings.warn(
        f"pg_options belong to the backend {given.backend!r}; the muster backend ignores them",
        stacklevel=2,
    )
    return Options()


def _two_timeouts(options: timedelta, argument: timedelta) -> str:
    return f"pg_options.timeout is {options} but timeout= is {argument}: pass only one"


def _store_of(store: Store, members: list[int]) -> Store:
    """Subgroups with different members may get the same name, if ranks form them from different groups."""
    if not members:  # the default group
        return store
    return PrefixStore(hashlib.sha256(repr(members).encode()).hexdigest()[:16], store)


def _timeout(asked: timedelta) -> timedelta:
    """MUSTER_TIMEOUT (seconds) replaces torch's default, but not a timeout that the program sets."""
    given = os.environ.get("MUSTER_TIMEOUT")
    if not given or asked != default_pg_timeout:
        return asked
    with contextlib.suppress(ValueError, OverflowError):
        if (seconds := float(given)) > 0:
            return timedelta(seconds=seconds)
    raise ValueError(f"MUSTER_TIMEOUT={given!r} is not a number of seconds above 0")


@functools.cache
def _leave_at_exit(pid: int) -> None:
    """A program may end without destroying its groups. Their threads need the GIL to release tensors, and an
    interpreter that shuts down kills threads that ask for the GIL. Other ranks would take this one for dead.

    Not with atexit: multiprocessing ends a forked child without it. pid: of this process, because it is done once in
    each.
    """
    util.Finalize(None, _C.shut_down_backends, exitpriority=0)


def transport(group: ProcessGroup | None = None) -> str:
    """How the ranks of `group` (default: all) are linked: "shm" within this host's memory, else as "unix" or "tcp"."""
    return _C.Group(backend_of(group)).transport
