"""The part of PyTorch's distributed_test.py that is about DistributedDataParallel, with muster.nn's in its place.

As test_distributed.py, but for the tests that never construct one.
"""

from __future__ import annotations

import os

from peer import ddp, suite

RANKS = int(os.environ.get("MUSTER_PEER_RANKS", "2"))
MODULE = suite.load(RANKS, "peer.distributed_test_of_muster_nn", ddp.rewrite)
TestMuster = suite.test_case(MODULE, __name__)
ddp.leave_about_ddp(TestMuster)
