"""As test_ddp.py, with muster's default of gradient_as_bucket_view, True, instead of torch's."""

from __future__ import annotations

import os

from peer import ddp, suite

RANKS = int(os.environ.get("MUSTER_PEER_RANKS", "2"))
MODULE = suite.load(RANKS, "peer.distributed_test_of_views", ddp.rewrite)
vars(MODULE)["DistributedDataParallel"] = ddp.OfViews
TestMuster = suite.test_case(MODULE, __name__)
ddp.leave_about_ddp(TestMuster)
