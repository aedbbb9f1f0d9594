"""Runs the shell and Python blocks of the documents. doc_blocks.py describes the comments that control this."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import PAGES, runs
from doc_runs import check_outputs, root_like_folder, run, run_shell


def pages_with(language: str) -> list[str]:
    return [path for path, blocks in PAGES.items() if any(runs(block, language) for block in blocks)]


@pytest.fixture
def page_folder() -> Iterator[Path]:
    with root_like_folder() as folder:
        yield folder


@pytest.mark.parametrize("page", pages_with("sh"))
def test_shell_blocks_run_in_order(page: str, page_folder: Path) -> None:
    """Runs all shell blocks of a page in one shell. Blocks with a title are the files that they use."""
    blocks = [block for block in PAGES[page] if (block.title and block.title != "output") or runs(block, "sh")]
    check_outputs(page, PAGES[page], run_shell(blocks, page_folder))


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_on_two_ranks(page: str, page_folder: Path) -> None:
    """Runs all Python blocks of a page as one program."""
    blocks = [block for block in PAGES[page] if runs(block, "python")]
    (page_folder / "page.py").write_text("".join(block.code for block in blocks))
    run(["muster", "run", "--nproc-per-node", "2", "page.py"], page_folder)
