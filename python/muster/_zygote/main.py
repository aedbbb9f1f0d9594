"""What a Python that was started with this package's text is: a zygote of one run, or the one that is kept warm."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from . import warm
from .preload import Tops
from .server import serve
from .worker import run

SOCKET = 4


def main(words: Sequence[str], at_start: frozenset[str]) -> None:
    """Returns in workers, when their program has; then the interpreter ends as it always does."""
    role, *rest = words
    channel = socket.socket(fileno=SOCKET)
    channel.set_inheritable(False)
    own = [name for name in sys.modules if name.startswith(str(__package__))]
    request = (serve if role == "cold" else warm.keep)(channel, rest, Tops(at_start))
    for name in own:
        del sys.modules[name]
    run(request.command)
