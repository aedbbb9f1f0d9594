"""`muster status`: what people see of the jobs that run."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import PATIENCE, Job, find_muster


def status(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [str(find_muster()), "status", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not under pytest's own folders: muster passes over a path that is too long for sockets.
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_status_shows_a_running_job_and_forgets_it_afterwards(runtime: Path) -> None:
    assert status().returncode == 1
    words = ["--standalone", "--rdzv-id=shown", "--nproc-per-node=2", "--max-restarts=1"]
    code = (
        "echo generation $MUSTER_GENERATION pid $$; "
        "[ $MUSTER_GENERATION = 1 ] || [ $RANK = 0 ] || exit 3; exec sleep 1000"
    )
    job = Job([str(find_muster()), "run", *words, "--no-python", "/bin/sh", "-c", code])
    try:
        pids = sorted(int(match[1]) for match in job.expect(r"\] generation 1 pid (\d+)\n", count=2))
        shown: dict[str, Any] = {}
        while "pids" not in shown:
            signal.sigtimedwait([], 0.05)
            (entry,) = json.loads(status("--json", "shown").stdout)
            shown = entry["nodes"][0]
        assert entry["generation"] == 1 and entry["restarts"] == 1
        assert shown["state"] == "running" and shown["workers"] == 2
        assert sorted(shown["pids"]) == pids
        text = status().stdout
        assert "job shown" in text and "ranks 0-1" in text and "operations/s" in text, text
        assert status("another").returncode == 1
        os.kill(job.agent(), signal.SIGKILL)
        job.finish()
        assert json.loads(status("--json").stdout) == [], "a dead agent's job is shown"
    finally:
        job.close()
    assert [path.name for path in (runtime / "muster").iterdir() if path.name.startswith("job-")] == []
