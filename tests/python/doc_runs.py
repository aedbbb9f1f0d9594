"""Runs code blocks of the documents as a reader does, in a directory that looks like the root of the repository."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from doc_blocks import ROOT, Block
from launching import START_TIMEOUT, find_muster


@contextlib.contextmanager
def root_like_folder() -> Iterator[Path]:
    """A directory with links to the entries of the repository, in which a page's blocks may write."""
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


def run(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """The output of the command. A command that takes too long is killed with all processes that it started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment(folder), **(env or {})},
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


def run_shell(blocks: list[Block], folder: Path, env: Mapping[str, str] | None = None) -> dict[int, str]:
    """Runs the shell blocks in one shell; blocks with a title are files. Returns the output by the block's line."""
    script = ["set -eu"]
    for number, block in enumerate(blocks):
        if block.title:
            script.append(f"cat > {shlex.quote(str(folder / block.title))} << 'END OF FILE'\n{block.code}END OF FILE")
            script.insert(1, f"mkdir -p {shlex.quote(str((folder / block.title).parent))}")
        elif "fails" in block.notes:
            script.append(f"echo @@{number}\n(\n{block.code}) && exit 99 || true")
        else:
            script.append(f"echo @@{number}\n{block.code}")
    output = run(["bash", "-c", "\n".join(script)], folder, env)
    return {blocks[int(number)].line: text for number, text in re.findall(r"(?ms)^@@(\d+)\n(.*?)(?=^@@|\Z)", output)}


def check_outputs(page: str, blocks: list[Block], outputs: dict[int, str]) -> None:
    """Compares blocks with the title `output` with the output of the shell block before."""
    last = ""
    for block in blocks:
        last = outputs.get(block.line, last)
        if block.title == "output":
            for line in block.code.splitlines():
                expected = ".*".join(map(re.escape, line.split("...")))
                assert re.search(expected, last), f"{page}:{block.line}: no line `{line}` in\n{last}"
