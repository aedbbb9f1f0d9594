"""PyTorch's distributed_test.py over muster.

By itself this file runs a part of it at 2 ranks. MUSTER_PEER=all runs every test, MUSTER_PEER_RANKS says at how many
ranks; `make peer` runs all at 2 and at 4.
"""

from __future__ import annotations

import os

from peer import suite

TestMuster = suite.test_case(suite.load(int(os.environ.get("MUSTER_PEER_RANKS", "2"))), __name__)
