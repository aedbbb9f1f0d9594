"""DeepSpeed over muster."""

import json
from pathlib import Path

import pytest
from muster.bench.__main__ import main
from sections import compare_with_gloo, needs

pytestmark = needs("deepspeed")


def test_deepspeed_trains_as_over_gloo() -> None:
    compare_with_gloo("DeepSpeed")


def test_its_operator_is_measured_beside_muster(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    words = ["collectives", "--vs", "deepspeed", "--ops", "all_reduce", "--ranks", "2", "--sizes", "16Ki", "--quick"]
    assert main([*words, "--json", str(rows_file)]) == 0
    (row,) = json.loads(rows_file.read_text())
    assert row["peer_name"] == "deepspeed" and min(row["muster"], row["peer"], row["floor"]) > 0 and not row["note"]
    assert not list(Path("/dev/shm").glob("deepspeed_*_muster-bench_*"))


def test_its_operator_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collectives", "--vs", "deepspeed", "--ops", "all_reduce,broadcast"]) == 2
    assert "--vs deepspeed has all_reduce of float32 only" in capsys.readouterr().err
