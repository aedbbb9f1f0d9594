"""python/muster/_C.pyi says what the native module has: mypy's own comparison of the two."""

import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., str]


def test_the_stub_agrees_with_the_native_module(root: Path, run: Run) -> None:
    stubtest = [sys.executable, "-m", "mypy.stubtest", "muster._C", "--mypy-config-file", root / "pyproject.toml"]
    run(stubtest, env={"MYPYPATH": str(root / "python"), "MYPY_CACHE_DIR": str(root / ".mypy_cache/stubtest")})
