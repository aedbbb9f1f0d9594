"""Downloads packages of a Debian or Ubuntu distribution and unpacks them into a folder.

It does not install them, so the system stays unchanged and no privileges are needed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path


class Packages:
    """The packages for one architecture. `sources` are lines of a sources.list; without them, those of this machine."""

    def __init__(self, folder: Path, architecture: str, sources: str = "") -> None:
        """`folder` is for the lists and the downloads."""
        self._folder = folder.absolute()
        (folder / "lists/partial").mkdir(parents=True)
        self._options = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "root",
            "Dir::Cache": self._folder,
            "Dir::State::Lists": self._folder / "lists",
            "Dir::State::Status": "/dev/null",  # as on a machine with no installed packages
        }
        if sources:
            (folder / "sources.list").write_text(sources)
            self._options["Dir::Etc::SourceList"] = self._folder / "sources.list"
            self._options["Dir::Etc::SourceParts"] = "/dev/null"
        self._apt("apt-get", "update")

    def dependencies(self, *packages: str) -> str:
        """Returns what `apt-cache depends` prints."""
        return self._apt("apt-cache", "depends", *packages)

    def unpack(self, *packages: str, into: Path) -> None:
        self._apt("apt-get", "download", *packages)
        for package in self._folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, into], check=True)
            package.unlink()

    def _apt(self, tool: str, *words: str) -> str:
        options = [word for name, value in self._options.items() for word in ("-o", f"{name}={value}")]
        command = [tool, "-qq", *options, *words]
        return subprocess.run(command, check=True, cwd=self._folder, stdout=subprocess.PIPE, text=True).stdout
