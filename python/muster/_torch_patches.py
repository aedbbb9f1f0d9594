"""Patches of torch.distributed. It refuses some calls to backends that are not named "gloo" or "nccl" or that have no
accelerator, keeps a coalescing block that failed, has no way to replace a backend, expects the job's store at
MASTER_ADDR, and takes the rank from MPI for its own backend only.

torch offers no hooks for these. PATCHES has a replacement for each function, which passes groups of other backends on
to torch's own. `import torch` only puts a small function in each place (_autoload.py), before other code can import the
names. The first call of one of them imports this module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend


def _ours(group: dist.ProcessGroup | None) -> bool:
    group = group or c10d._get_default_group()
    return group in c10d._world.pg_map and _is_muster(group)  # not torch's placeholder at ranks outside the group


def _is_muster(group: dist.ProcessGroup) -> bool:
    try:
        return group._get_backend(torch.device("cpu")).name() == "muster"
    except RuntimeError:  # the group has no backend for CPU tensors
        return False


def _is_group(argument: object) -> bool:
    return isinstance(argument, dist.ProcessGroup) or argument is dist.GroupMember.NON_GROUP_MEMBER


def _routed(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def function(*arguments: Any, **named: Any) -> Any:
        group = named.get("group", next(filter(_is_group, arguments), None))
        return (ours if _ours(group) else original)(*arguments, **named)

    return function


class _CoalescingBlock(contextlib._GeneratorContextManager[Any]):
    """torch's manager. Cancels the block after an exception, because torch would add later calls to it.

    A subclass, because a manager around torch's manager would cost 2 us in each batch_isend_irecv().
    """

    def __init__(self, generator: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]):
        super().__init__(generator, arguments, named)
        self._group: dist.ProcessGroup | None = arguments[0] if arguments else named.get("group")

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> bool | None:
        ended = False
        try:
            suppresses = super().__exit__(kind, error, traceback)
            ended = kind is None
            return suppresses
        finally:
            if not ended:
                self._cancel()

    def _cancel(self) -> None:
        if _ours(self._group):
            from muster import _C, _group

            c10d._world.pg_coalesce_state.pop(self._group or c10d._get_default_group(), None)
            _C.cancel_coalescing(_group.backend_of(self._group))


def _cancelling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's manager with a block of our own. `original` was made by contextlib.contextmanager()."""
    generator = original.__wrapped__  # type: ignore[attr-defined]

    def manager(*arguments: Any, **named: Any) -> _CoalescingBlock:
        return _CoalescingBlock(generator, arguments, named)

    return manager


def _take_device_tensors() -> None:
    """Groups of muster's backends also take tensors of this process's accelerator, if it has one. A package may add
    one after `import torch`.
    """
    accelerator = torch._C._get_accelerator().type
    for backend in "muster", "muster-mpi":
        if accelerator not in (devices := dist.Backend.backend_capability[backend]):
            devices.append(accelerator)


def _initializing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's init_process_group(), which needs no arguments for groups over MPI."""

    def function(backend: Any = None, init_method: str | None = None, *arguments: Any, **named: Any) -> Any:
        _take_device_tensors()
        has_store = named.get("store") is not None or len(arguments) > 3
        if "muster-mpi" in str(backend) and init_method is None and not has_store:
            init_method = "mpi://"
        return original(backend, init_method, *arguments, **named)

    return function


def _replacing(create: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's function for new process groups with MUSTER_REPLACE. A worker may get the variable after
    `import torch`.
    """

    def function(*arguments: Any, **named: Any) -> Any:
        if not os.environ.get("MUSTER_REPLACE"):
            return create(*arguments, **named)
        # _autoload.load() has imported it if muster cannot run. Then importing the package is an error.
        return importlib.import_module("muster._replace").new_process_group(create, *arguments, **named)

    return function


def _shrinking(original: Callable[..., dist.ProcessGroup]) -> Callable[..., dist.ProcessGroup]:
    """Returns torch's function for the process group of shrink_group(), which has its backend for one device only."""

    def function(backend: Backend, ranks: list[int], metadata: dict[str, Any], *arguments: Any) -> dist.ProcessGroup:
        group = original(backend, ranks, metadata, *arguments)
        for pair in str(metadata["backend_config"]).split(","):
            device, _, name = pair.partition(":")
            ours = backend.name() == "muster" and name in ("muster", "muster-mpi")
            if ours and torch.device(device) not in group._device_types:
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group

    return function


def _redirecting(original: Callable[..., None]) -> Callable[..., None]:
    """Returns TCPStore's constructor for `muster run --reachable-master-addr`. Clients of the launcher's MASTER_ADDR
    and MASTER_PORT connect to their node's port of the job's store. A script may change both variables.
    """

    def init(
        self: dist.TCPStore,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *arguments: Any,
        **named: Any,
    ) -> None:
        master, _, node = os.environ.get("MUSTER_TCPSTORE_REDIRECT", "").partition("=")
        if f"{host_name}:{port}" == master and not is_master:
            host_name, _, text = node.rpartition(":")
            port = int(text)
        original(self, host_name, port, world_size, is_master, *arguments, **named)

    return init


def _splitting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's split_group(), or our own for groups without another backend. torch has none for the CPU."""

    def function(parent_pg: dist.ProcessGroup | None = None, *arguments: Any, **named: Any) -> Any:
        group = parent_pg or c10d._get_default_group()
        if _ours(group) and len({group._get_backend(device).name() for device in group._device_types}) == 1:
            from muster import _split

            return _split.split_group(parent_pg, *arguments, **named)
        return original(parent_pg, *arguments, **named)

    return function


def _numbered(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of ProcessGroup that calls `ours` for groups of the muster backend."""

    def method(group: dist.ProcessGroup) -> Any:
        return (ours if _is_muster(group) else original)(group)

    return method


def _sequence_number(group: dist.ProcessGroup) -> int:
    from muster import _group

    return _group.group(group).sequence


def _monitored_barrier(*arguments: Any, **named: Any) -> None:
    from muster import _group

    _group.monitored_barrier(*arguments, **named)


def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    (group or c10d._get_default_group()).set_timeout(timeout)


# By the name in torch.distributed.distributed_c10d, or of the class and the method: makes a replacement from torch's
# function.
PATCHES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "init_process_group": _initializing,
    "monitored_barrier": lambda original: _routed(original, _monitored_barrier),
    "_set_pg_timeout": lambda original: _routed(original, _set_pg_timeout),
    "_coalescing_manager": _cancelling,
    "_new_process_group_helper": _replacing,
    "_create_shrunk_process_group": _shrinking,
    "split_group": _splitting,
    "TCPStore.__init__": _redirecting,
    "ProcessGroup._get_sequence_number_for_group": lambda original: _numbered(original, _sequence_number),
    "ProcessGroup._set_sequence_number_for_group": lambda original: _numbered(original, lambda group: None),
}
