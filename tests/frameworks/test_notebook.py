"""Accelerate's notebook_launcher in a Jupyter kernel."""

import importlib
import re

import pytest
from doc_runs import environment, root_like_folder
from sections import ENVIRONMENT, REPLACED, blocks_below, losses, needs

pytestmark = needs("accelerate", "nbclient", "ipykernel")


def executed(code: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a notebook shows that has one cell with this code."""
    nbclient, nbformat = map(importlib.import_module, ("nbclient", "nbformat"))
    with root_like_folder() as folder:
        for name, text in files.items():
            (folder / name).write_text(text)
        for name, value in {**environment(folder), **ENVIRONMENT}.items():
            monkeypatch.setenv(name, value)
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
        client.execute()
    return "".join(output.get("text", "") for output in notebook.cells[0].outputs)


def test_the_launcher_trains_as_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {block.title: block.code for block in blocks_below("Notebooks")}
    cell = blocks.pop("cell")
    muster = executed(cell, blocks, monkeypatch)
    for line in blocks["output"].splitlines():
        assert re.search(".*".join(map(re.escape, line.split("..."))), muster), muster
    gloo = executed(cell.replace('os.environ["MUSTER_REPLACE"] = "gloo"', ""), blocks, monkeypatch)
    assert REPLACED in muster and REPLACED not in gloo
    assert losses(muster) == losses(gloo)
