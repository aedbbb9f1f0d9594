"""The command that measures: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muster.bench", *arguments], capture_output=True, text=True, timeout=300
    )


def test_a_quick_run_prints_a_table_and_writes_rows_and_a_picture(tmp_path: Path) -> None:
    rows_file, picture = tmp_path / "made/too/rows.json", tmp_path / "made/bench.png"
    done = bench(
        "all_reduce", "--quick", "--ranks", "2", "--sizes", "8,64Ki", "--json", str(rows_file), "--plot", str(picture)
    )
    assert done.returncode == 0, done.stderr
    header, first, second, *_ = done.stdout.splitlines()
    assert header.split() == ["ranks", "bytes", "muster", "us", "gloo", "us", "ratio", "floor", "us", "busbw", "GB/s"]
    assert first.split()[:3] == ["2", "8", "B"]
    assert second.split()[:3] == ["2", "64", "KiB"]
    assert len({len(line) for line in (header, first, second)}) == 1, "columns are aligned"
    rows = json.loads(rows_file.read_text())
    assert [(row["bench"], row["ranks"], row["bytes"]) for row in rows] == [
        ("all_reduce", 2, 8),
        ("all_reduce", 2, 65536),
    ]
    for row in rows:
        assert {"case", "metric", "unit", "muster", "peer", "peer_name", "ratio", "floor"} <= row.keys()
        assert row["ratio"] == pytest.approx(row["peer"] / row["muster"])
        assert min(row["muster"], row["peer"], row["floor"]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "there are: all_reduce"),
        (["sort"], "there is no benchmark 'sort'; there are: all_reduce"),
        (["all_reduce", "--vs", "mpi"], "gloo"),
        (["all_reduce", "--ranks", "1"], "--ranks takes numbers from 2 on"),
        (["all_reduce", "--sizes", "8Q"], "'8Q' is not a size"),
        (["all_reduce", "--sizes", "10"], "multiples of 4 bytes"),
        (["all_reduce", "--ranks", "two"], "--ranks takes numbers"),
    ],
)
def test_wrong_options_say_what_they_take(arguments: list[str], says: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_fails_is_shown() -> None:
    from muster.bench.ranks import RanksFailedError, run_ranks

    with pytest.raises(RanksFailedError, match=r"rank [01] ended with status 1") as caught:
        list(run_ranks("no such benchmark", 2, {"timeout": 60}, 60))
    assert "KeyError" in str(caught.value)


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize(
    ("name", "reason"), [("file/rows", "Not a directory|File exists"), ("folder", "it is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, option: str, name: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    done = bench("all_reduce", option, str(tmp_path / name))
    assert done.returncode == 2
    assert re.search(f"{name} cannot be written: ({reason})", done.stderr), done.stderr
    assert done.stdout == ""


def test_ranks_that_hang_are_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.bench import ranks

    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        report = arguments[-2]
        hang = [sys.executable, "-c", "import signal; signal.pause()"]
        started.append(subprocess.Popen(hang, pass_fds=[report]))
        return started[-1]

    monkeypatch.setattr(ranks, "_start", start)
    with pytest.raises(ranks.RanksFailedError, match="rank 0 has not reported"):
        list(ranks.run_ranks("any", 2, {}, 0.5))
    assert [worker.returncode for worker in started] == [-signal.SIGKILL] * 2
