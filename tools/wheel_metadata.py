"""Metadata of a wheel that pyproject.toml cannot express: the release of torch that its native module needs.

scikit-build-core calls this when it builds (`[[tool.dynamic-metadata]]`). libtorch has no stable C++ ABI, so a native
module fits one minor release of torch. A source package needs a release that it can be built with.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any


class Provider:
    """`settings` has the constant requirements, and in `torch` the releases that the sources can be built with."""

    def __init__(self) -> None:
        self._state = ""

    def build_state(self, state: str) -> None:
        self._state = state

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, list[str]]:
        torch = settings["torch"] if self._state == "sdist" else f"=={_installed_release()}.*"
        return {"dependencies": [f"torch{torch}", *settings["others"]]}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}


def _installed_release() -> str:
    """The minor release of torch, as in python/bindings/CMakeLists.txt: "2.13" for "2.13.0+cpu"."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            "muster is built against the torch that is installed, and none is: install torch and scikit-build-core, "
            "then build with `pip wheel --no-build-isolation .`"
        ) from None
    release = re.match(r"\d+\.\d+", version)
    if release is None:
        raise RuntimeError(f"the installed torch has the version {version!r}, which begins with no release")
    return release.group()
