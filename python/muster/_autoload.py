"""The entry points torch.backends and torch.distributed.backends: `import torch` calls load(), so
init_process_group("muster") and multiprocessing.get_context("muster") need no import, and all backends accept
init_method="redis://..." and "etcd://...".

load() runs in every process that imports torch. Therefore it takes microseconds, loads nothing native, and does not
fail. If muster was built for another torch, the error comes when a group is created or muster is imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from muster import _requirements

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store, _DistributedBackendOptions


def load() -> None:
    import torch.distributed as dist  # part of torch: already imported, or absent from this build of torch

    from muster import forkserver  # noqa: F401  registers its context

    if not dist.is_available():
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    from muster import _torch_patches

    _torch_patches.install()
    dist.Backend.register_backend("muster", _create, extended_api=True, devices=["cpu"])
    for scheme in ("redis", "rediss", "redis+unix", "etcd", "etcds"):
        with contextlib.suppress(RuntimeError):  # already registered, by an earlier import or another package
            register_rendezvous_handler(scheme, _rendezvous)
    if _requirements.torch_is_being_imported() and _requirements.problem() is not None:
        from muster import _replace  # noqa: F401  for MUSTER_REPLACE, which then leaves Gloo in place

        # Forget that the package was imported, so that the user's own `import muster` raises the error.
        sys.modules.pop("muster", None)


def _create(options: _DistributedBackendOptions, backend_options: object = None) -> Backend:
    _requirements.check()
    from muster import _backend

    return _backend.create(options, backend_options)


def _rendezvous(url: str, **arguments: Any) -> Iterator[tuple[Store, int, int]]:
    _requirements.check()
    from muster import _rendezvous

    return _rendezvous.handler(url, **arguments)
