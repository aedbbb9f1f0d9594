"""Tests what `muster bench frameworks` runs and rejects. Never checks measured values."""

import json
from pathlib import Path

import pytest
from launching import find_muster
from muster.bench.__main__ import main
from sections import needs


@needs("accelerate")
def test_a_program_starts_and_trains_with_both_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_BIN", find_muster() or "no muster binary")
    rows_file = tmp_path / "rows.json"
    assert main(["frameworks", "--quick", "--frameworks", "accelerate", "--json", str(rows_file)]) == 0
    rows = json.loads(rows_file.read_text())
    start, step = "accelerate: command to first step", "accelerate: step"
    assert [row["case"] for row in rows] == [start, f"{start}, muster warm", step]
    assert all(row["ranks"] == 2 and min(row["muster"], row["peer"]) > 0 for row in rows), rows


@needs("ray")
def test_a_framework_may_start_its_processes(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    assert main(["frameworks", "--quick", "--frameworks", "ray", "--json", str(rows_file)]) == 0
    rows = json.loads(rows_file.read_text())
    assert [row["case"] for row in rows] == ["ray: command to first all_reduce of 4 MiB", "ray: all_reduce of 4 MiB"]
    assert all(row["peer_name"] == "gloo" and min(row["muster"], row["peer"]) > 0 for row in rows), rows


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--frameworks", "horovod"],
            "--frameworks takes accelerate, transformers, lightning, deepspeed, fsdp2, ray; not 'horovod'",
        ),
        (["--repeats", "0"], "--repeats takes a number from 1 on; not 0"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frameworks", *words]) == 2
    assert said in capsys.readouterr().err
