"""What the processes of a test get, and what they answer."""

from __future__ import annotations

import dataclasses
from multiprocessing import reduction
from pathlib import Path
from typing import Any


class Descriptor:
    """A file descriptor that can be an argument of a process. There it is an int."""

    def __init__(self, fd: int):
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self._fd),)


def _detach(duplicate: Any) -> int:
    return int(duplicate.detach())


@dataclasses.dataclass
class Test:
    """A test function, found by its names, and how pytest was told to import and to show it."""

    path: Path
    import_options: dict[str, Any]  # of import_path()
    names: list[str]  # of the class, if any, and of the function
    arguments: dict[str, Any]
    python_files: list[str]
    repr_options: dict[str, Any]  # of ExceptionInfo.getrepr()


@dataclasses.dataclass
class Job:
    rank: int
    size: int
    backend: str
    timeout: float
    store: Descriptor  # a file
    outputs: list[Descriptor]  # replace standard output and error; empty if they are not captured


@dataclasses.dataclass
class Result:
    kind: str  # passed, failed, skipped, xfailed
    line: str = ""  # why, in short
    at: float = 0.0  # time.monotonic()
    exception: bytes = b""  # pickled; empty if that is impossible
    longrepr: Any = None  # what pytest shows
