"""Kills random workers, zygotes, agents and launchers: no result may be wrong, no process left behind, and the killed
rank must be named.

It runs a few rounds by default, or for MUSTER_SOAK_SECONDS. MUSTER_SEED replays a run. It prints both, with the numbers
of jobs, kills, processes left behind and ranks named.
"""

import contextlib
import os
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launching import Job, Launch, free_port, is_gone

pytest.importorskip("torch")

SECONDS = float(os.environ.get("MUSTER_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("MUSTER_SEED", "1"))
# Killed in turn, on one and on two nodes. The number is odd, so that each victim is killed in both cases.
VICTIMS = ("worker", "worker", "zygote", "agent", "launcher")
WORKERS = 2  # workers of each node
STEPS = 4000

# Each step's result is known. A wrong result ends the worker with a status that no other error has. Output uses
# write(), so that lines stay whole although other processes write there too.
WORKER = """
import torch
import torch.distributed as dist
STEPS = int(sys.argv[1])
def say(*words): os.write(1, (' '.join(map(str, words)) + '\\n').encode())
subprocess.Popen(['sleep', '1000'])
dist.init_process_group('muster')
size = dist.get_world_size()
say('begins', rank, os.getpid(), os.getppid())
for step in range(STEPS):
    value = torch.full((1000,), float(rank + step))
    dist.all_reduce(value)
    if not torch.equal(value, torch.full((1000,), float(size * step + size * (size - 1) // 2))):
        say('WRONG', rank, step, value[:3].tolist())
        os._exit(77)
    if step % 1000 == 0: say('step', step)
dist.destroy_process_group()
say('ends', rank)
"""


@dataclass
class Figures:
    jobs: int = 0
    finished: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    live_workers: int = 0  # workers that were killed while their job was running
    named: int = 0  # those that an error named
    orphans: int = 0

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {victim}" for victim, count in sorted(self.kills.items())) or "none"
        return (
            f"{self.jobs} jobs ({self.finished} ended well), kills: {kills}; {self.orphans} processes left behind; "
            f"the guilty rank named in {self.named} of {self.live_workers} kills of live workers"
        )


@dataclass
class Victim:
    kind: str
    pid: int
    rank: int = -1


@pytest.fixture(scope="module")
def run_environment() -> Iterator[dict[str, str]]:
    # Not in pytest's own directories, because the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        yield {"MUSTER_PYTHON": sys.executable, "XDG_RUNTIME_DIR": folder, "PET_START_METHOD": "zygote"}


def processes(jobs: list[Job]) -> list[Victim]:
    """The live processes that can be killed. For each rank, only the worker of the last generation."""
    found: dict[int, Victim] = {}
    zygotes: set[int] = set()
    for job in jobs:
        for rank, pid, parent in re.findall(r"begins (\d+) (\d+) (\d+)\n", job.out):
            found[int(rank)] = Victim("worker", int(pid), int(rank))
            zygotes.add(int(parent))
    victims = [*found.values(), *(Victim("zygote", pid) for pid in zygotes)]
    for job in jobs:
        with contextlib.suppress(AssertionError, FileNotFoundError):
            victims += [Victim("agent", job.agent()), Victim("launcher", job.process.pid)]
    return [victim for victim in victims if not is_gone(victim.pid)]


def freeze_and_kill(victim: Victim) -> bool:
    """Kills the victim. Returns True if it was alive: it is stopped first, so it cannot end between check and kill."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim.pid, signal.SIGSTOP)
        alive = not is_gone(victim.pid)
        os.kill(victim.pid, signal.SIGKILL)
        return alive
    return False


def run_job(launch: Launch, script: Path, chance: random.Random, nodes: int, figures: Figures) -> None:
    """Runs one job and kills one random process of it, at a random moment."""
    restarts = chance.choice([0, 1])
    kind = VICTIMS[figures.jobs % len(VICTIMS)]
    moment = chance.choice(["begins", "step 0", "step 1000", "step 2000"])
    words = ["--no-warm", f"--nproc-per-node={WORKERS}", f"--max-restarts={restarts}", "--shutdown-timeout=2"]
    words.append("--timeout=20")  # a restart waits this long for a node that does not come back
    place = ["--master-addr=127.0.0.1", f"--master-port={free_port()}", f"--nnodes={nodes}"] if nodes > 1 else []
    env = {"MUSTER_SECRET": secrets.token_hex(32)}
    jobs = [
        launch(*words, *place, *([f"--node-rank={node}"] if nodes > 1 else []), script, str(STEPS), env=env)
        for node in range(nodes)
    ]
    figures.jobs += 1
    story = f"seed {SEED}, job {figures.jobs}: {nodes} nodes, {restarts} restarts, {kind} at {moment!r}"
    for job in jobs:
        job.expect("begins", WORKERS)
    chance.choice(jobs).expect(moment)
    victim = chance.choice([each for each in processes(jobs) if each.kind == kind] or processes(jobs) or [None])
    # A worker that has printed its last line may be killed too late for its end to be a failure.
    struck = victim is not None and freeze_and_kill(victim)
    output = "".join(job.out for job in jobs)
    live = struck and victim is not None and victim.kind == "worker" and f"ends {victim.rank}\n" not in output
    if struck and victim is not None:
        figures.kills[victim.kind] += 1
        story += f", killed {victim}"
    statuses = [job.finish() for job in jobs]
    errors = "".join(job.err for job in jobs)
    story += f"\nstatuses {statuses}\n" + "\n".join(job.out + job.err for job in jobs)
    left = [pid for job in jobs for pid in job.left_behind()]
    figures.orphans += len(left)
    assert not left, story
    assert all("WRONG" not in job.out for job in jobs), story
    if set(statuses) == {0}:
        figures.finished += 1
        for rank in range(nodes * WORKERS):
            assert any(f"ends {rank}\n" in job.out for job in jobs), story
    elif victim is None or not struck:
        pytest.fail(f"nothing was killed: {story}", pytrace=False)
    if live and victim is not None:
        figures.live_workers += 1
        named = re.search(rf"rank {victim.rank} \(host \S+, pid {victim.pid}\) was ended by signal 9", errors)
        figures.named += named is not None
        assert named, story
    # If a restart is left, the job must survive the loss of a worker or a zygote.
    if restarts > 0 and victim is not None and victim.kind in ("worker", "zygote"):
        assert set(statuses) == {0}, story


def test_random_kills(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import os, subprocess, sys\nrank = int(os.environ['RANK'])\n" + WORKER)
    chance = random.Random(SEED)
    figures = Figures()
    end = time.monotonic() + SECONDS
    try:
        while figures.jobs < len(VICTIMS) or time.monotonic() < end:
            run_job(launch, script, chance, 1 + figures.jobs % 2, figures)
    finally:
        print(f"\nsoak: launcher, seed {SEED}: {figures}", file=sys.stderr)
    assert figures.orphans == 0
