"""Checks whether muster can run in this process. Imports the standard library only, and torch last."""

from __future__ import annotations

import importlib.util
import sys


def torch_is_being_imported() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def problem() -> str | None:
    """Returns the reason why muster cannot run in this process, or None."""
    try:
        from muster._build import TORCH
    except ModuleNotFoundError as error:
        if error.name != "muster._build":
            raise
        return "muster is not built: run `make` in its source tree, or install the wheel torch-muster"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return f"muster needs PyTorch, which is not installed: run `pip install torch=={TORCH}`"
    found = str(torch.__version__)
    if found.split("+")[0] != TORCH:
        return (
            f"this muster was built against torch {TORCH}, but torch {found} is installed: run "
            f"`pip install torch=={TORCH}`, or build muster again with the torch that is installed"
        )
    if importlib.util.find_spec("muster._C") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        return f"muster has no native module for Python {version}: build it with this interpreter"
    return None


def check() -> None:
    sentence = problem()
    if sentence is not None:
        raise ImportError(sentence, name="muster")
