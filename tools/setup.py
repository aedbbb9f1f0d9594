#!/usr/bin/env python3
"""Prepares a fresh Debian or Ubuntu machine: system packages, .venv with torch, and the development install of muster.

Every step does only what is missing, so a second run takes a fraction of a second. It needs only Python 3.10 with its
standard library.
"""

from __future__ import annotations  # lets an older Python reach the check in main()

import argparse
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "tools/requirements.txt"
DOCS_REQUIREMENTS = ROOT / "tools/requirements_docs.txt"
MPIS = "open_mpi_5", "mpich_5"  # each in a folder of its own in .venv: their mpirun would hide the distribution's
STAMP = VENV / "muster-requirements.sha256"  # the hash of the installed requirements
TORCH = "2.13.0"  # without an argument
# As in pyproject.toml.
ENTRY_POINTS = """[torch.backends]
muster = muster._autoload:load

[torch.distributed.backends]
muster = muster._autoload:load

[torch_dynamo_backends]
muster = muster.graph:compile_graph

[pytest11]
muster = muster_pytest
"""
BINARY = ROOT / "build/release/src/muster/cli/muster"

# Packages of the distribution that the build needs, and the tests' libraries.
PACKAGES = [
    "ccache",
    "cmake",
    "g++",
    "git",  # tools/tidy.py lists files with it
    "iproute2",  # the several-hosts test joins network namespaces
    "libcli11-dev",
    "libcurl4-openssl-dev",  # etcd:// stores
    "libexpected-dev",
    "libfmt-dev",
    "libgmock-dev",
    "libgtest-dev",
    "libhiredis-dev",  # redis:// stores
    "libhwloc-dev",  # muster run --numa-binding
    "libspdlog-dev",
    "libssl-dev",
    "mold",  # a fast linker
    "ninja-build",
    "nlohmann-json3-dev",
    "openssl",  # the TLS tests make certificates
    "zlib1g-dev",  # examples/cpp reads a compressed file
]
# With --tests.
TEST_PACKAGES = [
    "etcd-server",  # the tests of etcd:// stores start one
    "mpich",  # the tests of groups over MPI
    "openmpi-bin",
    "redis-server",  # the tests of redis:// stores start one
    "slurm-wlm",  # the tests start a cluster of one node
]
# Only for the distribution's `python3`: other Pythons include their headers and venv.
PYTHON_PACKAGES = ["python3-dev", "python3-venv"]
DEFAULT_PYTHON = Path("/usr/bin/python3")
MIN_COMPILER = {"g++": 12, "clang++": 14}
NEWER_COMPILERS = ["g++-12", "g++-13", "g++-14"]  # alternatives to an old c++; the first one is installed


class SetupError(Exception):
    """A problem that the user must solve; the text says how."""


def run(command: list[str], doing: str) -> None:
    """Runs a command without output; on failure shows its output."""
    print(f"setup: {doing}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        last_lines = "\n".join(done.stdout.splitlines()[-40:])
        raise SetupError(f"{last_lines}\n`{shlex.join(command)}` failed with status {done.returncode}")


def python_packages() -> list[str]:
    """The packages with headers and venv of the Python in use. A non-default Python has its own packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if DEFAULT_PYTHON.resolve().name in (version, "python3"):
        return PYTHON_PACKAGES
    return [package.replace("python3", version) for package in PYTHON_PACKAGES]


def missing_packages(tests: bool) -> list[str]:
    if shutil.which("dpkg-query") is None:
        return []  # not Debian: CMake reports what is missing
    wanted = PACKAGES + (TEST_PACKAGES if tests else [])
    if Path(sys.base_prefix) == Path("/usr"):
        wanted += python_packages()
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise SetupError(f"{sys.executable} has no headers (Python.h): use a Python that has them")
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *wanted], capture_output=True, text=True
    ).stdout
    present = {line.split()[0] for line in shown.splitlines() if line.endswith("install ok installed")}
    return [package for package in wanted if package not in present]


def may_install() -> list[str] | None:
    """The prefix that runs a command as root, or None if that needs a password."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        return ["sudo", "-n"]
    return None


def install_packages(tests: bool) -> None:
    missing = missing_packages(tests)
    if missing:
        apt_install(missing)


def apt_install(missing: list[str]) -> None:
    prefix = may_install()
    if prefix is None:
        raise SetupError(
            "system packages are missing and this user is not root; run\n\n"
            f"    sudo apt-get install {' '.join(missing)}\n\nand then the same command again"
        )
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]
    run([*apt, "update"], "apt-get update")
    run([*apt, "install", "--no-install-recommends", *missing], f"apt-get install {' '.join(missing)}")


def compiler_version(compiler: str) -> tuple[str, str, bool]:
    """Returns the compiler's kind, its version, and whether that is new enough."""
    banner = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    kind = "clang++" if "clang" in banner else "g++"
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    number = re.match(r"\d+", version)
    return kind, version, number is None or int(number.group()) >= MIN_COMPILER[kind]


def check_compiler() -> None:
    """Finds a compiler that is new enough: $CXX, or c++; if c++ is old, installs g++ 12."""
    named = os.environ.get("CXX")
    compiler = named or "c++"
    if shutil.which(compiler) is None:
        raise SetupError(f"there is no C++ compiler named {compiler}: install g++ 12 or newer, or set CXX")
    kind, version, new_enough = compiler_version(compiler)
    if new_enough:
        return
    if named:
        raise SetupError(
            f"CXX={named} is {kind} {version} and muster needs g++ 12 or clang 14: unset CXX or name another"
        )
    newer = next((name for name in NEWER_COMPILERS if shutil.which(name)), None)
    if newer is None:
        newer = NEWER_COMPILERS[0]
        print(f"setup: c++ is {kind} {version}, and muster needs g++ 12 or clang 14", flush=True)
        apt_install([newer])
    use_compiler(newer)


def use_compiler(name: str) -> None:
    """Links the compiler as .venv/bin/c++. The Makefile puts that directory first on PATH, where CMake finds it."""
    found, link = shutil.which(name), VENV / "bin/c++"
    if found is None:
        raise SetupError(f"{name} is not on PATH although it was installed: set CXX to a g++ 12 or newer")
    if link.resolve() != Path(found).resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(found)


def make_venv() -> None:
    """Makes .venv. Makes it again if an earlier attempt failed: without python3-venv, it lacks pip."""
    python = VENV / "bin/python"
    if STAMP.exists() and python.exists():
        return  # complete
    if python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    if VENV.exists():
        print("setup: .venv has no working pip: making it anew", flush=True)
        shutil.rmtree(VENV)
    run([sys.executable, "-m", "venv", str(VENV)], "python3 -m venv .venv")


def site_packages() -> Path:
    found = sorted(VENV.glob("lib/python3.*/site-packages"))
    if not found:
        raise SetupError(f"{VENV} is not a virtual environment: remove it and run this again")
    return found[0]


def installed_version(package: str) -> str | None:
    """The version in .venv without the build (+cpu), or None."""
    found = importlib.metadata.distributions(name=package, path=[str(site_packages())])
    return next((distribution.version.partition("+")[0] for distribution in found), None)


def install_python_packages(torch: str, tests: bool) -> None:
    pip = [str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if installed_version("torch") != torch:
        run([*pip, f"torch=={torch}"], f"pip install torch=={torch}")
    install_requirements(REQUIREMENTS, STAMP)
    for name in MPIS if tests else ():
        # --ignore-installed: .venv itself may have it, too, for tests of frameworks.
        options = "--ignore-installed", "--prefix", str(VENV / name)
        install_requirements(ROOT / f"tools/requirements_{name}.txt", VENV / name / "requirements.sha256", *options)


def install_requirements(requirements: Path, stamp: Path, *options: str) -> None:
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        pip = [str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, *options, "-r", str(requirements)], f"pip install -r {os.path.relpath(requirements, ROOT)}")
        stamp.write_text(digest)


def write(path: Path, text: str, executable: bool = False) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(0o755)


def install_for_development() -> None:
    """Installs python/muster, the entry point and the built binary in .venv, as the wheel does."""
    site = site_packages()
    if any(d.read_text("WHEEL") for d in importlib.metadata.distributions(name="torch-muster", path=[str(site)])):
        raise SetupError("a torch-muster wheel is installed in .venv: `.venv/bin/pip uninstall torch-muster` first")
    match = re.search(r"project\(muster VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert match, "CMakeLists.txt names no version"
    version = match.group(1)
    for stale in site.glob("torch_muster-*.dist-info"):
        if stale.name != f"torch_muster-{version}.dist-info":
            shutil.rmtree(stale)
    info = site / f"torch_muster-{version}.dist-info"
    write(site / "torch_muster.pth", f"{ROOT / 'python'}\n")
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: torch-muster\nVersion: {version}\n")
    write(info / "entry_points.txt", ENTRY_POINTS)
    write(info / "INSTALLER", "tools/setup.py\n")
    write(
        VENV / "bin/muster",
        "#!/bin/sh\n# Runs the binary of the release build with this environment's Python.\n"
        f'MUSTER_PYTHON="${{MUSTER_PYTHON:-{VENV}/bin/python}}" exec "{BINARY}" "$@"\n',
        executable=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="?", default=TORCH, help="the release of torch (default: %(default)s)")
    parser.add_argument("--tests", action="store_true", help="also install the programs that only tests need")
    parser.add_argument("--docs", action="store_true", help="also install what `make docs` needs")
    parser.add_argument("--requirements", type=Path, nargs="+", default=[], metavar="FILE", help="install them, too")
    arguments = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036
        print("setup: muster needs Python 3.10 or newer", file=sys.stderr)
        return 1
    try:
        install_packages(arguments.tests)
        make_venv()
        check_compiler()
        install_python_packages(arguments.torch, arguments.tests)
        if arguments.docs:
            install_requirements(DOCS_REQUIREMENTS, STAMP.with_name("muster-requirements-docs.sha256"))
        for path in arguments.requirements:
            install_requirements(path, STAMP.with_name(f"muster-{path.resolve().parent.name}-{path.stem}.sha256"))
        install_for_development()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
