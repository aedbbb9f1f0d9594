"""The part of PyTorch's distributed_test.py that is about DistributedDataParallel, with muster.nn's in its place.

As test_distributed.py, but for the tests that never construct one.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

from peer import ddp, suite

RANKS = int(os.environ.get("MUSTER_PEER_RANKS", "2"))
MODULE = suite.load(RANKS, "peer.distributed_test_of_muster_nn", ddp.rewrite)
_ABOUT_DDP = re.compile("DistributedDataParallel|DDP|ddp_|_ddp")


def _is_about_ddp(test: Any) -> bool:
    return _ABOUT_DDP.search(inspect.getsource(inspect.unwrap(test))) is not None


TestMuster = suite.test_case(MODULE, __name__)
for _name, _test in inspect.getmembers(TestMuster, inspect.isfunction):
    if _name.startswith("test_") and not _is_about_ddp(_test):
        setattr(TestMuster, _name, None)
