"""Tests that `muster bench processes` starts and times what it says. Never checks the measured values."""

import json
from pathlib import Path

from muster.bench.__main__ import main


def test_every_start_method_is_timed(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    assert main(["processes", "--quick", "--processes=2", "--ranks=2", "--json", str(rows_file)]) == 0
    first, again, test = json.loads(rows_file.read_text())
    for row in (first, again, test):
        assert row["ranks"] == 2 and min(row["muster"], row["peer"]) > 0, row
    assert first["also"]["forkserver"] > 0 and again["also"]["forkserver"] > 0


def test_wrong_numbers_are_refused(capsys: object) -> None:
    assert main(["processes", "--ranks=0"]) != 0
