"""Finds the programs that are installed with muster. Imports the standard library only."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def find_program(name: str) -> str:
    """Returns the path of a program beside MUSTER_BIN, beside this Python or on PATH, or raises FileNotFoundError."""
    found = find_beside(name) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"there is no program {name} beside {sys.executable} or on PATH")
    return found


def find_beside(name: str) -> str | None:
    """Returns the path of a program of this installation.

    It is MUSTER_BIN itself, or stands beside it, beside this Python, or where a wheel has those of `muster bench`.
    """
    if name == "muster" and (named := shutil.which(os.environ.get("MUSTER_BIN", ""))):
        return named
    programs = (os.environ.get("MUSTER_BIN", sys.executable), sys.executable)
    folders = [*(Path(program).parent for program in programs), Path(__file__).parent / "bench"]
    return shutil.which(name, path=os.pathsep.join(map(str, folders)))
