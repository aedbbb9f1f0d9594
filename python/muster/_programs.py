"""Finds the programs that are installed with muster. Imports the standard library only."""

import os
import shutil
import sys
from pathlib import Path


def find_program(name: str) -> str:
    """Returns the path of a program beside MUSTER_BIN, beside this Python or on PATH, or throws FileNotFoundError."""
    programs = (os.environ.get("MUSTER_BIN", sys.executable), sys.executable)
    folders = [*(str(Path(program).parent) for program in programs), os.environ.get("PATH", os.defpath)]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise FileNotFoundError(f"there is no program {name} beside {sys.executable} or on PATH")
    return found
