"""The tests of PyTorch's distributed_test.py that construct a DistributedDataParallel, with muster.nn's instead.

Otherwise as test_distributed.py.
"""

from __future__ import annotations

import os

from peer import ddp, suite

RANKS = int(os.environ.get("MUSTER_PEER_RANKS", "2"))
MODULE = suite.load(RANKS, "peer.distributed_test_of_muster_nn", ddp.rewrite)
TestMuster = suite.test_case(MODULE, __name__)
ddp.leave_about_ddp(TestMuster)
