"""The entry point: the zygote of one run, the warm zygote that serves several runs, or a program's fork server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence

from . import warm
from .preload import ImportedPackages
from .server import serve
from .worker import Request, run

SOCKET = 4


def main(words: Sequence[str], at_start: frozenset[str], fd: int = SOCKET) -> None:
    """Returns only in workers, after their program has returned. Then the interpreter exits as usual."""
    role, *rest = words
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    serve_role: Callable[[socket.socket, Sequence[str], ImportedPackages], Request]
    serve_role = serve if role == "cold" else warm.serve_runs
    if role == "fork":
        from .forks import serve_program as serve_role  # not a part of the `muster` program's text
    own = [name for name in sys.modules if name.startswith(str(__package__))]
    request = serve_role(channel, rest, ImportedPackages(at_start))
    for name in own:
        del sys.modules[name]
    run(request.command)
