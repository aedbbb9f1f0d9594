"""Tests of PyTorch that ask for Gloo, over Gloo and with MUSTER_REPLACE=gloo: those of the backend, and those of the
functional collectives, also in compiled graphs. Its tests of Inductor's collectives are changed to run on the CPU.

PyTorch's wheel does not have these files. MUSTER_PYTORCH names a folder with PyTorch's source, of a release that is not
much older than the installed one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from peer import inductor_on_cpu

TESTS = Path(os.environ.get("MUSTER_PYTORCH", "missing"), "test/distributed")
# With a number of tests that pass at least. Many of the last one read code for GPUs, and fail over Gloo, too.
FILES = {"test_c10d_gloo.py": 50, "test_functional_api.py": 20, inductor_on_cpu.FILE: 15}
TIMEOUT = 900  # seconds, on a loaded machine
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

pytestmark = pytest.mark.skipif(
    not all((TESTS / file).is_file() for file in FILES),
    reason=f"MUSTER_PYTORCH names no folder with PyTorch's test/distributed and {', '.join(FILES)} in it",
)


def run(words: list[str], replace: str, timeout: float, folder: Path = TESTS) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), str(TESTS)]
    settings = {"MUSTER_REPLACE": replace, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def passed(file: str, replace: str, folder: Path) -> set[str]:
    """The names of the tests that pass."""
    tests = TESTS
    if file == inductor_on_cpu.FILE:
        tests = folder
        (tests / file).write_text(inductor_on_cpu.rewrite((TESTS / file).read_text()))
    report = folder / f"report{replace}.xml"
    # Its conftest.py needs an older pytest.
    options = ["-q", "-n", "3", "--noconftest", "-p", "peer.gloo_processes", "-p", "no:cacheprovider"]
    options += ["--junitxml", str(report)]
    done = run(["-m", "pytest", *options, file], replace, TIMEOUT, tests)
    assert report.is_file(), done.stdout + done.stderr
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}" for case in cases if len(case) == 0}


@pytest.mark.parametrize("file", FILES)
def test_what_passes_with_gloo_passes_when_it_is_replaced(file: str, tmp_path: Path) -> None:
    assert 'ask for "gloo" use muster' in run(["-c", GROUP], "gloo", 120).stderr
    over_gloo = passed(file, "", tmp_path)
    assert len(over_gloo) > FILES[file]
    assert over_gloo - passed(file, "gloo", tmp_path) == set()
