"""Tests `muster store`: serving a store, and reading one."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SECRET = "5ec2e7" * 8
Words = list["str | Path"]
Ask = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def muster(release_build: Path) -> Path:
    return release_build / "src/muster/cli/muster"


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    return {**kept, "MUSTER_SECRET": SECRET, **more}


class Server:
    def __init__(self, muster: Path, *options: str, lines: int = 1) -> None:
        self.process = subprocess.Popen(
            [muster, "store", "serve", *options], stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline().strip() for _ in range(lines)]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(muster: Path) -> Iterator[Server]:
    server = Server(muster, "--listen", "127.0.0.1:0", "--torch-listen", "127.0.0.1:0", "--threads", "2", lines=2)
    yield server
    assert server.end() == 0


@pytest.fixture
def ask(muster: Path, server: Server) -> Ask:
    def run(
        *words: str, stdin: bytes = b"", url: str = server.lines[0], **env: str
    ) -> "subprocess.CompletedProcess[bytes]":
        command: Words = [muster, "store", "--store", url, *words]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=environment(**env))

    return run


def test_serve_prints_its_addresses(server: Server) -> None:
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", server.lines[0])
    assert re.fullmatch(r"TCPStore clients of PyTorch: 127\.0\.0\.1:\d+", server.lines[1])


def test_values_pass_unchanged(ask: Ask) -> None:
    anything = bytes(range(256))
    assert ask("set", "bytes/any", "--file", "-", stdin=anything).returncode == 0
    assert ask("get", "bytes/any").stdout == anything
    assert json.loads(ask("get", "--json", "bytes/any").stdout) == {"key": "bytes/any", "value_hex": anything.hex()}
    assert ask("set", "bytes/text", "some words").returncode == 0
    assert ask("get", "bytes/text").stdout == b"some words"
    assert ask("ls", "bytes/").stdout == b"bytes/any\nbytes/text\n"
    listed = ask("ls", "-l", "bytes/t", "--json").stdout.splitlines()
    assert [json.loads(line) for line in listed] == [{"key": "bytes/text", "value": "some words"}]
    assert rb"\x00\x01" in ask("ls", "-l", "bytes/a").stdout


def test_counters_and_deletions(ask: Ask) -> None:
    assert ask("add", "count", "5").stdout == b"5\n"
    assert ask("add", "count", "--", "-2").stdout == b"3\n"
    assert ask("delete", "count").returncode == 0
    again = ask("delete", "count")
    assert (again.returncode, again.stderr) == (1, b'muster: store delete: no such key: "count"\n')
    assert ask("barrier", "alone", "1").returncode == 0


def test_a_missing_key_has_its_own_exit_status(ask: Ask) -> None:
    absent = ask("get", "absent")
    assert (absent.returncode, absent.stdout) == (1, b"")
    assert b'no such key: "absent"' in absent.stderr
    late = ask("--timeout", "0.1", "get", "--wait", "absent")
    assert late.returncode == 1
    assert b"timed out" in late.stderr


def test_watch_prints_changes(ask: Ask, muster: Path, server: Server) -> None:
    ask("set", "watched/a", "1")
    words: Words = [
        muster,
        "store",
        "--store",
        server.lines[0],
        "watch",
        "watched/",
        "--interval",
        "0.02",
        "--count",
        "4",
    ]
    watch = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    assert watch.stdout is not None
    lines = []
    for command in (["set", "watched/b", "2"], ["set", "watched/a", "3"], ["delete", "watched/b"]):
        lines.append(watch.stdout.readline())
        ask(*command)
    lines.append(watch.stdout.readline())
    assert watch.wait(60) == 0
    assert lines == ["set  watched/a  1\n", "set  watched/b  2\n", "changed  watched/a  3\n", "deleted  watched/b\n"]


def test_stat_counts(ask: Ask) -> None:
    ask("set", "stat", "1")
    stat = json.loads(ask("stat", "--json").stdout)
    assert stat["keys"] >= 1
    assert stat["threads"] == 2
    assert b"operations" in ask("stat").stdout


def test_an_unauthenticated_client_is_refused(ask: Ask) -> None:
    refused = ask("get", "k", MUSTER_SECRET="aa" * 32)
    assert refused.returncode == 3
    assert b"secret" in refused.stderr
    assert ask("get", "k", MUSTER_SECRET="no hex").returncode == 2


def test_the_secret_may_come_from_a_file(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    assert ask("set", "k", "v", "--secret-file", str(path), MUSTER_SECRET="").returncode == 0
    path.chmod(0o640)
    refused = ask("set", "k", "v", "--secret-file", str(path), MUSTER_SECRET="")
    assert refused.returncode == 2 and b"other users can read or change the file" in refused.stderr


def test_a_proxy_serves_the_same_keys(ask: Ask, muster: Path, server: Server, tmp_path: Path) -> None:
    proxy = Server(muster, "--listen", f"unix:{tmp_path}/proxy", "--upstream", server.lines[0], "--tiered")
    assert proxy.lines == [f"unix:{tmp_path}/proxy"]
    assert ask("set", "through", "the proxy", url=proxy.lines[0]).returncode == 0
    assert ask("get", "through").stdout == b"the proxy"
    assert proxy.end() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command was given"),
        (["frobnicate"], "frobnicate"),
        (["get"], "key"),
        (["set", "k", "v", "--file", "x"], "--file"),
        (["--store", "gopher://x", "get", "k"], "gopher"),
        (["serve", "--listen", "no-such-host.invalid:1"], "no-such-host.invalid"),
        (["serve", "--tiered", "--listen", "127.0.0.1:0"], "--upstream"),
        (["list"], "unknown command 'list'"),
        (["watsh"], "did you mean watch"),
        (["set", "k"], "a value, or --file, is required"),
        (["add", "k", "five"], "'five' is not a number that amount takes"),
        (["--timeout", "-1", "ls"], "--timeout: '-1' is not a number of seconds from 0 up"),
        (["--timeout", "nan", "ls"], "--timeout: 'nan' is not a number of seconds from 0 up"),
        (["watch", "--interval", "0"], "--interval: '0' is not a number of seconds from 0.001 up"),
        (["watch", "--count", "0"], "--count: '0' is not a number from 1 up"),
        (["--store", "redis://127.0.0.1:1", "ls"], "cannot reach Redis"),  # fails at once: waiting would not help
    ],
)
def test_wrong_arguments_are_reported_in_one_line(muster: Path, words: list[str], message: str) -> None:
    done = subprocess.run([muster, "store", *words], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode in (2, 3)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_waiting_for_a_store_is_reported(muster: Path, tmp_path: Path) -> None:
    url = f"unix:{tmp_path}/late"
    words: Words = [muster, "store", "--store", url, "--timeout", "60", "add", "k", "5"]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True, env=environment()) as waiting:
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
        assert url in line and line.endswith("; waiting for it (--timeout 60)\n"), line
        server = Server(muster, "--listen", url)
        assert waiting.communicate(timeout=60) == ("5\n", "")
    assert server.end() == 0


def test_an_absent_store_is_unreachable(muster: Path, tmp_path: Path) -> None:
    words: Words = [muster, "store", "--store", f"unix:{tmp_path}/absent", "--timeout", "0.1", "ls"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 3
    assert "nothing answered" in done.stderr


def test_a_proxy_reports_its_missing_upstream(muster: Path, tmp_path: Path) -> None:
    words: Words = [muster, "store", "serve", "--listen", f"unix:{tmp_path}/p", "--upstream", f"unix:{tmp_path}/late"]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True, env=environment()) as waiting:
        assert waiting.stderr is not None and waiting.stdout is not None
        line = waiting.stderr.readline()
        assert "--upstream" in line and line.endswith("; waiting for it\n"), line
        server = Server(muster, "--listen", f"unix:{tmp_path}/late")
        assert waiting.stdout.readline() == f"unix:{tmp_path}/p\n"
        waiting.terminate()
        assert waiting.wait(60) == 0
    assert server.end() == 0


def test_an_open_store_on_the_network_needs_a_secret(muster: Path) -> None:
    words: Words = [muster, "store", "serve", "--listen", "0.0.0.0:0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment(MUSTER_SECRET=""))
    assert done.returncode == 2
    assert "--secret-file" in done.stderr


def test_in_a_job_the_command_uses_the_jobs_store(muster: Path) -> None:
    script = f'"{muster}" store set "from $RANK" "$RANK" && "{muster}" store get --wait "from $((1 - RANK))"'
    words: Words = [muster, "run", "--nproc-per-node", "2", "--no-python", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == ["0", "1"]
