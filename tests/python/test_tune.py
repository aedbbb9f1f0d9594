"""Tests `muster tune` and `muster explain`: measured costs, and the algorithm that is chosen from them."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from launching import TIMEOUT

CHOSEN = r"^ *-> (\w+)"
Result = subprocess.CompletedProcess[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MUSTER_ALGO", raising=False)
    return tmp_path / "muster" / f"machine-{os.uname().nodename}.json"


def call(muster: str, *words: str) -> Result:
    return subprocess.run([muster, *words], capture_output=True, text=True, timeout=TIMEOUT)


def test_tune_keeps_its_measurements(muster: str, cache: Path) -> None:
    assert call(muster, "tune", "--show").stdout.startswith("defaults")
    assert not cache.exists(), "showing measures nothing"
    measured = call(muster, "tune")
    assert measured.returncode == 0, measured.stderr
    assert f"saved to {cache}" in measured.stdout
    record = json.loads(cache.read_text())
    for medium in ("tcp", "unix", "shm"):
        assert 0 < record[medium]["latency"] < 1 and record[medium]["bytes_per_second"] > 1e6
    assert all(0 < record["memory"][cost] < 1 for cost in ("wait", "turn"))
    assert all(record["memory"][speed] > 1e6 for speed in ("cached_bytes_per_second", "bytes_per_second"))
    shown = call(muster, "tune", "--show").stdout
    assert shown.splitlines()[0] == str(cache)
    assert shown.splitlines()[1:] == measured.stdout.splitlines()[:-1]
    assert [path.name for path in cache.parent.iterdir()] == [cache.name], "no half-written file stays"


def test_a_damaged_record_falls_back_to_defaults(muster: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text('{"tcp": 3}')
    shown = call(muster, "tune", "--show")
    assert shown.returncode == 0
    assert str(cache) in shown.stderr and "run it again" in shown.stderr
    assert shown.stdout.startswith("defaults")


def test_explain_prints_candidates_choice_and_steps(muster: str, cache: Path) -> None:
    output = call(muster, "explain", "all_reduce", "--bytes", "16Mi", "--ranks", "4", "--links", "tcp", "--all").stdout
    assert output.startswith("all_reduce of 16 MiB on 4 ranks, 1 node, links: tcp; costs of this machine: defaults")
    times = {name: float(time) for name, time in re.findall(r"^\W+(\w+) +([\d.]+) ms$", output, re.MULTILINE)}
    assert times.keys() == {"recursive_doubling", "halving_doubling", "double_tree", "ring"}
    (chosen,) = re.findall(CHOSEN, output, re.MULTILINE)
    assert times[chosen] == min(times.values())
    steps = re.findall(r"^\d+: (\w+) ", output, re.MULTILINE)
    assert {"send", "receive"} <= set(steps)


def test_explain_uses_the_hosts_memory_costs(muster: str, cache: Path) -> None:
    words = ("explain", "all_reduce", "--bytes", "1Mi", "--ranks", "2")
    assert "(`muster tune` measures them)" in call(muster, *words).stdout
    medium = {"latency": 1e-5, "overhead": 1e-6, "bytes_per_second": 1e9}
    record = {**dict.fromkeys(("tcp", "unix", "shm"), medium), "reduce_bytes_per_second": 1e12}
    record |= {"cores": 2, "measured": True}
    cache.parent.mkdir()
    cache.write_text(json.dumps(record))
    older = call(muster, *words)
    assert older.returncode == 0 and older.stderr == "", "a record of before memory was measured is one still"
    assert (
        "(`muster tune` measures them)" in older.stdout
        and "GB/s from memory (defaults)" in call(muster, "tune", "--show").stdout
    )
    times = []
    for wait in (1e-6, 1e-3):
        memory = {"wait": wait, "turn": 1, "cached_bytes_per_second": 1e12, "bytes_per_second": 1e12}
        cache.write_text(json.dumps({**record, "memory": memory}))
        output = call(muster, *words).stdout
        assert "(`muster tune` measures them)" not in output
        times += re.findall(r"^  two shots: ([\d.]+ \w+)$", output, re.MULTILINE)
    assert times == ["11.1 us", "9.00 ms"], "nine waits, and what 1.5 MiB of copies and half of that combined take"


def test_measurements_change_the_choice(muster: str, cache: Path) -> None:
    words = ("explain", "all_reduce", "--bytes", "64Ki", "--ranks", "16", "--links", "tcp")
    chosen = set()
    for latency, speed in ((1e-1, 1e12), (1e-9, 1e5)):
        medium = {"latency": latency, "overhead": 1e-9, "bytes_per_second": speed}
        record = dict.fromkeys(("tcp", "unix", "shm"), medium)
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(json.dumps({**record, "reduce_bytes_per_second": 1e12, "cores": 16, "measured": True}))
        output = call(muster, *words).stdout
        assert "(`muster tune` measures them)" not in output
        chosen.update(re.findall(CHOSEN, output, re.MULTILINE))
    assert "recursive_doubling" in chosen and len(chosen) == 2, chosen


def test_explain_obeys_muster_algo(muster: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("explain", "broadcast", "--bytes", "1Ki", "--ranks", "8", "--nodes", "8")
    monkeypatch.setenv("MUSTER_ALGO", "broadcast=chain")
    assert "-> chain" in call(muster, *words).stdout
    assert "MUSTER_ALGO asks for chain, an algorithm of links" in call(muster, *words[:-2]).stdout
    monkeypatch.setenv("MUSTER_ALGO", "broadcast=fast")
    refused = call(muster, *words[:-2])
    assert refused.returncode == 2
    assert "broadcast has no algorithm 'fast'" in refused.stderr and "binomial" in refused.stderr
    monkeypatch.delenv("MUSTER_ALGO")
    assert call(muster, "explain", "reduce_all").returncode == 2
    assert call(muster, "explain", "all_reduce", "--ranks", "0").returncode == 2
