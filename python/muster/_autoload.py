"""The entry points torch.backends and torch.distributed.backends: `import torch` calls load(), so
init_process_group("muster") and multiprocessing.get_context("muster") need no import, and all backends accept
init_method="redis://..." and "etcd://...".

load() runs in every process that imports torch. Therefore it takes a millisecond, loads nothing native, and does not
fail. If muster was built for another torch, the error comes when a group is created or muster is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muster import _requirements

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store, _DistributedBackendOptions


def load() -> None:
    import torch.distributed as dist  # part of torch: already imported, or absent from this build of torch

    _register_context()
    if not dist.is_available():
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    _patch_torch()
    _register_rpc()
    dist.Backend.register_backend("muster", _create, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("muster-mpi", _create_mpi, extended_api=True, devices=["cpu"])
    for scheme in ("redis", "rediss", "redis+unix", "etcd", "etcds"):
        with contextlib.suppress(RuntimeError):  # already registered, by an earlier import or another package
            register_rendezvous_handler(scheme, _rendezvous)
    with contextlib.suppress(RuntimeError):
        register_rendezvous_handler("mpi", _rendezvous_mpi)
    if _requirements.torch_is_being_imported() and _requirements.problem() is not None:
        from muster import _replace, _torch_patches  # noqa: F401  for MUSTER_REPLACE, which then leaves Gloo in place

        # Forget that the package was imported, so that the user's own `import muster` raises the error.
        sys.modules.pop("muster", None)


def _register_context() -> None:
    """The context "muster" of multiprocessing. Its module is loaded when it is used."""
    from multiprocessing import context

    class Unused(context.BaseContext):
        def _check_available(self) -> None:  # of get_context() and set_start_method()
            from muster import forkserver  # noqa: F401  gives this object the class of its own context

    vars(context)["_concrete_contexts"].setdefault("muster", Unused())


def _register_rpc() -> None:
    """The backend MUSTER of torch.distributed.rpc. Its module is loaded when it is used."""
    registry: Any = sys.modules.get("torch.distributed.rpc.backend_registry")
    if registry is None or registry.backend_registered("MUSTER"):  # None: torch was built without RPC
        return

    def module() -> Any:
        return importlib.import_module("muster.rpc._torch_backend")

    ours = registry.BackendValue(
        lambda *args, **kwargs: module().options(*args, **kwargs), lambda **kwargs: module().start(**kwargs)
    )
    # Not with register_backend(): it takes 0.2 ms to make a new enum. torch's own backend would not be the first one in
    # it, and init_rpc() tries the first one first.
    backends = registry.BackendType
    backend = object.__new__(backends)
    backend._name_, backend._value_ = "MUSTER", ours
    backend.__objclass__, backend._sort_order_ = backends, len(backends)
    type.__setattr__(backends, "MUSTER", backend)
    backends._member_names_.append("MUSTER")
    backends._member_map_["MUSTER"] = backends._value2member_map_[ours] = backend


def _patch_torch() -> None:
    """Replaces functions of torch by those of _torch_patches.py. Further calls do nothing."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if "_patched_by_muster" in vars(c10d):
        return
    vars(c10d)["_patched_by_muster"] = True
    for name in ("_set_pg_timeout", "_new_process_group_helper", "_create_shrunk_process_group"):
        if hasattr(c10d, name):  # older releases of torch lack the last one
            setattr(c10d, name, _patched(getattr(c10d, name), name))
    for name in ("init_process_group", "monitored_barrier", "_coalescing_manager", "split_group"):
        function = _patched(getattr(c10d, name), name)
        setattr(c10d, name, function)
        setattr(dist, name, function)
    methods = ("_get_sequence_number_for_group", "_set_sequence_number_for_group")  # torch 2.15 has the first one only
    for kind, name in ((dist.TCPStore, "__init__"), *((dist.ProcessGroup, method) for method in methods)):
        if hasattr(kind, name):
            setattr(kind, name, _patched(getattr(kind, name), f"{kind.__name__}.{name}"))


def _patched(original: Callable[..., Any], name: str) -> Any:
    """Returns a function that calls the replacement of this name. Its first call imports the module."""
    replacement: Callable[..., Any] | None = None

    @functools.wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        nonlocal replacement
        if replacement is None:
            # load() has imported it if muster cannot run. Then importing the package is an error.
            replacement = importlib.import_module("muster._torch_patches").PATCHES[name](original)
        return replacement(*arguments, **named)

    return function


def _create(options: _DistributedBackendOptions, backend_options: object = None) -> Backend:
    _requirements.check()
    from muster import _backend

    return _backend.create(options, backend_options)


def _create_mpi(options: _DistributedBackendOptions, backend_options: object = None) -> Backend:
    _requirements.check()
    from muster import _mpi

    return _mpi.create(options, backend_options)


def _rendezvous(url: str, **arguments: Any) -> Iterator[tuple[Store, int, int]]:
    _requirements.check()
    from muster import _rendezvous

    return _rendezvous.handler(url, **arguments)


def _rendezvous_mpi(url: str, **arguments: Any) -> Iterator[tuple[Store, int, int]]:
    _requirements.check()
    from muster import _mpi

    return _mpi.rendezvous(url, **arguments)
