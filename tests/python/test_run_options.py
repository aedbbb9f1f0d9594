"""Tests the options of `muster run`: output, signals, events, hosts, dry runs, and shell completion."""

import json
import os
import pty
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import two_hosts
from launching import TIMEOUT, Launch, free_port, wait_until

PRINT_STREAMS = "print(f'out {rank}', flush=True); print(f'err {rank}', file=sys.stderr, flush=True)\n"


def read_tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def run_directory(folder: Path, run_id: str) -> Path:
    """The only run directory in a log directory."""
    (run,) = folder.iterdir()
    assert run.name.startswith(f"{run_id}_")
    return run


def test_a_log_directory_keeps_every_stream(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    job = launch("--log-dir", tmp_path / "logs", "--rdzv-id=j/1", "--nproc-per-node=2", script(PRINT_STREAMS))
    assert job.finish() == 0, job.err
    assert read_tree(run_directory(tmp_path / "logs", "j_1") / "attempt_0") == {
        "0/stdout.log": "out 0\n", "0/stderr.log": "err 0\n", "1/stdout.log": "out 1\n", "1/stderr.log": "err 1\n",
    }  # fmt: skip
    assert sorted(job.out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]


def test_redirected_and_teed_streams(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    job = launch("--log-dir", tmp_path / "logs", "--rdzv-id=j", "--nproc_per_node=3",
                 "-r", "0:3,1:1", "--tee", "1:1,2:2", script(PRINT_STREAMS))  # fmt: skip
    assert job.finish() == 0, job.err
    assert read_tree(run_directory(tmp_path / "logs", "j") / "attempt_0") == {
        "0/stdout.log": "out 0\n", "0/stderr.log": "err 0\n", "1/stdout.log": "out 1\n", "2/stderr.log": "err 2\n",
    }  # fmt: skip
    assert sorted(job.out.splitlines()) == ["[rank 1] out 1", "[rank 2] out 2"]
    assert sorted(job.err.splitlines()) == ["[rank 1] err 1", "[rank 2] err 2"]


def test_redirected_output_gets_a_named_directory(
    launch: Launch, script: Callable[[str], Path], tmp_path: Path
) -> None:
    job = launch("-r3", script(PRINT_STREAMS), env={"TMPDIR": str(tmp_path)})
    assert job.finish() == 0, job.err
    folder = Path(job.err.split("the workers' output is kept in ")[1].strip())
    assert folder.is_relative_to(tmp_path)
    assert (folder / "attempt_0/0/stdout.log").read_text() == "out 0\n"


def test_the_output_directory_is_private(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    temporary, trap = tmp_path / "temporary", tmp_path / "trap"
    temporary.mkdir()
    trap.mkdir()
    (temporary / "muster").symlink_to(trap)
    job = launch("-r3", "--rdzv-id=j", script(PRINT_STREAMS), env={"TMPDIR": str(temporary)})
    assert job.finish() == 0, job.err
    assert list(trap.iterdir()) == []
    (folder,) = temporary.glob("muster_j_??????")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "attempt_0/0/stdout.log").read_text() == "out 0\n"


@pytest.mark.parametrize("value", ["/no/such/folder", ""])
def test_a_missing_temporary_directory_is_not_used(launch: Launch, script: Callable[[str], Path], value: str) -> None:
    text = "os.chdir('/')\nprint(os.environ['TORCHELASTIC_ERROR_FILE'])"
    job = launch(script(text), env={"TMPDIR": value})
    assert job.finish() == 0, job.err
    assert job.out.startswith("[rank 0] /tmp/muster-")


def test_an_unread_terminal_does_not_block_the_job(muster: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    code = f"yes {'y' * 99} | head -c 300000; touch {tmp_path}/written; exec sleep 1000"
    with subprocess.Popen([muster, "run", "--no-python", "/bin/sh", "-c", code], stdout=theirs) as process:
        try:
            wait_until((tmp_path / "written").exists)
            process.terminate()
            assert process.wait(TIMEOUT) == 128 + signal.SIGTERM
        finally:
            os.close(ours)
            os.close(theirs)
            process.kill()


def test_redirected_traceback_of_a_failure_is_shown(
    launch: Launch, script: Callable[[str], Path], tmp_path: Path
) -> None:
    job = launch("--log-dir", tmp_path / "logs", "-r3", script("raise ValueError('boom')"))
    assert job.finish() == 1
    assert "    ValueError: boom" in job.err and "[rank 0]" not in job.err


def test_an_error_file_is_kept_in_the_log_folder(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    write = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{}')"
    job = launch("--log-dir", tmp_path / "logs", "--rdzv-id=j", script(write))
    assert job.finish() == 0, job.err
    assert (run_directory(tmp_path / "logs", "j") / "attempt_0/0/error.json").read_text() == "{}"


def test_filters_select_ranks_to_show_and_tee(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    text = "print('loss 1'); print('step a,b'); print('nothing')\nprint('warning', file=sys.stderr)"
    job = launch("--log-dir", tmp_path / "logs", "--rdzv-id=j", "--nproc-per-node=2", "--local-ranks-filter=1",
                 "--duplicate-stdout-filters", "loss,a,,b", "--duplicate_stderr_filters=warn",
                 script(text))  # fmt: skip
    assert job.finish() == 0, job.err
    assert job.out == "[rank 1] loss 1\n[rank 1] step a,b\n[rank 1] nothing\n"
    attempt = run_directory(tmp_path / "logs", "j") / "attempt_0"
    assert sorted((attempt / "filtered_stdout.log").read_text().splitlines()) == [
        "[rank 0] loss 1", "[rank 0] step a,b", "[rank 1] loss 1", "[rank 1] step a,b",
    ]  # fmt: skip
    assert sorted((attempt / "filtered_stderr.log").read_text().splitlines()) == [
        "[rank 0] warning",
        "[rank 1] warning",
    ]
    assert (attempt / "0/stdout.log").exists()


def test_torchruns_template_makes_the_prefix(launch: Launch, script: Callable[[str], Path]) -> None:
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}${rank}]: "}
    path = script("print('hello')")
    job = launch("--role=trainer", path, env=template)
    assert job.finish() == 0, job.err
    assert job.out == "[trainer0]: hello\n"
    job = launch("--log-line-prefix-template=${hostname}:${rank}: ", path, env=template)
    assert job.finish() == 0, job.err
    assert job.out == f"{socket.gethostname()}:0: hello\n"


def test_an_unwritable_log_directory_is_named(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = launch("--log-dir", tmp_path / "file", "-m", "platform")
    assert job.finish() == 1
    assert f"{tmp_path}/file" in job.err


def test_a_configured_signal_ends_the_job(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--signals-to-handle=SIGUSR1", script("print('ready', flush=True)\nwhile True: signal.pause()"))
    job.expect("ready")
    job.send(signal.SIGUSR1)
    assert job.finish() == 128 + signal.SIGUSR1
    assert "SIGUSR1 on host" in job.err
    assert job.left_behind() == []


def test_a_macro_stands_for_the_local_rank(launch: Launch) -> None:
    job = launch("--no-python", "--nproc-per-node=2", "echo", "device=${local_rank}")
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["[rank 0] device=0", "[rank 1] device=1"]


def test_a_virtual_local_rank_hides_the_other_devices(launch: Launch, script: Callable[[str], Path]) -> None:
    text = "print(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])"
    job = launch("--virtual-local-rank", "--nproc-per-node=2", script(text), env={"CUDA_VISIBLE_DEVICES": "4,6"})
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["[rank 0] 0 4", "[rank 1] 0 6"]


def test_run_path_passes_the_arguments(launch: Launch, script: Callable[[str], Path]) -> None:
    path = script("print(__name__, sys.argv)")
    job = launch("--run-path", path, "--lr", "1")
    assert job.finish() == 0, job.err
    assert job.out == f"[rank 0] __main__ {[str(path), '--lr', '1']}\n"


def test_events_are_logged_as_they_happen(launch: Launch, script: Callable[[str], Path], tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    job = launch("--event-log-handler", log, "--rdzv-id=j", "--nproc-per-node=2", script("sys.exit(3 * rank)"))
    assert job.finish() == 3
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {event["run_id"] for event in events} == {"j"}
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    names = [event["event"] for event in events]
    assert names[0] == "run_started" and names[1] == "generation_began" and names[-1] == "run_ended"
    assert {(event["rank"], event["code"]) for event in events if event["event"] == "worker_ended"} >= {(1, 3)}
    assert events[-1]["status"] == 3


def test_events_are_shown_on_the_console(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--event-log-handler=console", "--rdzv-id=j", script("sys.exit(3)"))
    assert job.finish() == 3
    events = [json.loads(line) for line in job.err.splitlines() if line.startswith("{")]
    names = [event["event"] for event in events]
    assert names == ["run_started", "generation_began", "worker_ended", "run_ended"]
    assert {event["run_id"] for event in events} == {"j"} and events[-1]["status"] == 3


def test_an_event_log_that_cannot_be_written_is_named(launch: Launch, tmp_path: Path) -> None:
    job = launch("--event-log-handler", tmp_path / "no/such", "-m", "platform")
    assert job.finish() == 1
    assert f"--event-log-handler {tmp_path}/no/such" in job.err


def test_numa_binding_limits_the_cpus(launch: Launch, script: Callable[[str], Path]) -> None:
    cpus = len(os.sched_getaffinity(0))
    if cpus < 2:
        pytest.skip("needs two CPUs")
    job = launch("--numa-binding=exclusive", "--nproc-per-node=2", script("print(sorted(os.sched_getaffinity(0)))"))
    status = job.finish()
    if "workers would share" in job.err:
        pytest.skip(job.err)
    assert status == 0, job.err
    first, second = (set(json.loads(line.split("] ", 1)[1])) for line in sorted(job.out.splitlines()))
    assert first and second and not first & second


def run_and_read(*words: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=100,
                          env={**os.environ, **(env or {})})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dry_run_prints_all_but_the_secret(muster: str, script: Callable[[str], Path]) -> None:
    path = script("print('started')")
    out = run_and_read(muster, "run", "--dry-run", "--nnodes=2", "--node-rank=1", "--master-addr=10.9.8.7",
                       "--nproc-per-node=2", "--rdzv-id=j", path, "--lr", "3",
                       env={"MUSTER_SECRET": "abcd1234" * 4, "MUSTER_PYTHON": sys.executable})  # fmt: skip
    assert "tcp://10.9.8.7:29500" in out and "this is node 1" in out
    assert f"{sys.executable} -u {path} --lr 3" in out
    assert "RANK=2" in out and "RANK=3" in out and "WORLD_SIZE=4" in out and "TORCHELASTIC_RUN_ID=j" in out
    assert "abcd1234" not in out and "started" not in out


# Values for torchrun's options that take a value and have no list of choices.
VALUES = {
    "nnodes": "1", "nproc_per_node": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:29500", "rdzv_id": "j",
    "rdzv_conf": "timeout=9", "max_restarts": "1", "monitor_interval": "0.5", "role": "r", "log_dir": "logs",
    "redirects": "0:1", "tee": "0:2", "local_ranks_filter": "0", "node_rank": "0", "master_addr": "127.0.0.1",
    "master_port": "29500", "local_addr": "127.0.0.1", "logs_specs": "default", "event_log_handler": "null",
    "shutdown_timeout": "3", "signals_to_handle": "SIGUSR1", "duplicate_stdout_filters": "a",
    "duplicate_stderr_filters": "a", "log_line_prefix_template": "a",
}  # fmt: skip


def test_all_torchrun_options_and_spellings_work(muster: str, script: Callable[[str], Path]) -> None:
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    path = script("")
    path.chmod(0o700)
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            if action.dest in ("help", "print_completion"):  # the second: `muster completion` prints muster's own
                continue
            program = "platform" if action.dest == "module" else path
            value = [] if action.nargs == 0 else [str(next(iter(action.choices or [VALUES[action.dest]])))]
            for spelled in {name[:2] + name[2:].replace("_", "-"), name[:2] + name[2:].replace("-", "_")}:
                done = subprocess.run([muster, "run", "--dry-run", spelled, *value, program], capture_output=True,
                                      text=True, env={**os.environ, "MUSTER_PYTHON": sys.executable})  # fmt: skip
                assert done.returncode == 0, f"{spelled} {value}: {done.stderr}"


def test_options_without_effect_are_reported(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--monitor-interval=1", "--rdzv-conf=read_timeout=9", script("print('well')"))
    assert job.finish() == 0 and "well" in job.out
    assert "muster: --monitor-interval has no effect: " in job.err
    assert "muster: --rdzv-conf read_timeout has no effect: " in job.err


def test_a_dry_run_fails_for_a_missing_program(muster: str, tmp_path: Path) -> None:
    done = subprocess.run([muster, "run", "--dry-run", str(tmp_path / "none.py")], capture_output=True, text=True)
    assert done.returncode == 127 and "none.py" in done.stderr


def complete(muster: str, *words: str) -> list[str]:
    """The completions that bash offers for the last word."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _muster; echo "${COMPREPLY[@]}"'
    code = f"source <({muster} completion bash); {ask}"
    return run_and_read("bash", "-c", code, "bash", *words).split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(muster: str) -> None:
    assert complete(muster, "muster", "com") == ["completion"]
    assert complete(muster, "muster", "run", "--max") == ["--max-restarts"]
    assert complete(muster, "muster", "run", "--rdzv-backend", "") == [
        "static", "c10d", "parallel", "redis", "etcd", "file",
    ]  # fmt: skip
    assert complete(muster, "muster", "run", "-r", "") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_subcommands_and_their_options(muster: str) -> None:
    assert complete(muster, "muster", "store", "w") == ["watch"]
    assert complete(muster, "muster", "store", "--store", "unix:/x", "ls", "--v") == ["--values"]
    assert complete(muster, "muster", "store", "get", "--wa") == ["--wait"]
    assert complete(muster, "muster", "warm", "st") == ["status", "stop"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(muster: str, shell: str, tmp_path: Path) -> None:
    text = run_and_read(muster, "completion", shell)
    assert f"'{muster}' completion words" in text
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        run_and_read(shell, "-n", tmp_path / "script")


FAKE_SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0",
}  # fmt: skip


def test_a_slurm_step_needs_no_options(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch(script("print(os.environ['TORCHELASTIC_RUN_ID'])"), env=FAKE_SLURM)
    assert job.finish() == 0, job.err
    assert job.out == "[rank 0] slurm-7.0\n"
    assert "taken from Slurm job 7, step 0: --nnodes=1 --rdzv-id=slurm-7.0" in job.err
    job = launch("x.py", env={**FAKE_SLURM, "SLURM_STEP_NUM_TASKS": "8"})
    assert job.finish() == 2
    assert "srun --ntasks-per-node=1" in job.err


@pytest.fixture
def fake_ssh(tmp_path: Path) -> Path:
    """An ssh that runs the command locally and records the host. The host "gone" cannot be reached."""
    path = tmp_path / "ssh"
    path.write_text(f"""#!/bin/sh
echo "$1" >> {tmp_path}/reached
test "$1" != gone || {{ echo "no route to gone" >&2; exit 255; }}
exec sh -c "$2"
""")
    path.chmod(stat.S_IRWXU)
    return path


WAIT_FOREVER = "print('ready', flush=True)\nwhile True: signal.pause()\n"


def test_hosts_are_started_over_ssh(
    launch: Launch, script: Callable[[str], Path], fake_ssh: Path, tmp_path: Path
) -> None:
    path = script("print(rank, os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'], sys.argv[1])")
    job = launch("--hosts=127.0.0.1,localhost:2", "--ssh", fake_ssh, path, "it's; $HOME")
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == [
        "[127.0.0.1] [rank 0] 0 3 0 it's; $HOME",
        "[localhost] [rank 1] 1 3 1 it's; $HOME",
        "[localhost] [rank 2] 2 3 1 it's; $HOME",
    ]
    assert sorted((tmp_path / "reached").read_text().split()) == ["127.0.0.1", "localhost"]
    assert job.left_behind() == []


def test_a_failure_on_one_host_ends_all(launch: Launch, script: Callable[[str], Path], fake_ssh: Path) -> None:
    path = script("if rank == 1: sys.exit(5)\n" + WAIT_FOREVER)
    job = launch("--hosts=127.0.0.1,localhost", path, env={"MUSTER_SSH": str(fake_ssh)})
    assert job.finish() == 5
    assert "rank 1 (host" in job.err and "exited with status 5" in job.err
    assert job.left_behind() == []


def test_a_host_that_cannot_be_reached_ends_the_job(
    launch: Launch, script: Callable[[str], Path], fake_ssh: Path
) -> None:
    job = launch("--hosts=127.0.0.1,gone", "--ssh", fake_ssh, script(WAIT_FOREVER))
    assert job.finish() == 255
    assert "[gone] no route to gone" in job.err and "`muster run` on gone exited with status 255" in job.err
    assert job.left_behind() == []


# Runs a command on a terminal of its own.
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def test_ssh_fails_instead_of_prompting(launch: Launch, fake_ssh: Path) -> None:
    fake_ssh.write_text("#!/bin/sh\nstty -echo < /dev/tty || exit 255\necho password:\nread answer < /dev/tty\n")
    job = launch("--hosts=127.0.0.1", "--ssh", fake_ssh, "x.py", before=[sys.executable, "-c", ON_A_TERMINAL])
    assert job.finish() == 255, job.out
    assert "[127.0.0.1] " in job.out and "/dev/tty" in job.out and "password" not in job.out
    assert job.left_behind() == []


def test_a_silent_host_does_not_delay_the_end(launch: Launch, script: Callable[[str], Path], fake_ssh: Path) -> None:
    fake_ssh.write_text('#!/bin/sh\ntest "$1" = silent && exec cat > /dev/null\nexec sh -c "$2"\n')
    times = "--rdzv-conf=last_call_timeout=0,close_timeout=0"
    job = launch("--hosts=127.0.0.1,silent", "--nnodes=1:2", times, "--shutdown-timeout=0", "--ssh", fake_ssh,
                 script("print('done')"))  # fmt: skip
    assert job.finish() == 0, job.err
    assert "done" in job.out and "the job has ended, but the connection to silent" in job.err
    assert job.left_behind() == []


def test_a_signal_reaches_the_workers_of_all_hosts(
    launch: Launch, script: Callable[[str], Path], fake_ssh: Path
) -> None:
    handle = "signal.signal(signal.SIGUSR1, lambda *_: print('got it', flush=True))\n"
    job = launch("--hosts=127.0.0.1,localhost", "--ssh", fake_ssh, script(handle + WAIT_FOREVER))
    job.expect("ready", 2)
    job.send(signal.SIGUSR1)
    job.expect("got it", 2)
    job.send(signal.SIGTERM)
    assert job.finish() == 143
    assert job.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_hosts_end_with_their_launcher(
    launch: Launch, script: Callable[[str], Path], fake_ssh: Path, number: signal.Signals
) -> None:
    job = launch("--hosts=127.0.0.1,localhost", "--ssh", fake_ssh, script(WAIT_FOREVER))
    job.expect("ready", 2)
    job.send(number)
    assert job.finish() == (130 if number == signal.SIGINT else -9)
    assert job.left_behind() == []


def test_an_ssh_that_is_missing_is_named(launch: Launch) -> None:
    job = launch("--hosts=a,b", "--ssh=/no/such/ssh", "x.py")
    assert job.finish() == 127
    assert "/no/such/ssh" in job.err


def test_separate_hosts_connect_over_the_network(muster: str, script: Callable[[str], Path], tmp_path: Path) -> None:
    path = script("print(rank, os.environ['MUSTER_INTERFACE'])")
    with two_hosts() as hosts:
        ssh = tmp_path / "ssh"
        cases = "".join(f'{host.address}) exec {" ".join(host.prefix())} sh -c "$2";;\n' for host in hosts)
        ssh.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\n')
        ssh.chmod(stat.S_IRWXU)
        names = ",".join(host.address for host in hosts)
        out = run_and_read(muster, "run", "--hosts", names, "--ssh", ssh, path, env={"MUSTER_PYTHON": sys.executable})
    assert sorted(out.splitlines()) == [
        f"[{host.address}] [rank {rank}] {rank} {host.address}" for rank, host in enumerate(hosts)
    ]


@pytest.fixture
def real_ssh(tmp_path: Path) -> Iterator[str]:
    """An ssh command that reaches this machine through an sshd that the test starts."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("needs OpenSSH's client and server")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True, timeout=100)
    (tmp_path / "authorized").write_text((tmp_path / "user.pub").read_text())
    port = free_port()
    options = [f"-oHostKey={tmp_path}/host", f"-oAuthorizedKeysFile={tmp_path}/authorized", "-oStrictModes=no"]
    options += ["-oUsePAM=no", "-oPermitRootLogin=yes", f"-oPidFile={tmp_path}/pid", "-oListenAddress=127.0.0.1"]
    privsep_dir = Path("/run/sshd")  # Debian's sshd requires it
    made = os.geteuid() == 0 and not privsep_dir.exists()
    if made:
        privsep_dir.mkdir(mode=0o755)
    server = subprocess.Popen([sshd, "-D", "-e", "-f/dev/null", f"-p{port}", *options],
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert server.stderr
    line = server.stderr.readline()
    if "listening" not in line:
        server.kill()
        pytest.skip(f"sshd does not run here: {line}")
    client = "-oStrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null -oLogLevel=ERROR -oBatchMode=yes"
    yield f"ssh -p {port} -i {tmp_path}/user {client}"
    server.kill()
    server.communicate()
    if made:
        privsep_dir.rmdir()


def test_hosts_are_started_and_ended_over_a_real_ssh(
    launch: Launch, script: Callable[[str], Path], real_ssh: str
) -> None:
    job = launch("--hosts=127.0.0.1,localhost", "--ssh", real_ssh, script("print(rank, os.getppid())\n" + WAIT_FOREVER))
    job.expect("ready", 2)
    job.send(signal.SIGKILL)
    job.finish()
    assert job.left_behind() == []
