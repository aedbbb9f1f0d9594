"""muster: a distributed training runtime for PyTorch.

Most programs never import this package: `init_process_group("muster")` works as soon as torch is imported. The package
also has:

    muster.store(url)       a key-value store that the processes of a job share, usable as a torch.distributed.Store
    muster.process_group(store, rank, size)  a process group without init_process_group(), for managers of replicas
    muster.Options          pg_options of a process group: transports, interface, ...
    muster.transport()      how the ranks of a group are linked
    muster.group()          the collectives of a process group without torch's dispatcher: muster.Group
    muster.monitored_barrier()  a barrier that names missing ranks
    muster.nn               DistributedDataParallel and DataParallel
    muster.forkserver       processes that start in milliseconds with torch imported
    muster.rpc              calls of functions in other processes of the job, with the names of torch.distributed.rpc
    muster.graph            collectives inside compiled graphs
    muster.hooks, muster.optim   for slow links: compressed gradients, LocalSGD and DiLoCo
    muster.elastic_launch(config, fn)(*args)   calls a function in the processes of a job, and returns their results
    muster.dump(), muster.trace(path)   the last operations of this process's groups; a trace of them, or of all ranks
    muster.step_report(model), muster.straggler_report(model)   what a training step waits for, and for which rank
    muster.Error            the base class of the errors of muster's operations (muster.errors)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from muster import _requirements

if TYPE_CHECKING:
    from muster import graph, hooks, nn, optim, rpc
    from muster._backend import process_group, transport
    from muster._group import Group, group, monitored_barrier
    from muster._launch import elastic_launch
    from muster._options import Options
    from muster._recorder import dump, trace
    from muster._step import StepReport, StragglerReport, step_report, straggler_report
    from muster._store import store
    from muster.errors import (
        AbortedError,
        ArgumentError,
        AuthenticationError,
        Error,
        LaunchError,
        MismatchError,
        PeerLostError,
        ProtocolError,
        TimeoutError,  # noqa: A004
        UnavailableError,
    )

__all__ = [
    "AbortedError",
    "ArgumentError",
    "AuthenticationError",
    "Error",
    "Group",
    "LaunchError",
    "MismatchError",
    "Options",
    "PeerLostError",
    "ProtocolError",
    "StepReport",
    "StragglerReport",
    "TimeoutError",
    "UnavailableError",
    "__version__",
    "dump",
    "elastic_launch",
    "graph",
    "group",
    "hooks",
    "monitored_barrier",
    "nn",
    "optim",
    "process_group",
    "rpc",
    "step_report",
    "store",
    "straggler_report",
    "trace",
    "transport",
]

_LAZY_IMPORTS = {
    "Options": "muster._options",
    "elastic_launch": "muster._launch",
    "store": "muster._store",
    **dict.fromkeys(("process_group", "transport"), "muster._backend"),
    **dict.fromkeys(("dump", "trace"), "muster._recorder"),
    **dict.fromkeys(("StepReport", "StragglerReport", "step_report", "straggler_report"), "muster._step"),
    **dict.fromkeys(("Group", "group", "monitored_barrier"), "muster._group"),
}

# `import torch` imports this package to register the backend. In this case it must load nothing, and must not fail.
if not _requirements.torch_is_being_imported():
    _requirements.check()
    from muster import _autoload

    _autoload.load()


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("torch-muster")
    if name not in __all__:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    _requirements.check()
    if name in ("graph", "hooks", "nn", "optim", "rpc"):
        return importlib.import_module(f"muster.{name}")
    value = getattr(importlib.import_module(_LAZY_IMPORTS.get(name, "muster.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
