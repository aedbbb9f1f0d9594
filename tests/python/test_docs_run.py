"""Runs the shell and Python blocks of the documents. doc_blocks.py describes the comments that control this."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, runs
from launching import START_TIMEOUT, find_muster


def pages_with(language: str) -> list[str]:
    return [path for path, blocks in PAGES.items() if any(runs(block, language) for block in blocks)]


@pytest.fixture
def page_folder() -> Iterator[Path]:
    """A directory that looks like the root of the repository, in which a page's blocks may write."""
    with tempfile.TemporaryDirectory(prefix="muster-docs-") as name:
        folder = Path(name)
        for entry in ROOT.iterdir():
            if not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry)
        (folder / ".bin").mkdir()
        program = folder / ".bin/muster"
        program.write_text(f'#!/bin/sh\nMUSTER_PYTHON={sys.executable} exec {find_muster()} "$@"\n')
        program.chmod(0o755)
        yield folder


def environment(folder: Path) -> dict[str, str]:
    (folder / ".runtime").mkdir(exist_ok=True, mode=0o700)
    path = f"{folder / '.bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder / ".runtime"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


def run(command: list[str], folder: Path) -> str:
    """The output of the command. A command that takes too long is killed with all processes that it started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=START_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"did not end:\n{output}", pytrace=False)
    if process.returncode != 0:
        pytest.fail(f"ended with {process.returncode}:\n{output}", pytrace=False)
    return output


@pytest.mark.parametrize("page", pages_with("sh"))
def test_shell_blocks_run_in_order(page: str, page_folder: Path) -> None:
    """Runs all shell blocks of a page in one shell. Blocks with a title are the files that they use."""
    blocks = [block for block in PAGES[page] if (block.title and block.title != "output") or runs(block, "sh")]
    script = ["set -eu"]
    for number, block in enumerate(blocks):
        if block.title:
            script.append(
                f"cat > {shlex.quote(str(page_folder / block.title))} << 'END OF FILE'\n{block.code}END OF FILE"
            )
            script.insert(1, f"mkdir -p {shlex.quote(str((page_folder / block.title).parent))}")
        elif "fails" in block.notes:
            script.append(f"echo @@{number}\n(\n{block.code}) && exit 99 || true")
        else:
            script.append(f"echo @@{number}\n{block.code}")
    output = run(["bash", "-c", "\n".join(script)], page_folder)
    outputs = {blocks[int(number)].line: text for number, text in re.findall(r"(?ms)^@@(\d+)\n(.*?)(?=^@@|\Z)", output)}
    last = ""
    for block in PAGES[page]:
        last = outputs.get(block.line, last)
        if block.title == "output":
            for line in block.code.splitlines():
                expected = ".*".join(map(re.escape, line.split("...")))
                assert re.search(expected, last), f"{page}:{block.line}: no line `{line}` in\n{last}"


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_on_two_ranks(page: str, page_folder: Path) -> None:
    """Runs all Python blocks of a page as one program."""
    blocks = [block for block in PAGES[page] if runs(block, "python")]
    (page_folder / "page.py").write_text("".join(block.code for block in blocks))
    run(["muster", "run", "--nproc-per-node", "2", "page.py"], page_folder)
