#!/usr/bin/env python3
"""Lays out build/manylinux-packages, which cmake/manylinux.cmake builds wheels against.

There, headers and libraries of Debian 12 stand beside the oldest glibc that Debian's servers offer (2.31).
cmake/manylinux.c has what the sources need of versions after 2.28. A stub of libstdc++ hides what came after GCC 8, so
that the linker takes it from the static library. auditwheel checks the result (tools/build_wheel.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packages import Packages

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/manylinux-packages"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
SERVER = "http://deb.debian.org/debian"
OLD = f"deb {SERVER} bullseye main\n"
OLD_PACKAGES = ["libc6", "libc6-dev", "libgcc-s1", "libstdc++6"]
NEW = f"deb {SERVER} bookworm main\ndeb {SERVER}-security bookworm-security main\n"
NEW_PACKAGES = [
    "libcli11-dev",
    "libcurl4-openssl-dev",
    "libexpected-dev",
    "libfmt-dev",
    "libfmt9",  # CMake's files of libfmt-dev ask for it
    "libhiredis-dev",
    "libhwloc-dev",
    "libspdlog-dev",
    "libspdlog1.10",
    "libssl-dev",
    "libstdc++-12-dev",
    "linux-libc-dev",
    "nlohmann-json3-dev",
]
# The last versions of libstdc++ that GCC 8 has.
LAST_VERSIONS = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# The type of a symbol, as readelf prints it: the section and the type in the assembler.
KINDS = {
    "FUNC": (".text", "function"),
    "IFUNC": (".text", "function"),
    "NOTYPE": (".text", "notype"),
    "OBJECT": (".data", "object"),
    "TLS": ('.section .tdata,"awT"', "tls_object"),
}


def make_links_relative(folder: Path) -> None:
    """Lets links that name absolute paths lead to the files of this folder."""
    for path in folder.rglob("*"):
        if path.is_symlink() and (target := path.readlink()).is_absolute():
            path.unlink()
            path.symlink_to(os.path.relpath(f"{folder}{target}", path.parent))


def is_newer(version: str) -> bool:
    name, _, numbers = version.partition("_")
    return name in LAST_VERSIONS and tuple(map(int, re.findall(r"\d+", numbers))) > LAST_VERSIONS[name]


def make_stub(library: Path, stub: Path) -> None:
    """Links a library with the symbols of `library`, and no code, without those that GCC 8 lacks."""
    listed = ["readelf", "--dyn-syms", "--wide", str(library)]
    symbols = subprocess.run(listed, check=True, stdout=subprocess.PIPE, text=True).stdout
    versions: dict[str, list[str]] = {}
    source = []
    # "  8: 000a8e30  32 FUNC  GLOBAL DEFAULT  13 _ZNSo3putEc@@GLIBCXX_3.4"; one @: no new program uses this version.
    line = re.compile(r"\s*\d+: \w+ +(\w+) (\w+) +(GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ ([^@\s]+)@@(\S+)$", re.MULTILINE)
    for size, kind, binding, name, version in line.findall(symbols):
        if is_newer(version):
            continue
        versions.setdefault(version, []).append(name)
        section, assembler_type = KINDS[kind]
        if binding == "UNIQUE":
            assembler_type = "gnu_unique_object"
        space = 1 if section == ".text" else max(int(size, 0), 1)
        source += [section, ".balign 32", f".{'weak' if binding == 'WEAK' else 'globl'} {name}"]
        source += [f".type {name},@{assembler_type}", f".size {name},{size}", f"{name}: .skip {space}"]
    assembly, script = stub.with_suffix(".s"), stub.with_suffix(".map")
    assembly.write_text("\n".join([*source, '.section .note.GNU-stack,"",@progbits', ""]))
    script.write_text("\n".join(f"{version} {{ {'; '.join(names)}; }};" for version, names in versions.items()))
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{library.name},--version-script={script}"]
    subprocess.run(["c++", *options, "-o", stub, assembly], check=True)


def make_shared_openssl(folder: Path) -> None:
    """Links OpenSSL's static libraries to one that all files of muster's package share.

    Its symbols have a version of their own, so that nobody takes them for those of the system's OpenSSL.
    """
    script = folder / "openssl.map"
    script.write_text("MUSTER_OPENSSL { *; };\n")
    libraries = folder / LIBRARIES
    command: list[str | Path] = ["c++", f"--sysroot={folder}", "-shared", "-o", folder / "libmuster_openssl.so"]
    command += [f"-Wl,-soname,libmuster_openssl.so,--version-script={script},-z,defs,--strip-all"]
    command += [f"-B{libraries}", f"-L{folder / 'lib/x86_64-linux-gnu'}", "-Wl,--whole-archive"]
    command += [libraries / "libssl.a", libraries / "libcrypto.a", "-Wl,--no-whole-archive", "-lpthread", "-ldl"]
    subprocess.run(command, check=True)


def main() -> int:
    if FOLDER.exists():
        return 0
    compiler = subprocess.run(["c++", "-dumpfullversion"], check=True, stdout=subprocess.PIPE, text=True).stdout
    if not compiler.startswith("12."):
        print(f"manylinux: c++ is GCC {compiler.strip()}; the C++ library in use here needs GCC 12", file=sys.stderr)
        return 1
    fresh = FOLDER.with_suffix(".part")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, sources, packages in (("old", OLD, OLD_PACKAGES), ("new", NEW, NEW_PACKAGES)):
        downloads = fresh / f"downloads-{name}"
        Packages(downloads, "amd64", sources).unpack(*packages, into=fresh)
        shutil.rmtree(downloads)
    make_links_relative(fresh)
    (fresh / "stub").mkdir()
    make_stub(fresh / LIBRARIES / "libstdc++.so.6", fresh / "stub/libstdc++.so.6")
    static = "/usr/lib/gcc/x86_64-linux-gnu/12/libstdc++.a"
    (fresh / "stub/libstdc++.so").write_text(f"INPUT ( /stub/libstdc++.so.6 {static} )\n")
    compile_command = ["cc", f"--sysroot={fresh}", "-O2", "-fPIC", "-fno-builtin", "-ffunction-sections", "-Wall"]
    subprocess.run([*compile_command, "-c", ROOT / "cmake/manylinux.c", "-o", fresh / "manylinux.o"], check=True)
    make_shared_openssl(fresh)
    fresh.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
