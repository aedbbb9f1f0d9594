"""PyTorch's distributed_test.py over muster.

By default this file runs a part of the tests at 2 ranks. MUSTER_PEER=all runs every test, and MUSTER_PEER_RANKS sets
the number of ranks. `make peer` runs all tests at 2 and at 4 ranks.
"""

from __future__ import annotations

import os

from peer import suite

TestMuster = suite.test_case(suite.load(int(os.environ.get("MUSTER_PEER_RANKS", "2"))), __name__)
