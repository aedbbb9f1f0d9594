"""A pytest plugin for test_gloo.py: the processes of PyTorch's tests come from the fork server."""

from peer.fork_server import use_fork_server

use_fork_server("test_c10d_common")
