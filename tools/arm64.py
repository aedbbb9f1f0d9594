#!/usr/bin/env python3
"""Unpacks the distribution's arm64 packages that the core needs into build/arm64-packages, for cmake/arm64.cmake."""

import re
import shutil
import sys
from pathlib import Path

from packages import Packages
from setup import SetupError, apt_install

FOLDER = Path(__file__).resolve().parent.parent / "build/arm64-packages"
PACKAGES = [
    "googletest",
    "libcli11-dev",
    "libexpected-dev",
    "libfmt-dev",
    "libgmock-dev",
    "libgtest-dev",
    "libspdlog-dev",
    "libssl-dev",
    "nlohmann-json3-dev",
]
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}


def main() -> int:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    try:
        if missing:
            apt_install(missing)
    except SetupError as error:
        print(f"arm64: {error}", file=sys.stderr)
        return 1
    if FOLDER.exists():
        return 0
    fresh = FOLDER.with_suffix(".part")
    shutil.rmtree(fresh, ignore_errors=True)
    packages = Packages(fresh / "downloads", "arm64")
    # The libraries that the -dev packages depend on have versions in their names.
    libraries = re.findall(r"Depends: (lib(?:fmt|spdlog|ssl)[\d.]+\S*)", packages.dependencies(*PACKAGES))
    packages.unpack(*PACKAGES, *libraries, into=fresh)
    shutil.rmtree(fresh / "downloads")
    fresh.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
