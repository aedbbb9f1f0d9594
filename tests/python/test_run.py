"""Tests `muster run` on one node: the workers' environment, the output, and the end of the job."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Launch, free_port, is_gone, shown_on_a_terminal, wait_until

WAIT_FOREVER = "print('ready', os.getpid(), flush=True)\nwhile True: signal.pause()\n"


def test_workers_get_torchruns_environment(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--nproc-per-node", "4", "--role", "trainer", script("print(json.dumps(dict(os.environ)))"))
    assert job.finish() == 0, job.err
    lines = dict(re.findall(r"^\[rank (\d)] (.*)$", job.out, re.MULTILINE))
    assert sorted(lines) == ["0", "1", "2", "3"]
    for rank, text in lines.items():
        env = json.loads(text)
        assert env["RANK"] == env["LOCAL_RANK"] == env["ROLE_RANK"] == rank
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == "4"
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["ROLE_NAME"]) == ("0", "1", "trainer")
        assert env["MASTER_ADDR"] == "127.0.0.1" and int(env["MASTER_PORT"]) > 0
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True" and env["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert env["TORCHELASTIC_RUN_ID"] == env["MUSTER_RUN_ID"]
        assert env["MUSTER_STORE"].startswith("unix:@") and len(bytes.fromhex(env["MUSTER_SECRET"])) == 32
        assert int(env["OMP_NUM_THREADS"]) >= 1


def test_arguments_after_the_script_are_its_own(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch(script("print(sys.argv[1:])"), "--nproc-per-node", "7", "-m", "x y")
    assert job.finish() == 0
    assert job.out == "[rank 0] ['--nproc-per-node', '7', '-m', 'x y']\n"


def test_modules_and_programs_run(launch: Launch) -> None:
    job = launch("-m", "platform")
    assert job.finish() == 0 and "Linux" in job.out
    job = launch("--no-python", "--nproc_per_node=2", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert job.finish() == 0
    assert sorted(job.out.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


@pytest.mark.parametrize("status", [0, 1, 3, 255])
def test_the_exit_status_is_the_failing_workers(launch: Launch, status: int) -> None:
    job = launch("--no-python", "--nproc-per-node=2", "sh", "-c", f"test $RANK = 0 || exit {status}")
    assert job.finish() == status
    assert ("exited with status" in job.err) == (status != 0)


def test_a_worker_that_raises_ends_the_job_and_is_shown(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--nproc-per-node=4", script(f"if rank == 2: raise ValueError('boom 7')\n{WAIT_FOREVER}"))
    assert job.finish() == 1
    report = job.err[job.err.index("muster: rank") :]
    assert re.match(r"muster: rank 2 \(host \S+, pid \d+\) exited with status 1", report)
    assert "    Traceback (most recent call last):" in report and "    ValueError: boom 7" in report
    assert "0, 1, 3 running" in report
    assert job.left_behind() == []


def test_last_output_of_other_ranks_is_shown(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    text = f"""
written, resumed = {str(tmp_path / "written")!r}, {str(tmp_path / "resumed")!r}
print('ready', flush=True)
while not os.path.exists(resumed): os.sched_yield()
if rank == 0:
    sys.stderr.write('step\\n' * 9000 + 'loss is nan\\n')
    sys.stderr.flush()
    open(written, 'w')
    signal.pause()
while not os.path.exists(written): os.sched_yield()
os._exit(3)
"""
    job = launch("--nproc-per-node=2", script(text))
    job.expect("ready", 2)
    agent = job.agent()
    workers = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(agent, signal.SIGSTOP)
    (tmp_path / "resumed").touch()
    wait_until(lambda: any(map(is_gone, map(int, workers))))
    os.kill(agent, signal.SIGCONT)
    assert job.finish() == 3
    assert re.search(r"last output of other ranks:\n   rank 0:\n    step\n    loss is nan\n", job.err), job.err[-900:]


def test_the_error_file_is_shown_when_stderr_has_no_traceback(launch: Launch, script: Callable[[str], Path]) -> None:
    text = """
call = {'py_callstack': 'Traceback (most recent call last):\\nKeyError: 41', 'timestamp': '0'}
with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
    json.dump({'message': {'message': 'KeyError', 'extraInfo': call}}, file)
os._exit(5)
"""
    job = launch(script(text))
    assert job.finish() == 5
    assert "    KeyError: 41" in job.err


@pytest.mark.parametrize(
    "text, reason", [("raise KeyError(41)", "KeyError: 41"), ("os._exit(5)", "exited with status 5")]
)
def test_the_launchers_error_file_has_the_failure_reason(
    launch: Launch, script: Callable[[str], Path], tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "error.json"
    file.write_text("of an earlier try")
    job = launch(script(text), env={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert job.finish() != 0
    message = json.loads(file.read_text())["message"]
    assert message["message"].endswith(reason), message
    assert message["extraInfo"]["py_callstack"].endswith(reason) == (reason == "KeyError: 41")
    assert list(tmp_path.glob("error.json.*")) == []


def test_a_worker_that_is_killed_ends_the_job(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--nproc-per-node=3", script(WAIT_FOREVER))
    pids = {m[1]: int(m[2]) for m in job.expect(r"\[rank (\d)] ready (\d+)", 3)}
    os.kill(pids["1"], signal.SIGKILL)
    assert job.finish() == 137
    assert f"pid {pids['1']}) was ended by signal 9 (SIGKILL)" in job.err
    assert job.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_everything(
    launch: Launch, script: Callable[[str], Path], number: signal.Signals
) -> None:
    job = launch("--nproc-per-node=2", script(WAIT_FOREVER))
    job.expect("ready", 2)
    job.send(number)
    assert job.finish() == 128 + number
    assert number.name in job.err
    assert job.left_behind() == []


HANDLES_SIGNALS = f"""
def handle(number, frame):
    print('got', number, flush=True)
    if number == signal.SIGHUP: sys.exit()
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, handle)
{WAIT_FOREVER}"""


def test_signals_that_programs_handle_reach_the_workers(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--nproc-per-node=2", "--shutdown-timeout=1000", script(HANDLES_SIGNALS))
    job.expect("ready", 2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        job.send(number)
        job.expect(rf"] got {int(number)}\n", 2)
        job.expect(rf"{number.name} on host \S+: passed to the workers")
    job.send(signal.SIGHUP)
    assert job.finish() == 128 + signal.SIGHUP
    assert job.out.count("] got 1\n") == 2
    assert job.left_behind() == []


def test_a_worker_without_a_handler_dies_of_the_signal(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch(script(WAIT_FOREVER))
    job.expect("ready")
    job.send(signal.SIGUSR1)
    assert job.finish() == 128 + signal.SIGUSR1
    assert "was ended by signal 10 (SIGUSR1)" in job.err
    assert job.left_behind() == []


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_a_worker_that_ignores_sigterm_is_killed(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--shutdown-timeout=0.2", "--nproc-per-node=2", script(STUBBORN + WAIT_FOREVER))
    job.expect("ready", 2)
    job.send(signal.SIGTERM)
    assert job.finish() == 143
    assert "killing ranks 0, 1" in job.err
    assert job.left_behind() == []


def test_a_second_interrupt_kills_at_once(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--shutdown-timeout=100000", script(STUBBORN + WAIT_FOREVER))
    job.expect("ready")
    job.send(signal.SIGINT)
    job.expect("SIGINT on host")
    job.send(signal.SIGINT)
    assert job.finish() == 130
    assert job.left_behind() == []


def test_a_stopped_worker_is_killed(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--shutdown-timeout=100000", script(WAIT_FOREVER))
    pid = int(job.expect(r"ready (\d+)")[0][1])
    os.kill(pid, signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.finish() == 143
    assert job.left_behind() == []


# A child in the worker's process group, one in a session of its own, and one whose parent is gone. All ignore SIGTERM.
FAMILY = f"""
ignores_sigterm = [sys.executable, '-c', '''import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child", flush=True)
while True: signal.pause()''']
subprocess.Popen(ignores_sigterm)
subprocess.Popen(ignores_sigterm, start_new_session=True)
if os.fork() == 0:
    subprocess.Popen(ignores_sigterm, start_new_session=True)
    os._exit(0)
{WAIT_FOREVER}"""


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_nothing_is_left_when_the_launcher_is_killed(
    launch: Launch, script: Callable[[str], Path], victim: str
) -> None:
    job = launch("--nproc-per-node=2", script(FAMILY))
    job.expect("ready", 2)
    job.expect("child", 6)
    os.kill(job.process.pid if victim == "launcher" else job.agent(), signal.SIGKILL)
    assert job.finish() == (-9 if victim == "launcher" else 137)
    assert job.left_behind() == []


def test_nothing_is_left_when_a_worker_fails(launch: Launch, script: Callable[[str], Path]) -> None:
    family = FAMILY.replace(
        "print('ready'", "sys.stdin.read() if rank == 0 else 0\nif rank == 0: sys.exit(4)\nprint('ready'"
    )
    read, write = os.pipe()
    job = launch("--shutdown-timeout=0.2", "--nproc-per-node=2", script(family), stdin=read)
    os.close(read)
    job.expect("child", 6)
    os.close(write)
    assert job.finish() == 4
    assert job.left_behind() == []


def test_orphans_are_killed_after_success(launch: Launch) -> None:
    job = launch("--shutdown-timeout=0.2", "--no-python", "sh", "-c", "sleep 1000 & setsid sleep 1001 & exit 0")
    assert job.finish() == 0
    assert "left behind" in job.err
    assert job.left_behind() == []


def test_lines_stay_whole_and_in_order(launch: Launch, script: Callable[[str], Path]) -> None:
    text = """
for i in range(2000):
    line = f'{rank} {i} ' + 'x' * (i * 37 % 300)
    for stream in (1, 2):
        os.write(stream, line[:5].encode())
        os.write(stream, line[5:].encode() + b'\\n')
"""
    job = launch("--nproc-per-node=4", script(text))
    assert job.finish() == 0
    for shown in (job.out, job.err):
        by_rank: dict[int, list[str]] = {rank: [] for rank in range(4)}
        for line in shown.splitlines():
            match = re.fullmatch(r"\[rank (\d)] (\d) (\d+ x*)", line)
            assert match and match[1] == match[2], line
            by_rank[int(match[1])].append(match[3])
        for lines in by_rank.values():
            assert lines == [f"{i} " + "x" * (i * 37 % 300) for i in range(2000)]


def test_arbitrary_bytes_and_unterminated_lines_pass(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch(script("os.write(1, b'\\xff\\xfe\\x00\\n' + b'y' * 70000 + b'\\nlast')"))
    assert job.finish() == 0
    prefix = b"[rank 0] "
    assert job.raw_out.split(b"\n") == [
        prefix + b"\xff\xfe\x00", prefix + b"y" * 65536, prefix + b"y" * (70000 - 65536), prefix + b"last", b"",
    ]  # fmt: skip


def test_a_slow_reader_loses_no_output(muster: str, script: Callable[[str], Path]) -> None:
    path = script("for i in range(40000): print(i, 'z' * 100)\nprint('end', file=sys.stderr)")
    command = [muster, "run", "--nproc-per-node=2", str(path)]
    env = {**os.environ, "MUSTER_PYTHON": sys.executable}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # The test reads nothing until both workers' pipes and the launcher's own buffer are full: 8 MB do not fit.
        assert process.stdout and process.stderr
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        out = process.stdout.read().decode()
        assert process.wait(100) == 0
    for rank in range(2):
        numbers = [line.split()[2] for line in out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert numbers == [str(i) for i in range(40000)]


def test_a_closed_output_pipe_does_not_end_the_job(muster: str, tmp_path: Path, script: Callable[[str], Path]) -> None:
    path = script(f"for i in range(10000): print(i)\nopen({str(tmp_path / 'done')!r}, 'w')")
    env = {**os.environ, "MUSTER_PYTHON": sys.executable}
    command = [muster, "run", str(path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.close()
        assert process.wait(100) == 0
    assert (tmp_path / "done").exists()


def test_rank_0_reads_the_launchers_stdin(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "input").write_text("some words")
    with open(tmp_path / "input") as file:
        job = launch("--nproc-per-node=2", script("print(repr(sys.stdin.read()))"), stdin=file.fileno())
        assert job.finish() == 0
    assert sorted(job.out.splitlines()) == ["[rank 0] 'some words'", "[rank 1] ''"]


def test_progress_bars_work_on_a_terminal(muster: str, script: Callable[[str], Path]) -> None:
    path = script("for i in range(3): sys.stderr.write(f'\\r{i}|'); sys.stderr.flush()\nprint(file=sys.stderr)")
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"MUSTER_PYTHON": sys.executable}
    shown = shown_on_a_terminal([muster, "run", path], env)
    assert b"\r\x1b[K\x1b[36m[rank 0]\x1b[0m 2|\r\n" in shown
    assert shown.count(b"\n") == 1


def test_a_worker_that_cannot_start_is_named_at_once(launch: Launch, tmp_path: Path) -> None:
    job = launch("--nproc-per-node=2", tmp_path / "none.py")
    assert job.finish() == 127 and f"'{tmp_path}/none.py': no such file" in job.err
    job = launch("--no-python", tmp_path / "none")
    assert job.finish() == 127 and f"'{tmp_path}/none'" in job.err
    plain = tmp_path / "plain"
    plain.write_text("#!/no/such/interpreter\n")
    job = launch("--no-python", plain)
    assert job.finish() == 126 and "not executable" in job.err
    plain.chmod(stat.S_IRWXU)
    job = launch("--no-python", "--nproc-per-node=2", plain)
    assert job.finish() == 127 and f"'{plain}'" in job.err and "interpreter" in job.err
    job = launch("x.py", env={"MUSTER_PYTHON": "/no/python"})
    assert job.finish() == 127


def test_wrong_options_are_named_with_status_2(launch: Launch) -> None:
    for words, message in [
        (["--no-such-option", "x.py"], "unknown option --no-such-option"),
        (["--nproc-per-node=many", "x.py"], "--nproc-per-node takes auto, cpu, gpu, xpu, npu or a number"),
        (["--max-restarts=-1", "x.py"], "--max-restarts takes a number from 0 up, not '-1'"),
        (["--local-addr=no-such-if", "-m", "platform"], "no-such-if"),
        ([], "no script was given"),
    ]:
        job = launch(*words)
        assert job.finish() == 2, words
        assert message in job.err


def test_a_port_that_is_taken_is_named(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = launch("--master-port", str(port), "-m", "platform")
        assert job.finish() == 1
        assert str(port) in job.err and "in use" in job.err


def test_a_port_that_is_free_is_taken(launch: Launch, script: Callable[[str], Path]) -> None:
    port = free_port()
    job = launch("--standalone", "--master-port", str(port), script("print(os.environ['MASTER_PORT'])"))
    assert job.finish() == 0
    assert job.out == f"[rank 0] {port}\n"


def test_an_unknown_host_is_named(launch: Launch) -> None:
    job = launch("--timeout=1", "--nnodes=2", "--node-rank=0", "--master-addr=no-such-host.invalid", "-m", "platform")
    assert job.finish() == 1
    assert "no-such-host.invalid" in job.err


NAMES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  static int calls = 0;
  int (*resolve)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
      dlsym(RTLD_NEXT, "getaddrinfo");
  if (name != NULL && strcmp(name, "silent") == 0) {
    write(2, "looking up\\n", 11);
    for (;;) pause();
  }
  if (name != NULL && strcmp(name, "late") == 0) {
    if (__sync_fetch_and_add(&calls, 1) < 2) return EAI_NONAME;
    name = "127.0.0.1";
  }
  return resolve(name, service, hints, found);
}
"""


@pytest.fixture
def names(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose name server never answers for "silent", and for "late" only after a while."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "names.c").write_text(NAMES)
    library = tmp_path / "names.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "names.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.parametrize("words", [["--master-addr=silent"], ["--rdzv-endpoint=redis://silent"]], ids=["own", "redis"])
def test_signals_work_while_no_name_server_answers(launch: Launch, names: dict[str, str], words: list[str]) -> None:
    job = launch("--nnodes=2", "--timeout=1000", *words, "-m", "platform", env=names)
    job.expect("looking up")
    job.send(signal.SIGTERM)
    assert job.finish() == 143, job.err
    assert job.left_behind() == []


def test_a_short_host_name_is_retried(launch: Launch, names: dict[str, str]) -> None:
    words = ["--nnodes=2", "--node-rank=0", "--master-addr=late", f"--master-port={free_port()}"]
    job = launch(*words, "-m", "platform", env=names)
    job.expect("1 of 2 nodes")
    job.send(signal.SIGTERM)
    assert job.finish() == 143, job.err


def test_torch_stores_connect_to_the_nodes_port(launch: Launch, script: Callable[[str], Path]) -> None:
    pytest.importorskip("torch")
    text = """
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False,
                 timeout=timedelta(seconds=100))
store.set(f'from-{rank}', str(rank * 10))
print('sum', sum(int(store.get(f'from-{i}')) for i in range(2)), store.add('n', 1) > 0)
"""
    job = launch("--nproc-per-node=2", script(text))
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["[rank 0] sum 10 True", "[rank 1] sum 10 True"]


def test_the_help_and_the_version(muster: str) -> None:
    def output_of(*words: str) -> str:
        return subprocess.run([muster, *words], check=True, capture_output=True, text=True, timeout=100).stdout

    assert re.fullmatch(r"muster \d+\.\d+\.\d+\n", output_of("--version"))
    assert "muster run" in output_of("--help") == output_of()
    assert "--nproc-per-node" in output_of("help", "run") == output_of("run", "--help")
    assert all(name in output_of("help", "run") for name in ("SIGUSR1", "SIGUSR2", "SIGHUP"))
    assert "muster completion bash|zsh|fish" in output_of("help", "completion") == output_of("completion", "--help")
    assert "--wait " in output_of("help", "store", "get") == output_of("store", "get", "--help")
    assert "--idle SECONDS=1800 " in output_of("help", "warm") == output_of("warm", "--help")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["dance"], "unknown command 'dance' ("),
        (["rum"], "did you mean run "),
        (["help", "stroe"], "did you mean store "),
        (["warm", "--idle", "0"], "--idle: '0' is not a number of seconds from 0.1 up"),
        (["dump", "ten"], "'ten' is not a number that PID takes"),
        (["dump", "--last", "-1"], "--last: '-1' is not a number from 0 up"),
        (["train.py", "--steps", "3"], "did you mean `muster run train.py --steps 3`"),
        (["explain"], "muster: explain: COLLECTIVE is required (see `muster explain --help`"),
        (["status", "--jsn"], "muster: status: The following argument was not expected: --jsn"),
    ],
)
def test_unknown_commands_get_suggestions(muster: str, words: list[str], answer: str) -> None:
    done = subprocess.run([muster, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and answer in done.stderr


def test_python_commands_go_to_python(muster: str, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 6\n')
    fake.chmod(stat.S_IRWXU)
    done = subprocess.run(
        [muster, "bench", "all_reduce", "--vs", "gloo"],
        env={**os.environ, "MUSTER_PYTHON": str(fake)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 6
    words = done.stdout.split()
    assert words[0] == "-c"
    assert words[-4:] == ["muster.bench", "all_reduce", "--vs", "gloo"]


def test_bench_without_the_package_is_reported(muster: str, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    env = {**os.environ, "MUSTER_PYTHON": str(bare), "PYTHONPATH": ""}
    done = subprocess.run([muster, "bench", "all_reduce"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(
        r"muster: \S+ has no muster: install the torch-muster wheel there, .*MUSTER_PYTHON\n", done.stderr
    )
