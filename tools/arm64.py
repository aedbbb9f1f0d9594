#!/usr/bin/env python3
"""Unpacks the distribution's arm64 packages that the core needs into build/arm64-packages, for cmake/arm64.cmake.

It does not install the packages, so the system stays unchanged and no privileges are needed.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

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
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user", "apt-get": "apt"}


def apt(tool: str, *words: str, cwd: Path) -> str:
    """Runs apt-get or apt-cache as on an arm64 machine with no installed packages, with its own package lists."""
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::Cache": cwd,
        "Dir::State::Lists": cwd / "lists",
        "Dir::State::Status": "/dev/null",
    }
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return subprocess.run([tool, "-qq", *given, *words], check=True, cwd=cwd, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        print(f"arm64: missing on this machine: apt-get install {' '.join(missing)}", file=sys.stderr)
        return 1
    if FOLDER.exists():
        return 0
    fresh = FOLDER.with_suffix(".part")
    shutil.rmtree(fresh, ignore_errors=True)
    downloads = fresh / "downloads"
    (downloads / "lists/partial").mkdir(parents=True)
    apt("apt-get", "update", cwd=downloads)
    # The libraries that the -dev packages depend on have versions in their names.
    behind = re.findall(
        r"Depends: (lib(?:fmt|spdlog|ssl)[\d.]+\S*)", apt("apt-cache", "depends", *PACKAGES, cwd=downloads)
    )
    apt("apt-get", "download", *PACKAGES, *behind, cwd=downloads)
    for package in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, fresh], check=True)
    shutil.rmtree(downloads)
    fresh.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
