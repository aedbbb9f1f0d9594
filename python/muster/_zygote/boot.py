"""Loads the modules of this package from the text that the `muster` program passes as descriptor 3."""

import sys

at_start = frozenset(sys.modules)
if not getattr(sys.flags, "safe_path", False):
    # `python -c` adds the current directory. Nothing may be imported from it before a fork.
    sys.path.pop(0)

import os  # noqa: E402
import types  # noqa: E402

PACKAGE = "_muster_zygote"


def load() -> None:
    os.lseek(3, 0, os.SEEK_SET)
    with open(3, encoding="utf-8") as file:
        whole = file.read()
    _, *parts = whole.split("\0")
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        full = PACKAGE if name == "__init__" else f"{PACKAGE}.{name}"
        module = types.ModuleType(full)
        module.__package__ = PACKAGE
        module.__path__ = []
        sys.modules[full] = module
        exec(compile(text, f"<{full.replace('_', ' ').strip()}>", "exec"), module.__dict__)
    vars(sys.modules[PACKAGE]).update(TEXT=whole)  # for a restart


load()
sys.modules[f"{PACKAGE}.main"].main(sys.argv[1:-1], at_start)
