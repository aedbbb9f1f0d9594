"""torch.testing._internal.distributed.distributed_test with muster as the backend under test.

The module reads the backend's name from the environment and asks it in three ways which tests apply; all three know the
names of torch's own backends only. The rules below teach them muster: its source is changed in these places and in no
other, and a rule that no longer finds its place fails.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable

import forks

MODULE = "torch.testing._internal.distributed.distributed_test"

# In the source: what -> with what. Tests for Gloo are for CPU tensors, those for MPI are CPU all-to-all. Times that are
# to be long enough for all ranks to come are so on a loaded machine, too.
RULES = {
    'BACKEND != "gloo"': 'BACKEND not in ("gloo", "muster")',
    'BACKEND != "mpi"': 'BACKEND not in ("mpi", "muster")',
    'BACKEND == "mpi" or BACKEND == "gloo"': 'BACKEND in ("mpi", "gloo", "muster")',
    'require_backend_is_available({"gloo"})': 'require_backend_is_available({"gloo", "muster"})',
    "    dist.Backend.GLOO,\n": '    dist.Backend.GLOO,\n    "muster",\n',  # lists of those whose events profilers see
    "def sync(cls, wait_for=None, timeout=10)": "def sync(cls, wait_for=None, timeout=100)",
    "timeout = timedelta(seconds=1)": "timeout = timedelta(seconds=5)",
    "timeout = timedelta(seconds=2)": "timeout = timedelta(seconds=5)",
}


def load(
    world_size: int, name: str = MODULE, rewrite: Callable[[str], str] = lambda source: source
) -> types.ModuleType:
    """The module, changed by RULES and by `rewrite`, under that name. It binds the world size for good."""
    os.environ.update(BACKEND="muster", WORLD_SIZE=str(world_size))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for each of several ranks on the cores of one machine
    os.environ.setdefault("TEMP_DIR", os.environ.get("TMPDIR", "/tmp"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    from torch.testing._internal import common_distributed

    features = common_distributed.DistTestCases.backend_feature
    for feature in ("ddp", "gpu", "subgroup", "plugin"):
        features[feature].add("muster")
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    for old, new in RULES.items():
        if old not in source:
            raise AssertionError(f"{MODULE} of this torch has no {old!r} any more: mend RULES in {__file__}")
        source = source.replace(old, new)
    source = rewrite(source)
    module = types.ModuleType(name)
    module.__file__ = spec.origin
    module.__package__ = spec.parent
    sys.modules[name] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def test_case(module: types.ModuleType, owner: str) -> type:
    """The class with all tests, TestMuster of the module that is named owner.

    Ranks are forked, not spawned: importing torch anew would be most of the time.
    """
    forks.preload(owner)

    class TestMuster(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(forks.Process)

    TestMuster.__module__ = owner
    TestMuster.__qualname__ = "TestMuster"  # a rank finds the class by its name
    return TestMuster
