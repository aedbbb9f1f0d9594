"""The entry point: the zygote of one run, or the warm zygote that serves several runs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from . import warm
from .preload import ImportedPackages
from .server import serve
from .worker import run

SOCKET = 4


def main(words: Sequence[str], at_start: frozenset[str]) -> None:
    """Returns only in workers, after their program has returned. Then the interpreter exits as usual."""
    role, *rest = words
    channel = socket.socket(fileno=SOCKET)
    channel.set_inheritable(False)
    own = [name for name in sys.modules if name.startswith(str(__package__))]
    request = (serve if role == "cold" else warm.serve_runs)(channel, rest, ImportedPackages(at_start))
    for name in own:
        del sys.modules[name]
    run(request.command)
