"""Tests `muster bench`: what it prints, what it writes, and what it rejects."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from muster.bench.__main__ import main, parse


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muster.bench", *arguments], capture_output=True, text=True, timeout=300
    )


def asked(arguments: list[str]) -> int | str | None:
    """The exit status of a command that measures nothing."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def test_quick_run_writes_table_json_and_plot(tmp_path: Path) -> None:
    rows_file, picture, table = tmp_path / "made/too/rows.json", tmp_path / "made/bench.png", tmp_path / "rows.md"
    done = bench(
        *("collectives", "--quick", "--ops", "all_reduce,all_to_all_single,barrier", "--ranks", "2"),
        *("--sizes", "8,64Ki", "--buffers", "warm,cold"),
        *("--json", str(rows_file), "--plot", str(picture), "--markdown", str(table)),
    )
    assert done.returncode == 0, done.stderr
    header, *lines, drawn = done.stdout.splitlines()
    assert header.split()[:6] == ["case", "ranks", "bytes", "buffers", "metric", "muster"]
    rows = json.loads(rows_file.read_text())
    assert len(lines) == len(rows)
    assert len(table.read_text().splitlines()) == 2 + len(rows)
    measured = [(row["case"], row["bytes"], row["buffers"]) for row in rows if row["metric"] == "time"]
    sizes = [(8, "warm"), (65536, "warm"), (65536, "cold")]
    expected = [(case, *size) for case in ("all_reduce", "all_to_all_single") for size in sizes]
    assert measured == [*expected, ("barrier", 0, "warm")]
    for row in rows:
        if row["metric"] == "time":
            assert row["ratio"] == pytest.approx(row["peer"] / row["muster"] if row["muster"] else 0)
            assert row["muster"] > 0 or row["note"].startswith("muster: ")
            assert row["peer"] > 0
            assert row["floor"] > 0 or row["case"] == "barrier"
    for row in (row for row in rows if row["case"] == "all_reduce" and row["metric"] == "time"):
        # With 2 ranks, busbw is bytes / time, because 2 (n - 1) / n is 1.
        assert row["busbw"] == pytest.approx(row["bytes"] / row["muster"] / 1e3)
    ratios = [row["ratio"] for row in rows if row["case"] == "all_reduce"]
    assert ratios.pop() == pytest.approx(math.prod(ratios) ** (1 / 3)), "the geometric mean is last"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert drawn == f"drawn: {picture}"


def test_background_load_adds_p95_rows(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    words = [
        "all_reduce",
        "--quick",
        "--ranks",
        "2",
        "--sizes",
        "64Ki",
        "--variants",
        "shared",
        "--load",
        "1",
        "--bind",
    ]
    done = bench(*words, "--json", str(rows_file))
    assert done.returncode == 0, done.stderr
    median, late = json.loads(rows_file.read_text())[:2]
    assert (median["case"], late["case"]) == ("all_reduce", "all_reduce, p95")
    assert 0 < median["muster"] <= late["muster"] and 0 < median["peer"] <= late["peer"]
    assert late["ratio"] == pytest.approx(late["peer"] / late["muster"])
    assert asked(["collectives", "--quick", "--load", "-1"]) == 2


def test_an_operation_name_is_a_benchmark() -> None:
    assert parse(["all_reduce", "--ranks", "2"]).ops == "all_reduce"
    assert parse(["all_reduce", "--ranks", "2"]).bench == "collectives"


def test_expected_results_match_the_definitions() -> None:
    """Checks the expected results in the table of operations, with a stand-in for c10d that has any number of ranks."""
    from muster.bench.operations import OPERATIONS, Tensors, filled

    def expected(name: str, tensors: Tensors) -> torch.Tensor:
        result = OPERATIONS[name].expected(tensors)
        assert result is not None
        return result

    for ranks, rank in ((3, 0), (3, 2), (4, 1)):
        inputs = [filled(other, 5 * ranks, torch.float32) for other in range(ranks)]
        total = torch.stack(inputs).sum(0)
        own = Tensors(rank, ranks, inputs[rank], torch.empty(5))
        gathered = Tensors(rank, ranks, inputs[rank][:5], torch.empty(5 * ranks))
        assert expected("reduce_scatter", own).equal(total[5 * rank :][:5])
        assert expected("scatter", own).equal(inputs[0][5 * rank :][:5])
        assert expected("all_gather", gathered).equal(torch.cat([one[:5] for one in inputs]))
        exchanged = torch.cat([one[5 * rank :][:5] for one in inputs])
        whole = Tensors(rank, ranks, inputs[rank], torch.empty(5 * ranks))
        assert expected("all_to_all", whole).equal(exchanged)
        assert expected("all_reduce", whole).equal(total)
        assert (OPERATIONS["reduce"].expected(whole) is None) == (rank != 0)


def test_an_unsupported_operation_is_noted_in_its_row() -> None:
    from muster.bench.collectives import _row

    result = {"op": "all_to_all", "bytes": 8, "buffers": "warm", "seconds": {"muster": 1e-6}, "notes": {"gloo": "no"}}
    row = _row(2, "gloo", result)
    assert (row.muster, row.peer, row.ratio, row.note) == (1.0, 0.0, 0, "gloo: no")


def test_a_wrong_result_stops_the_benchmark() -> None:
    from muster.bench.measuring import failure
    from muster.bench.operations import OPERATIONS, Tensors

    data = torch.empty(4)
    with pytest.raises(RuntimeError, match="a wrong result: 4 elements at rank 1"):
        failure(OPERATIONS["all_reduce"], Tensors(1, 2, data, data), lambda: None)


def test_only_inexact_sums_may_be_rounded() -> None:
    from muster.bench.measuring import failure
    from muster.bench.operations import OPERATIONS, Tensors, filled

    ranks, dtype = 16, torch.bfloat16

    def reduce(wrong: int) -> None:
        data = torch.empty(20, dtype=dtype)
        tensors = Tensors(0, ranks, data, data)
        rounded = torch.full((20,), wrong, dtype=dtype)
        for rank in reversed(range(ranks)):
            rounded += filled(rank, 20, dtype)
        assert failure(OPERATIONS["all_reduce"], tensors, lambda: data.copy_(rounded)) == ""

    reduce(0)
    with pytest.raises(RuntimeError, match="a wrong result"):
        reduce(100)
    ranks = 8
    with pytest.raises(RuntimeError, match="a wrong result"):
        reduce(1)


def test_cold_memory_changes_tensors_between_calls() -> None:
    from muster.bench.memory import in_turn, make_tensors
    from muster.bench.operations import OPERATIONS, Tensors

    like = Tensors(0, 2, torch.empty(3), torch.empty(6))
    pool = make_tensors(OPERATIONS["all_gather"], like, 4, lambda size: torch.full((size,), 255, dtype=torch.uint8))
    pointers = {tensor.data_ptr() for one in pool for tensor in (one.input, one.output)}
    assert len(pointers) == 8
    assert all(one.input.numel() == 3 and one.output.equal(torch.zeros(6)) for one in pool)
    seen: list[int] = []
    turns = in_turn([partial(seen.append, place) for place in range(3)])
    for _ in range(4):
        turns()
    assert seen == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there are: collectives"),
        (["sort"], "there is no benchmark 'sort'; there are: collectives"),
        (["collectives", "--vs", "mpi"], "gloo"),
        (["collectives", "--ranks", "1"], "--ranks takes numbers from 2 on"),
        (["collectives", "--sizes", "8Q"], "'8Q' is not a size"),
        (["collectives", "--ops", "sort"], "--ops takes all_reduce, reduce, broadcast"),
        (["collectives", "--buffers", "hot"], "--buffers takes warm, cold; not 'hot'"),
        (["collectives", "--ranks", "two"], "--ranks takes numbers"),
        (["collectives", "--plot", "bench.jpeg"], "ends in .png, .pdf, .svg, not to bench.jpeg"),
        (["collectives", "--timeout", "0"], "--timeout takes a number of seconds above 0, not 0"),
        (["launch", "--repeats", "0"], "--repeats takes a number from 1 on; not 0"),
        (["network", "--local", "x"], "--local takes numbers from 1 to 1024, as in 1,2; not 'x'"),
        (["network", "--streams", "1,17"], "--streams takes numbers from 1 to 16, as in 1,2; not '1,17'"),
        (["network", "--connection-rate", "fast"], "--connection-rate takes a rate as tc writes it, such as 1gbit"),
        (["ddp", "--network", "--rate", "1 gbit"], "--rate takes a rate as tc writes it, such as 1gbit or 100mbit;"),
    ],
)
def test_wrong_options_name_valid_ones(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_failed_rank_is_reported() -> None:
    from muster.bench.ranks import RankSetup, run_ranks
    from muster.bench.report import BenchFailedError

    with pytest.raises(BenchFailedError, match=r"rank [01] ended with status 1") as caught:
        list(run_ranks("no such benchmark", [RankSetup()] * 2, {"timeout": 60}, 60))
    assert "ModuleNotFoundError" in str(caught.value)


def test_rank_placement_overrides_user_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.bench.ranks import RankSetup, run_ranks
    from muster.bench.report import BenchFailedError

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    script = f"echo $GLOO_SOCKET_IFNAME > {tmp_path}/interface; exit 3"
    setup = RankSetup(["/bin/sh", "-c", script], {"GLOO_SOCKET_IFNAME": "veth0"})
    with pytest.raises(BenchFailedError, match="status 3"):
        list(run_ranks("any", [setup], {}, 60))
    assert (tmp_path / "interface").read_text() == "veth0\n"


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize(
    ("name", "reason"), [("file/rows", "Not a directory|File exists"), ("folder", "it is a directory")]
)
def test_unwritable_files_are_refused_before_measuring(
    tmp_path: Path, option: str, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert asked(["collectives", option, str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert re.search(f"{name} cannot be written: ({reason})", captured.err), captured.err
    assert captured.out == ""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_bench_skips_unavailable_benchmarks(root: Path, tmp_path: Path) -> None:
    asked, program = tmp_path / "asked", tmp_path / ".venv/bin/muster"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\ntest "$2" != mpi && test "$2 $3" != "ddp --network"\n')
    program.chmod(0o755)
    command = ["make", "-C", str(tmp_path), "-f", str(root / "Makefile"), "-o", "build", "bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "make bench: not measured: mpi ddp-network\n" in done.stderr
    measured = [line.split() for line in asked.read_text().splitlines()]
    names = ["collectives", "mpi", "network", "ddp", "ddp", "rpc", "store", "startup-load", "graph"]
    assert [words[1] for words in measured] == names
    assert [words[words.index("--json") + 1] for words in measured[4:]] == [
        f"out/{name}.json" for name in ("ddp-network", "rpc", "store", "startup-load", "graph")
    ]


def test_hanging_ranks_are_killed_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.bench import ranks
    from muster.bench.report import BenchFailedError

    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        report, log = arguments[-2:]
        code = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)\nwhile True: signal.pause()"
        started.append(subprocess.Popen([sys.executable, "-c", code], pass_fds=[report], stderr=log))
        return started[-1]

    monkeypatch.setattr(ranks, "_start", start)
    with pytest.raises(BenchFailedError, match="rank 0 has not reported") as failure:
        list(ranks.run_ranks("any", [ranks.RankSetup()] * 2, {}, 3))
    assert str(failure.value).count('File "<string>", line 2 in <module>') == 2, "the stack of each rank"
    assert [worker.returncode for worker in started] == [-signal.SIGKILL] * 2
