"""A cluster of Slurm with one node, this host, for tests. Needs root, and Slurm and MUNGE (Debian: slurm-wlm)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

START_TIMEOUT = 60  # seconds
DAEMONS = "munged", "slurmctld", "slurmd"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""


class CannotStartError(Exception):
    """The message says why."""


def check_programs() -> None:
    missing = [name for name in DAEMONS if shutil.which(name, path=_path()) is None]
    if missing:
        raise CannotStartError(f"needs {', '.join(missing)}: install slurm-wlm")
    if os.geteuid() != 0:
        raise CannotStartError("needs root")


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which srun and sbatch reach the cluster. May raise CannotStartError."""
    check_programs()
    host = socket.gethostname().split(".")[0]
    ports = []
    with contextlib.ExitStack() as stack:  # two free ports
        for _ in range(2):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    for name in ("state", "spool"):
        (folder / name).mkdir()
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=host, folder=folder, ports=ports, cpus=os.cpu_count()))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge = [
        *(
            "munged",
            "--foreground",
            "--force",
            "--num-threads=2",
            f"--key-file={key}",
            f"--pid-file={folder}/munged.pid",
        ),
        *(f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
    ]
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(file)}
    commands = [munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]]
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"{number}.log").open("w"))
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            if number == 0:
                _wait_until(lambda: (folder / "munge.socket").exists(), folder)
        _wait_until(lambda: "idle" in _run(["sinfo", "--noheader", "-o", "%T"], environment), folder)
        yield environment


def _run(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT).stdout


def _wait_until(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))
            raise CannotStartError(f"Slurm has not started in {START_TIMEOUT} s:\n{logs}")
        time.sleep(0.05)  # tidy: allow(sleep) of other programs
