"""Checks whether muster can run in this process, and finds its native module. Imports the standard library only, and
torch last.

libtorch has no stable C++ ABI. So the package has a native module for each minor release of torch that it was built
with, in folders named torch-2.13, torch-2.14 and so on.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES

_FOLDER = os.path.dirname(__file__)  # noqa: PTH120, because `import torch` comes here, and pathlib takes milliseconds


def torch_is_being_imported() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def problem() -> str | None:
    """Returns the reason why muster cannot run in this process, or None. Then `import muster._C` works."""
    if sys.platform != "linux":
        return f"muster runs on Linux, and this is {sys.platform}"
    built = _releases()
    if not built:
        return "muster is not built: run `make` in its source tree, or install the wheel torch-muster"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return f"muster needs PyTorch, which is not installed: run `pip install torch=={built[-1]}.*`"
    found = str(torch.__version__)
    release = ".".join(found.split(".")[:2])
    if release not in built:
        return (
            f"this muster was built for torch {', '.join(built)}, but torch {found} is installed: run `pip install "
            f"torch=={built[-1]}.*`, or build muster again with the torch that is installed"
        )
    folder = f"{_FOLDER}/torch-{release}"
    if not any(os.path.exists(f"{folder}/_C{suffix}") for suffix in EXTENSION_SUFFIXES):  # noqa: PTH110
        version = ".".join(map(str, sys.version_info[:2]))
        return f"muster has no native module for Python {version}: build it with this interpreter"
    path = sys.modules["muster"].__path__
    if folder not in path:
        path.append(folder)
    return None


def check() -> None:
    sentence = problem()
    if sentence is not None:
        raise ImportError(sentence, name="muster")


def _releases() -> list[str]:
    """The releases of torch that there are native modules for, the newest last."""
    found = (name.partition("-") for name in os.listdir(_FOLDER))  # noqa: PTH208
    numbers = {release: release.split(".") for kind, _, release in found if kind == "torch"}
    releases = (release for release, parts in numbers.items() if all(map(str.isdecimal, parts)))
    return sorted(releases, key=lambda release: [*map(int, numbers[release])])
