"""Checks the code blocks of the documents: they run or say why not, quote files exactly, compile, and name options that
exist. test_docs_run.py runs the shell and Python blocks. doc_blocks.py describes the comments that control both.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from doc_blocks import PAGES, ROOT, blocks_of, runs
from launching import START_TIMEOUT, find_muster

# The number of blocks that no test runs; each has a reason. Lower it when one more block runs; avoid raising it.
NOT_RUN = 23
SHOWN_OR_RUN = ("sh", "python", "cpp", "text")


def test_every_block_runs_or_has_a_reason() -> None:
    wrong, not_run = [], []
    for path, blocks in PAGES.items():
        for block in blocks:
            where = f"{path}:{block.line}"
            if "not run" in block.notes:
                not_run.append(f"{where}: {block.notes['not run']}")
                if len(block.notes["not run"]) < 10:
                    wrong.append(f"{where}: say why it is not run")
            elif "run by" in block.notes:
                if not list((ROOT / block.notes["run by"]).glob("test_*.py")):
                    wrong.append(f"{where}: {block.notes['run by']} has no tests")
            elif not block.title and "part of" not in block.notes and block.language not in SHOWN_OR_RUN:
                wrong.append(f"{where}: a block of {block.language or 'no language'} needs a title or a comment")
    assert not wrong, "\n".join(wrong)
    assert len(not_run) == NOT_RUN, "\n".join(not_run)


def test_each_section_about_a_framework_is_run() -> None:
    lines = (ROOT / "docs/integrations.md").read_text().splitlines()
    starts = [number for number, line in enumerate(lines, start=1) if line.startswith("## ")]
    blocks = [block.line for block in PAGES["docs/integrations.md"]]
    sections = [
        lines[start - 1][3:]
        for start, end in pairwise([*starts, len(lines) + 1])
        if any(start < line < end for line in blocks)
    ]
    tests = "".join(path.read_text() for path in (ROOT / "tests/frameworks").glob("test_*.py"))
    assert len(sections) > 10
    assert [section for section in sections if f'"{section}"' not in tests] == []


def test_blocks_that_quote_a_file_are_in_it() -> None:
    for path, blocks in PAGES.items():
        for block in blocks:
            if source := block.notes.get("same as"):
                assert block.code == (ROOT / source).read_text(), f"{path}:{block.line} is not {source}"
            if source := block.notes.get("part of"):
                file = textwrap.dedent((ROOT / source).read_text())
                assert block.code in file, f"{path}:{block.line} is not part of {source}"


def test_cpp_blocks_compile(release_build: Path, tmp_path: Path) -> None:
    """Compiles all pages as one file, each in its own namespace, because torch's headers take most of the time."""
    includes, body = set(), []
    for number, blocks in enumerate(PAGES.values()):
        body.append(f"namespace page{number} {{")
        for block in blocks:
            if runs(block, "cpp"):
                includes |= set(re.findall(r"(?m)^#include .*$", block.code))
                body.append(re.sub(r"(?m)^#include .*$", "", block.code))
        body.append("}")
    (tmp_path / "blocks.cpp").write_text("\n".join([*sorted(includes), *body, ""]))
    commands = json.loads((release_build / "compile_commands.json").read_text())
    flags = shlex.split(next(entry["command"] for entry in commands if "/src/muster/torch/" in entry["file"]))
    kept = [
        flag
        for before, flag in zip(["", *flags], flags, strict=False)
        if re.match(r"-[DIf]|-std|-isystem", flag) or before == "-isystem"
    ]
    launcher = ["ccache"] if shutil.which("ccache") else []
    compiled = subprocess.run(
        [*launcher, "c++", *kept, "-O0", "-c", "blocks.cpp", "-o", "blocks.o"],
        cwd=tmp_path,
        env={**os.environ, "CCACHE_NOHASHDIR": "1"},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
    )
    assert compiled.returncode == 0, compiled.stderr[:4000]


@functools.cache
def options_of(*command: str) -> frozenset[str]:
    """The options that a command's --help lists."""
    done = subprocess.run(
        [find_muster() or "", *command, "--help"], capture_output=True, text=True, timeout=START_TIMEOUT
    )
    assert done.returncode == 0, f"muster {' '.join(command)} --help: {done.stderr}"
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout)) | {"--help", "-h"}


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each call of `muster` in a document: in code blocks, in inline code, and in YAML lists."""
    code = re.sub(r"\\\n\s*", " ", text)
    for line in re.findall(r"`(muster [^`\n]*)`", code):
        yield line.split()
    for block in blocks_of(code):
        for line in block.code.splitlines():
            line = re.sub(r"command: \[(.*)\]", lambda words: words.group(1).replace(",", " "), line)
            for call in re.findall(r"(?:^|[;&|$ ])\s*((?<!: )muster (?!:|import )[a-z][^;|#)]*)", line):
                yield call.split()


def test_options_named_in_documents_exist() -> None:
    unknown, checked = [], 0
    subcommands = re.findall(
        r"(?m)^  (\w+) ",
        subprocess.run([find_muster() or "", "store", "--help"], capture_output=True, text=True).stdout.partition(
            "Subcommands:"
        )[2],
    )
    for page in PAGES:
        for words in commands_in((ROOT / page).read_text()):
            command = [words[1]]
            if command == ["store"]:
                command += [word for word in words[2:] if word in subcommands][:1]
            elif command == ["bench"] and len(words) > 2 and words[2].isalpha() and words[2].islower():
                command.append(words[2])
            elif words[1:3] in (["explain", "graph"], ["explain", "--devices"]):
                command.append(words.pop(2))
            known = options_of(*command) | (options_of("store") if command[0] == "store" else set())
            for word in words[2:]:
                if command == ["run"] and re.search(r"\.py$|^\./|^package\.", word):
                    break  # the next words belong to the script
                option = re.match(r"--?[a-z][\w-]*", word)
                checked += option is not None
                if option and option.group().replace("_", "-") not in known:
                    unknown.append(f"{page}: muster {' '.join(command)} has no option {option.group()}")
    assert not unknown, "\n".join(unknown)
    assert checked > 50
