"""As test_ddp.py, with gradient_as_bucket_view as it is by default in muster and is not in torch: True."""

from __future__ import annotations

import os

from peer import ddp, suite

RANKS = int(os.environ.get("MUSTER_PEER_RANKS", "2"))
MODULE = suite.load(RANKS, "peer.distributed_test_of_views", ddp.rewrite)
vars(MODULE)["DistributedDataParallel"] = ddp.OfViews
TestMuster = suite.test_case(MODULE, __name__)
ddp.leave_about_ddp(TestMuster)
