"""Tests workers that are forked from a zygote, which has imported torch, and the zygote that `muster warm` keeps."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import (
    TIMEOUT,
    Job,
    Launch,
    call_warm,
    free_port,
    is_gone,
    wait_until,
    warm_zygote,
    write_module_that_opens_a_device,
)

pytest.importorskip("torch")

NOBODY_UID = 65534


@pytest.fixture
def own_runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def settings(runtime: Path) -> dict[str, str]:
    return {"MUSTER_PYTHON": sys.executable, "XDG_RUNTIME_DIR": str(runtime), "PET_START_METHOD": "zygote"}


@pytest.fixture(scope="module")
def run_environment(warm: dict[str, str]) -> dict[str, str]:
    return warm


@pytest.fixture(scope="module")
def warm(muster: str, settings: dict[str, str]) -> Iterator[dict[str, str]]:
    """Settings with a warm zygote. Most tests here fork their workers from it, because the import takes long."""
    with warm_zygote(muster, settings):
        yield settings


PRINT_CONTEXT = """
import __main__, multiprocessing.process, random, threading
import numpy as np
import torch
facts = {
    'argv': sys.argv, 'orig_argv': sys.orig_argv, 'name': __name__, 'file': __file__, 'path0': sys.path[0],
    'spec': repr(__spec__), 'main': __main__.__dict__ is globals(), 'cwd': os.getcwd(), 'umask': os.umask(0o77),
    'flags': repr(sys.flags), 'executable': sys.executable, 'environ': dict(os.environ),
    'threads': [thread.name for thread in threading.enumerate()], 'torch threads': torch.get_num_threads(),
    'signals': [str(signal.getsignal(n)).partition(' at 0x')[0] for n in (1, 2, 10, 12, 13, 15, 17)],
    'mask': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    'fds': sorted(os.listdir('/proc/self/fd'))[:4], 'group': os.getpgid(0) == os.getpid(),
    'main module': sorted(name for name in vars(__main__) if name.startswith('__')),
    'origin': multiprocessing.process.ORIGINAL_DIR, 'zygote': [n for n in sys.modules if 'zygote' in n],
    'line': open('/proc/self/cmdline').read().strip('\\0').split('\\0'),
}
print(json.dumps(facts))
key = multiprocessing.current_process().authkey.hex()
print('random', random.random(), np.random.random(), torch.rand(1).item(), key)
"""


def facts(job: Job) -> dict[str, object]:
    assert job.finish() == 0, job.err
    found = json.loads(re.findall(r"^\[rank 0] (\{.*)$", job.out, re.MULTILINE)[0])
    for name in [n for n in found["environ"] if n.startswith(("MUSTER_", "MASTER_", "TORCHELASTIC_", "PET_"))]:
        del found["environ"][name]
    return found


MEET = """
import torch.distributed as dist
dist.init_process_group('muster')
dist.barrier()
print('met', os.getpid(), flush=True)
signal.pause()
"""


def test_a_dump_of_a_job_shows_its_forked_workers(launch: Launch, muster: str, script: Callable[[str], Path]) -> None:
    path, ours, theirs = script(MEET), f"x/{os.getpid()}", f"y/{os.getpid()}"
    jobs = {name: launch("--nproc-per-node=2", f"--rdzv-id={name}", path) for name in (ours, theirs)}
    for name, job in jobs.items():
        pids = {int(found.group(1)) for found in job.expect(r"met (\d+)", 2)}
        dumped = subprocess.run([muster, "dump", "--json", "--job", name], capture_output=True, text=True)
        assert dumped.returncode == 0, dumped.stderr
        assert {recording["pid"] for recording in json.loads(dumped.stdout)} == pids
    for job in jobs.values():
        job.send(signal.SIGTERM)
        job.finish()


def test_a_forked_worker_has_the_context_of_a_spawned_one(launch: Launch, script: Callable[[str], Path]) -> None:
    path = script(PRINT_CONTEXT)
    relative = os.path.relpath(path)
    forked = launch("--nproc-per-node=2", relative, "--x", "a b")
    started = launch("--start-method=spawn", "--nproc-per-node=2", relative, "--x", "a b")
    assert facts(forked) == facts(started)
    drawn = [line.split()[-4:] for line in forked.out.splitlines() if "random" in line and "{" not in line]
    assert len(drawn) == 2 and all(one != other for one, other in zip(*drawn, strict=True))


def test_a_forked_module_runs_as_in_python(launch: Launch, tmp_path: Path) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text(
        "import sys\nprint(sys.argv, __name__, __spec__.name, __package__)\nraise OSError\n"
    )
    outputs = []
    for method in ("zygote", "spawn"):
        job = launch(f"--start-method={method}", "-m", "some_package.part", "x", before=["env", "-C", str(tmp_path)])
        assert job.finish() == 1
        outputs.append((job.out, [line for line in job.err.splitlines() if line.startswith("[rank 0]")]))
    assert outputs[0] == outputs[1]
    assert "some_package.part some_package" in outputs[0][0]


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(7)", "sys.exit('a reason')", "sys.exit()", "os.kill(os.getpid(), 15)", "os._exit(3)",
        "1 / 0", "raise KeyboardInterrupt", "int('x' * 3", "raise ValueError from KeyError(1)",
        "import torch; optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)",  # from torch 2.15 on, it loads Triton
    ],
)  # fmt: skip
def test_a_forked_worker_exits_as_a_spawned_one(launch: Launch, script: Callable[[str], Path], end: str) -> None:
    text = "import atexit, ctypes, threading\natexit.register(print, 'at exit')\nsys.stdout.write('no newline')\n"
    text += "ctypes.CDLL(None).printf(b' in C')\n"
    if not end.startswith("os."):  # the os functions do not wait for threads
        text += "threading.Thread(target=lambda: print(' thread')).start()\n"
    path = script(f"{text}{end}\n")
    seen = []
    for method in ("zygote", "spawn"):
        job = launch(f"--start-method={method}", path)
        status = job.finish()
        report = [line for line in job.err.splitlines() if not line.startswith("muster: rank")]
        seen.append((status, sorted(job.out.split()), report))
    assert seen[0] == seen[1]


def test_a_forked_worker_can_start_processes(launch: Launch, script: Callable[[str], Path]) -> None:
    text = """
import multiprocessing as mp
def double(x): return x * 2
if __name__ == '__main__':
    for method in ('spawn', 'fork'):
        with mp.get_context(method).Pool(1) as pool: print(method, pool.map(double, [21]))
"""
    body = script("").read_text().replace("rank = int(os.environ['RANK'])\n", "") + text
    path = script("")
    path.write_text(body)
    job = launch(path)
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["[rank 0] fork [42]", "[rank 0] spawn [42]"]


def test_a_module_that_shadows_an_import_is_used(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "fractions.py").write_text("from builtins import int as Fraction\nmine = True\n")
    job = launch("--nproc-per-node=2", script("import fractions; print(fractions.mine)"))
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["[rank 0] True", "[rank 1] True"]
    assert "fractions.py" in job.err


def test_a_group_forms_among_forked_workers(launch: Launch, script: Callable[[str], Path]) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group('muster')
t = torch.ones(3) * (rank + 1)
dist.all_reduce(t)
print(t.tolist())
dist.destroy_process_group()
"""
    job = launch("--nproc-per-node=2", script(text))
    assert job.finish() == 0, job.err
    assert job.out.count("[3.0, 3.0, 3.0]") == 2


# A child in the worker's process group, one in a session of its own, and one whose parent is gone. All ignore SIGTERM.
FAMILY = r"""
ignores_sigterm = [sys.executable, '-c', r'''import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"child %d\n" % os.getpid())
while True: signal.pause()''']
subprocess.Popen(ignores_sigterm)
subprocess.Popen(ignores_sigterm, start_new_session=True)
if os.fork() == 0:
    subprocess.Popen(ignores_sigterm, start_new_session=True)
    os._exit(0)
os.write(1, f'ready {os.getpid()} {os.getppid()}\n'.encode())  # whole, though others write there too
while True: signal.pause()
"""


@pytest.mark.parametrize("victim", ["worker", "zygote", "agent", "launcher", "both", "none"])
@pytest.mark.parametrize("kind", ["warm", "cold"])
def test_no_process_is_left_after_any_kill(
    launch: Launch, script: Callable[[str], Path], victim: str, kind: str
) -> None:
    if kind == "cold" and victim not in ("zygote", "agent", "both"):
        pytest.skip("the same as warm, and an import each")
    words = ["--no-warm"] if kind == "cold" else []
    job = launch(*words, "--shutdown-timeout=0.2", "--nproc-per-node=2", script(FAMILY))
    ready = job.expect(r"ready (\d+) (\d+)", 2)
    pids = [int(m[1]) for m in job.expect(r"child (\d+)", 6)] + [int(m[1]) for m in ready]
    zygote = int(ready[0][2])
    agent, launcher = job.agent(), job.process.pid
    victims = {"worker": [int(ready[0][1])], "zygote": [zygote], "agent": [agent], "launcher": [launcher]}
    victims["both"] = [agent, launcher]
    if victim == "both":
        os.kill(launcher, signal.SIGSTOP)  # so that neither has time to end other processes
    for pid in victims.get(victim, []):
        os.kill(pid, signal.SIGKILL)
    if victim == "none":
        job.send(signal.SIGTERM)
    assert job.finish() in (137, -9, 143)
    wait_until(lambda: all(map(is_gone, [*pids, zygote])))
    assert job.left_behind() == []


STEPS = """
import torch.distributed as dist
def step(name):
    if name == sys.argv[1] and rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
        os.kill({'worker': os.getpid(), 'zygote': os.getppid()}[sys.argv[2]], signal.SIGKILL)
        signal.pause()
step('import')
dist.init_process_group('muster')
step('barrier')
dist.barrier()
dist.destroy_process_group()
step('end')
print('generation', os.environ['MUSTER_GENERATION'])
"""


@pytest.mark.parametrize("name", ["import", "barrier", "end"])
@pytest.mark.parametrize("victim", ["worker", "zygote"])
def test_a_kill_at_any_step_restarts_the_job(
    launch: Launch, script: Callable[[str], Path], name: str, victim: str
) -> None:
    job = launch("--nproc-per-node=2", "--max-restarts=1", script(STEPS), name, victim)
    assert job.finish() == 0, job.err
    assert job.out.count("generation 1") == 2
    assert job.left_behind() == []


def test_a_killed_worker_is_named(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--nproc-per-node=2", script("print('ready', os.getpid(), flush=True)\nsignal.pause()"))
    pid = int(job.expect(r"\[rank 1] ready (\d+)")[0][1])
    job.expect("ready", 2)
    os.kill(pid, signal.SIGKILL)
    assert job.finish() == 137
    assert re.search(rf"rank 1 \(host \S+, pid {pid}\) was ended by signal 9 \(SIGKILL\)", job.err)


def test_a_signal_reaches_forked_workers(launch: Launch, script: Callable[[str], Path]) -> None:
    handle = "signal.signal(signal.SIGUSR1, lambda *_: print('got it', flush=True))\n"
    job = launch("--nproc-per-node=2", script(handle + "print('ready', flush=True)\nwhile True: signal.pause()"))
    job.expect("ready", 2)
    job.send(signal.SIGUSR1)
    job.expect("got it", 2)
    job.send(signal.SIGTERM)
    assert job.finish() == 143


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_lost_zygote_is_replaced(
    muster: str, warm: dict[str, str], launch: Launch, script: Callable[[str], Path]
) -> None:
    keeper = int(re.search(r"pid (\d+)", call_warm(muster, warm, "status").stdout)[1])  # type: ignore[index]
    job = launch("--nproc-per-node=2", "--max-restarts=1", script("print('child of', os.getppid())\nsignal.pause()"))
    lost = int(job.expect(r"\] child of (\d+)", 2)[0][1])
    assert parent_of(lost) == keeper
    os.kill(lost, signal.SIGKILL)
    replacement = int(job.expect(r"\] child of (\d+)", 4)[3][1])
    assert replacement != lost and parent_of(replacement) == keeper
    job.send(signal.SIGTERM)
    assert job.finish() == 143
    assert job.left_behind() == []


def test_a_lost_zygote_of_one_node_is_replaced(launch: Launch, script: Callable[[str], Path]) -> None:
    words = ["--no-warm", "--nproc-per-node=2", "--max-restarts=1"]
    words += ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    path, env = script("print('child of', os.getppid())\nsignal.pause()"), {"MUSTER_SECRET": secrets.token_hex(32)}
    nodes = [launch(*words, f"--node-rank={rank}", path, env=env) for rank in range(2)]
    parents = [{int(found[1]) for found in node.expect(r"\] child of (\d+)", 2)} for node in nodes]
    (lost,) = parents[1]
    os.kill(lost, signal.SIGKILL)
    (replacement,) = {int(found[1]) for found in nodes[1].expect(r"\] child of (\d+)", 4)[2:]}
    assert replacement not in (lost, nodes[1].agent())
    assert {int(found[1]) for found in nodes[0].expect(r"\] child of (\d+)", 4)} == parents[0]
    nodes[0].send(signal.SIGTERM)
    assert [node.finish() for node in nodes] == [143, 143]
    for node in nodes:
        assert node.left_behind() == []


def test_an_unsafe_preload_is_refused(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    job = launch("--preload=starts_a_thread", script("pass"), env={"PYTHONPATH": str(tmp_path)})
    assert job.finish() != 0
    assert "--preload starts_a_thread starts a thread" in job.err
    job = launch("--preload=no_such_module", script("pass"))
    assert job.finish() != 0
    assert "--preload no_such_module cannot be imported" in job.err


def test_a_preload_that_opens_a_device_is_refused(
    launch: Launch, script: Callable[[str], Path], tmp_path: Path
) -> None:
    device = write_module_that_opens_a_device(tmp_path)
    job = launch("--preload=opens_a_device", script("print('ran')"), env={"PYTHONPATH": str(tmp_path)})
    assert job.finish() != 0
    assert f"--preload opens_a_device opens {device}, whose context no forked worker can use" in job.err
    assert "ran" not in job.out


def run_as_nobody(act: Callable[[], bool]) -> int:
    """The pid of a child process of another user, which exits with status 0 if `act` returns true."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            signal.alarm(int(TIMEOUT))
            os.setgroups([])
            os.setgid(NOBODY_UID)
            os.setuid(NOBODY_UID)
            status = 0 if act() else 1
        finally:
            os._exit(status)
    return pid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_warm_zygote_refuses_other_users(muster: str, warm: dict[str, str], runtime: Path) -> None:
    before = call_warm(muster, warm, "status")
    (path,) = (runtime / "muster").glob("warm-*")

    def is_refused() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
            with contextlib.suppress(BrokenPipeError):
                client.send(b"stop")
            try:
                return client.recv(4096) == b""
            except ConnectionResetError:  # the server closed the socket with unread data
                return True

    modes = {place: place.stat().st_mode for place in (runtime, runtime / "muster", path)}
    for place in modes:
        place.chmod(0o777)
    try:
        assert os.waitpid(run_as_nobody(is_refused), 0)[1] == 0
    finally:
        for place, mode in modes.items():
            place.chmod(mode)
    after = call_warm(muster, warm, "status")
    assert (before.returncode, after.returncode) == (0, 0)
    assert after.stdout.split(":")[0] == before.stdout.split(":")[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_warm_socket_of_another_user_is_ignored(muster: str, settings: dict[str, str], own_runtime: Path) -> None:
    env = {**settings, "XDG_RUNTIME_DIR": str(own_runtime)}
    (own_runtime / "muster").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(own_runtime / "muster" / "warm-0"))
        read, write = os.pipe()

        def is_asked_nothing() -> bool:
            server.listen()  # from now on the kernel reports this user as the server of the socket
            os.write(write, b"x")
            client, _ = server.accept()
            return client.recv(4096) == b""

        pid = run_as_nobody(is_asked_nothing)
        os.close(write)
        assert os.read(read, 1) == b"x"
        os.close(read)
        done = call_warm(muster, env, "status")
        assert os.waitpid(pid, 0)[1] == 0
    assert done.returncode == 1 and "no zygote is kept warm" in done.stdout


def test_without_torch_workers_are_spawned(launch: Launch, script: Callable[[str], Path]) -> None:
    path = script("print('fine')")
    bare = path.parent / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    job = launch("--nproc-per-node=2", path, env={"MUSTER_PYTHON": str(bare), "PYTHONPATH": ""})
    assert job.finish() == 0, job.err
    assert job.out.count("fine") == 2
    assert "cannot import torch" in job.err


def test_the_warm_zygote_is_used_and_reported(
    muster: str, warm: dict[str, str], launch: Launch, script: Callable[[str], Path]
) -> None:
    status = call_warm(muster, warm, "status")
    pid = int(re.search(r"pid (\d+)", status.stdout)[1])  # type: ignore[index]
    assert "already" in call_warm(muster, warm).stdout
    job = launch(script("print(os.getppid(), flush=True)\nsignal.pause()"))
    zygote = int(job.expect(r"\[rank 0] (\d+)")[0][1])
    assert parent_of(zygote) == pid
    assert re.search(r"; 1 run now, [1-9]\d* in total,", call_warm(muster, warm, "status").stdout)
    job.send(signal.SIGTERM)
    assert job.finish() == 143


def test_a_run_inherits_from_its_launcher(launch: Launch, script: Callable[[str], Path]) -> None:
    path = script("import resource\nprint(os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.umask(0))")
    shell = f'ulimit -n 77; umask 027; cd {path.parent}; exec "$0" "$@"'
    job = launch(path, before=["sh", "-c", shell])
    assert job.finish() == 0, job.err
    assert job.out == f"[rank 0] {path.parent} 77 {0o027}\n"


def test_a_changed_package_restarts_the_warm_zygote(
    muster: str, settings: dict[str, str], own_runtime: Path, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    (tmp_path / "version.py").write_text("number = 1\n")
    env = {**settings, "XDG_RUNTIME_DIR": str(own_runtime), "PYTHONPATH": str(tmp_path)}
    assert call_warm(muster, env, "--preload=version", "--idle=1000").returncode == 0
    try:
        (tmp_path / "version.py").write_text("number = 22\n")
        for _ in range(2):  # the first job finds the module changed, the second one a new zygote
            job = Job([muster, "run", "--preload=version", script("import version; print(version.number)")], env)
            assert job.finish() == 0, job.err
            assert job.out == "[rank 0] 22\n"
        assert "version" in call_warm(muster, env, "status").stdout
    finally:
        stopped = call_warm(muster, env, "stop").stdout
    pid = re.match(r"stopped pid (\d+): .*; 0 runs now, ", stopped)
    assert pid and is_gone(int(pid[1])), stopped
    assert call_warm(muster, env, "status").returncode == 1


def test_a_late_stop_keeps_the_successors_socket(muster: str, settings: dict[str, str], own_runtime: Path) -> None:
    env = {**settings, "XDG_RUNTIME_DIR": str(own_runtime)}
    assert call_warm(muster, env).returncode == 0
    pid = int(re.search(r"pid (\d+)", call_warm(muster, env, "status").stdout)[1])  # type: ignore[index]
    (path,) = (own_runtime / "muster").glob("warm-*")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as successor:
        path.unlink()  # as `muster warm` does if no zygote answers
        successor.bind(str(path))
        successor.listen()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: is_gone(pid))
        assert path.exists()
    assert call_warm(muster, env).returncode == 0
    assert "stopped" in call_warm(muster, env, "stop").stdout
    assert not path.exists()


def test_idle_and_broken_warm_zygotes_end(muster: str, settings: dict[str, str], own_runtime: Path) -> None:
    env = {**settings, "XDG_RUNTIME_DIR": str(own_runtime)}
    done = call_warm(muster, env, "--preload=no_such_module")
    assert done.returncode == 1 and "--preload no_such_module cannot be imported" in done.stderr
    assert call_warm(muster, env, "--idle=0.1").returncode == 0
    wait_until(lambda: call_warm(muster, env, "status").returncode == 1)
    assert not (own_runtime / "muster").exists()
    (own_runtime / "muster").mkdir(mode=0o755)
    done = call_warm(muster, env)
    assert done.returncode == 1 and "not a private directory of this user" in done.stderr
