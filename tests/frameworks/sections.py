"""Runs a section of docs/integrations.md as a reader does, over muster and over Gloo."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping

import pytest
from doc_blocks import PAGES, ROOT, Block
from doc_runs import check_outputs, root_like_folder, run_shell

PAGE = "docs/integrations.md"
REPLACED = 'process groups that ask for "gloo" use muster'
# GLOO_SOCKET_IFNAME: Gloo otherwise uses the address of the host's name. The directory keeps what DeepSpeed compiles.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_EXTENSIONS_DIR": str(ROOT / "build/torch_extensions")}


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a file's tests where packages are missing."""
    missing = [package for package in packages if not list(importlib.metadata.distributions(name=package))]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (`make frameworks`)")


def blocks_below(heading: str) -> list[Block]:
    """The blocks of a section, after those above all sections, which every section uses."""
    lines = (ROOT / PAGE).read_text().splitlines()
    starts = [number for number, line in enumerate(lines, start=1) if line.startswith("## ")]
    begin = lines.index(f"## {heading}") + 1
    end = min([number for number in starts if number > begin], default=len(lines) + 1)
    return [block for block in PAGES[PAGE] if block.line < starts[0] or begin < block.line < end]


def over_gloo(code: str) -> str:
    """The same code without muster. A program that does not destroy its group ends at once, because Gloo aborts a
    process whose Python ends while Gloo's thread still holds a tensor."""
    code = code.replace(" --replace gloo", "").replace('"muster"', '"gloo"')
    if re.search(r"^trainer\.(fit|train)\(|^fabric\.", code, re.MULTILINE):
        code += "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    return code


def run_section(heading: str, edit: Callable[[str], str] | None = None, env: Mapping[str, str] | None = None) -> str:
    """Returns the output of the section's commands. Without `edit`, the page must show that output."""
    found = blocks_below(heading)
    kept = [block for block in found if (block.title and block.title != "output") or block.language == "sh"]
    if edit:
        kept = [Block(each.line, each.language, edit(each.code), each.title, notes=each.notes) for each in kept]
    with root_like_folder() as folder:
        outputs = run_shell(kept, folder, {**ENVIRONMENT, "RAY_TMPDIR": str(folder), **(env or {})})
    if not edit:
        check_outputs(PAGE, found, outputs)
    return "".join(outputs.values())


def losses(output: str) -> list[str]:
    found = sorted(re.findall(r"\bloss (\d+\.\d+)", output))
    assert found, output
    return found


def compare_with_replaced(heading: str) -> None:
    """Trains in groups that ask for Gloo, with MUSTER_REPLACE and without."""

    def asking_for_gloo(code: str) -> str:
        return code.replace('"muster"', '"gloo"')

    muster = run_section(heading, asking_for_gloo, {"MUSTER_REPLACE": "gloo"})
    assert REPLACED in muster and "over gloo" in muster, muster
    assert losses(muster) == losses(run_section(heading, over_gloo))


def compare_with_gloo(heading: str, env: Mapping[str, str] | None = None) -> None:
    """Trains over muster and over Gloo: the losses must be equal, digit for digit."""
    muster, gloo = run_section(heading, env=env), run_section(heading, over_gloo, env)
    assert REPLACED in muster or "over muster" in muster, muster
    assert REPLACED not in gloo and "over muster" not in gloo, gloo
    assert losses(muster) == losses(gloo)
