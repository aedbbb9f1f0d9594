"""Loads torch.testing._internal.distributed.distributed_test with muster as the backend under test.

The module reads the backend's name from the environment, and decides in three ways which tests apply to it. All three
know only the names of torch's own backends. The rules below add muster. The source is changed in these places only, and
a rule that no longer finds its place fails.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable

import forks

from peer.torch_source import load_copy

MODULE = "torch.testing._internal.distributed.distributed_test"

# Replacements in the source, by text. Timeouts are longer, because all ranks must arrive in time on a loaded machine.
TIMEOUTS = {
    "def sync(cls, wait_for=None, timeout=10)": "def sync(cls, wait_for=None, timeout=100)",
    "timeout = timedelta(seconds=1)": "timeout = timedelta(seconds=5)",
    "timeout = timedelta(seconds=2)": "timeout = timedelta(seconds=5)",
}
# muster runs the tests of CPU tensors, which are those for Gloo, and the CPU all-to-all tests, which are those for MPI.
RULES = {
    'BACKEND != "gloo"': 'BACKEND not in ("gloo", "muster")',
    'BACKEND != "mpi"': 'BACKEND not in ("mpi", "muster")',
    'BACKEND == "mpi" or BACKEND == "gloo"': 'BACKEND in ("mpi", "gloo", "muster")',
    'require_backend_is_available({"gloo"})': 'require_backend_is_available({"gloo", "muster"})',
    "    dist.Backend.GLOO,\n": '    dist.Backend.GLOO,\n    "muster",\n',  # profiled backends
}
# muster-mpi runs those for MPI.
MPI_RULES = {'"mpi"': '"muster-mpi"'}


def load(
    world_size: int, name: str = MODULE, rewrite: Callable[[str], str] = lambda source: source, backend: str = "muster"
) -> types.ModuleType:
    """The module under that name, changed by the rules for `backend` and by `rewrite`. Its world size stays."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(world_size))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores of one machine
    os.environ.setdefault("TEMP_DIR", os.environ.get("TMPDIR", "/tmp"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    from torch.testing._internal import common_distributed

    features = common_distributed.DistTestCases.backend_feature
    for feature in ("ddp", "gpu", "subgroup", "plugin"):
        features[feature].add(backend)
    rules = MPI_RULES if backend == "muster-mpi" else RULES
    return load_copy(MODULE, name, rules | TIMEOUTS, __file__, rewrite)


def test_case(module: types.ModuleType, owner: str) -> type:
    """The class with all tests, named TestMuster, for the module that is named `owner`.

    Ranks are forked, not spawned, because importing torch again would take most of the time.
    """
    forks.preload(owner)

    class TestMuster(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(forks.Process)

    TestMuster.__module__ = owner
    TestMuster.__qualname__ = "TestMuster"  # a rank finds the class by its name
    return TestMuster
