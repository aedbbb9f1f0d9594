"""Compares python/muster/_C.pyi with the native module, with mypy's stubtest."""

import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., str]

# Skips torch's own types: they need no comparison, and reading them takes most of the time.
SETTINGS = """
[mypy]
[mypy-torch.*]
follow_imports = skip
"""


def test_the_stub_agrees_with_the_native_module(root: Path, run: Run, tmp_path: Path) -> None:
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    stubtest = [sys.executable, "-m", "mypy.stubtest", "muster._C"]
    run([*stubtest, "--mypy-config-file", settings], env={"MYPYPATH": str(root / "python")})
