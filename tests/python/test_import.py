"""Tests the errors of `import muster` when something is missing, and that torch finds the backend by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python"


def python(code: str, *path: Path, site: bool = True, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs the code in a fresh interpreter. Returns its status and the last line of its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **(env or {})}
    command = [sys.executable, *([] if site else ["-S"]), "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def other_build(folder: Path) -> Path:
    """A copy of the package that claims to be built against other releases of torch."""
    shutil.copytree(PACKAGE / "muster", folder / "muster", ignore=shutil.ignore_patterns("__pycache__", "torch-*"))
    for release in ("1.10", "1.9"):
        (folder / f"muster/torch-{release}").mkdir()
    (folder / "muster/torch-1.9.bak").mkdir()  # no release
    return folder


def test_missing_torch_is_reported() -> None:
    status, line = python("import muster", PACKAGE, site=False)
    assert status == 1
    assert line.startswith("ImportError: muster needs PyTorch, which is not installed: run `pip install torch==")


def test_a_wrong_torch_version_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text('__version__ = "1.0.0+cpu"\n')
    status, line = python("import muster", tmp_path, PACKAGE)
    assert status == 1
    assert line.startswith("ImportError: this muster was built for torch ")
    assert "but torch 1.0.0+cpu is installed: run `pip install torch==" in line


def test_an_unbuilt_tree_is_reported(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "muster", tmp_path / "muster", ignore=shutil.ignore_patterns("__pycache__", "torch-*"))
    status, line = python("import muster", tmp_path)
    assert status == 1
    assert line.startswith("ImportError: muster is not built: run `make`")


def test_a_wrong_python_version_is_reported(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "muster", tmp_path / "muster", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    status, line = python("import muster", tmp_path)
    assert status == 1
    assert line.startswith("ImportError: muster has no native module for Python ")


@pytest.mark.parametrize(
    "use",
    [
        "import muster",
        "import torch.distributed as d; d.init_process_group('muster', store=d.HashStore(), rank=0, world_size=1)",
    ],
)
def test_another_torch_does_not_break_import_torch(tmp_path: Path, use: str) -> None:
    """The entry point runs inside `import torch`, so the error is raised only when muster is used."""
    there = tmp_path / "there"
    code = f"import torch, pathlib\npathlib.Path({str(there)!r}).touch()\n{use}"
    status, line = python(code, other_build(tmp_path / "package"))
    assert there.exists(), line
    assert status == 1
    assert line.startswith("ImportError: this muster was built for torch 1.9, 1.10, but torch "), line
    assert "run `pip install torch==1.10.*`" in line


def test_another_torch_leaves_gloo_in_place(tmp_path: Path) -> None:
    code = (
        "import torch, torch.distributed as d\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(2); d.all_reduce(x); assert x.tolist() == [1.0, 1.0]\n"
        "assert d.group.WORLD._get_backend(torch.device('cpu')).name() == 'gloo'\n"
        "d.destroy_process_group()"
    )
    status, line = python(code, other_build(tmp_path), env={"MUSTER_REPLACE": "gloo"})
    assert status == 0, line
    assert line.startswith("muster: a process group uses Gloo despite MUSTER_REPLACE: rank 0: this muster was built ")


def test_import_torch_registers_without_loading_native() -> None:
    code = (
        "import sys, torch, torch.distributed as d; "
        "print('muster' in d.Backend.backend_list, d.Backend.default_device_backend_map['cpu'], "
        "'muster._C' in sys.modules, 'muster._backend' in sys.modules)"
    )
    assert python(code) == (0, "True gloo False False")


def test_import_registers_the_backend_without_autoload() -> None:
    code = (
        "import torch.distributed as d; names = d.Backend.backend_list; before = 'muster' in names; "
        "import muster; print(before, 'muster' in names)"
    )
    assert python(code, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) == (0, "False True")


def test_init_process_group_needs_no_import() -> None:
    code = (
        "import torch, torch.distributed as d; "
        "d.init_process_group('muster', store=d.HashStore(), rank=0, world_size=1); "
        "x = torch.ones(3); d.all_reduce(x); d.destroy_process_group(); print(x.tolist(), d.is_initialized())"
    )
    assert python(code) == (0, "[1.0, 1.0, 1.0] False")


def test_all_exports_exist() -> None:
    code = (
        "import muster; assert all(getattr(muster, n) is not None for n in muster.__all__); print(muster.__version__)"
    )
    status, line = python(code)
    assert (status, line.count(".")) == (0, 2), line
    assert python("import muster; muster.nothing")[1] == "AttributeError: module 'muster' has no attribute 'nothing'"


TWO_RANKS = """
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("muster", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
x = torch.ones(1000)
work = dist.all_reduce(x, async_op=True)
{ending}
print("end", flush=True)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "work.wait()",
        "work.wait(); sys.exit(0)",
        "work.wait(); kept = [x, work, dist.group.WORLD]",
        "for _ in range(200): dist.all_reduce(torch.ones(100_000), async_op=True)",
        "",
    ],
)
def test_a_program_may_exit_with_open_groups(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS.format(ending=ending))
    commands = [[sys.executable, str(script), str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
