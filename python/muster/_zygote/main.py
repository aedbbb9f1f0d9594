"""The entry point: the zygote of one run, the warm zygote that serves several runs, or a program's fork server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence

from . import warm
from .forks import serve_program
from .preload import ImportedPackages
from .server import serve
from .worker import Request, run

SOCKET = 4


def main(words: Sequence[str], at_start: frozenset[str], fd: int = SOCKET) -> None:
    """Returns only in workers, after their program has returned. Then the interpreter exits as usual."""
    role, *rest = words
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    roles: dict[str, Callable[[socket.socket, Sequence[str], ImportedPackages], Request]]
    roles = {"cold": serve, "fork": serve_program, "warm": warm.serve_runs}
    own = [name for name in sys.modules if name.startswith(str(__package__))]
    request = roles[role](channel, rest, ImportedPackages(at_start))
    for name in own:
        del sys.modules[name]
    run(request.command)
