"""Makes and removes several hosts on one machine. Like separate machines, each has its own network, host name, boot id,
mounts and pids. The pids of different hosts collide, and mean different processes."""

import atexit
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

# The kernel gives the first PID namespace of every machine the same number (PROC_PID_INIT_INO), and other namespaces
# other numbers. This library shows the first number to all processes of the hosts, as on machines without containers.
LIKE_A_MACHINE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/stat.h>

int stat(const char* path, struct stat* found) {
  static int (*real)(const char*, struct stat*);
  if (!real) real = (int (*)(const char*, struct stat*))dlsym(RTLD_NEXT, "stat");
  const int status = real(path, found);
  if (status == 0 && strcmp(path, "/proc/self/ns/pid") == 0) found->st_ino = 0xEFFFFFFCu;
  return status;
}
int stat64(const char* path, struct stat64* found) { return stat(path, (struct stat*)found); }
"""

# The first process of a host. After the set-up it only keeps the namespaces alive; the kernel reaps its orphans.
FIRST_PROCESS = """
trap '' CHLD
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id && hostname "$2" &&
mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/resolv.conf" /etc/resolv.conf &&
echo ready && exec sleep infinity
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@functools.cache
def missing_capability() -> str:
    """The reason why this machine cannot make hosts; empty if it can. Root in a container may lack the right."""
    tools = ("ip", "unshare", "nsenter", "mount", "hostname", "cc")
    if os.geteuid() != 0 or not all(map(shutil.which, tools)):
        return f"making hosts takes root and {', '.join(tools)}"
    try:
        with ExitStack() as stack:
            host = stack.enter_context(made_host(f"muster{os.getpid()}probe", ""))
            ip("-n", host.namespace, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    except subprocess.CalledProcessError as error:
        return f"hosts cannot be made here: {error.stderr.strip()}"
    return ""


@functools.cache
def preloaded() -> str:
    """The library that makes processes of a host see what those of a separate machine see."""
    folder = tempfile.mkdtemp(prefix="muster-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = f"{folder}/like_a_machine.so"
    subprocess.run(
        ["cc", "-x", "c", "-shared", "-fPIC", "-O1", "-o", library, "-", "-ldl"],
        input=LIKE_A_MACHINE,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return library


@contextmanager
def children_in_pid_namespace_of(pid: int) -> Iterator[None]:
    """Processes that this thread starts in the context belong to the PID namespace of `pid`. It must start no threads.
    The processes also have a pid in this namespace: the test can wait for them and send them signals as usual."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        with open(path) as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {path}")

    enter(f"/proc/{pid}/ns/pid")
    try:
        yield
    finally:
        enter("/proc/self/ns/pid")


class Host:
    """One host: the name of its network namespace, its address on the link between the hosts, and its first process."""

    def __init__(self, namespace: str, address: str, first_process: int) -> None:
        self.namespace, self.address, self.first_process = namespace, address, first_process

    def prefix(self, pid: bool = True) -> list[str]:
        """The words before a command that run it on this host, in the current directory. Without `pid` it keeps the
        PID namespace."""
        kinds = {"mount": "mnt", "uts": "uts", **({"pid": "pid"} if pid else {})}
        spaces = [f"--{kind}=/proc/{self.first_process}/ns/{name}" for kind, name in kinds.items()]
        inside = ["env", f"--chdir={Path.cwd()}", f"LD_PRELOAD={preloaded()}"]
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *spaces, *inside]

    def popen(self, command: Sequence[object], **options: Any) -> Any:
        """As subprocess.Popen. The process is the command itself, and belongs to this host."""
        words = [*self.prefix(pid=False), *map(str, command)]
        with children_in_pid_namespace_of(self.first_process):
            return subprocess.Popen(words, **options)

    def start(self, command: Sequence[object], env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        environment = {**os.environ, **(env or {})}
        started: subprocess.Popen[str] = self.popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return started

    def next_pid(self, pid: int) -> None:
        """Makes the next process of this host get this pid, or the next free one."""
        write = f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid"
        assert self.start(["/bin/sh", "-c", write]).wait(30) == 0

    def occupy(self, pid: int) -> "subprocess.Popen[str]":
        """Starts a process of this host that has this pid on the host, and waits until it runs."""
        self.next_pid(pid)
        process = self.start(["/bin/sh", "-c", "echo $$; exec sleep infinity"])
        assert process.stdout is not None
        assert int(process.stdout.readline()) == pid, "the number was not free"
        return process


@contextmanager
def made_host(name: str, address: str, hosts: Mapping[str, str] = MappingProxyType({})) -> Iterator[Host]:
    """A host with this name, and a network namespace of the same name. It can resolve only the names in `hosts`. It has
    no link to other hosts yet."""
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, timeout=30)
        ip("netns", "add", name)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-test-")))
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        known = {"localhost": "127.0.0.1", name: address, **hosts}
        (folder / "hosts").write_text("".join(f"{known[name]} {name}\n" for name in known if known[name]))
        (folder / "resolv.conf").touch()
        own = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["ip", "netns", "exec", name, *own, "/bin/sh", "-c", FIRST_PROCESS, "sh", str(folder), name]
        parent = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stack.callback(parent.wait, 30)
        stack.callback(parent.kill)
        assert parent.stdout is not None and parent.stderr is not None
        if parent.stdout.readline() != "ready\n":
            parent.kill()
            raise subprocess.CalledProcessError(1, words, stderr=parent.stderr.read())
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        yield Host(name, address, int(children[0]))


@contextmanager
def made_hosts(network: str, count: int, aliases: Sequence[str] = ()) -> Iterator[list[Host]]:
    """Hosts 1, 2, ... of this network, which can resolve each other's names. `aliases`: further names of the hosts."""
    names = {f"muster{os.getpid()}h{i}": f"{network}.{i}" for i in range(1, count + 1)}
    known = {**names, **dict(zip(aliases, names.values(), strict=False))}
    with ExitStack() as stack:
        yield [stack.enter_context(made_host(name, address, known)) for name, address in names.items()]


def require() -> None:
    """Skips the test if hosts cannot be made; with MUSTER_REQUIRE_HOSTS=1, fails it."""
    if reason := missing_capability():
        skip(reason)


def skip(reason: str) -> NoReturn:
    """Skips the test because of what this process may not do; with MUSTER_REQUIRE_HOSTS, fails it."""
    if os.environ.get("MUSTER_REQUIRE_HOSTS"):
        pytest.fail(f"MUSTER_REQUIRE_HOSTS is set, and {reason}", pytrace=False)
    pytest.skip(reason)


def bring_up(host: Host, *devices: str) -> None:
    """Gives the last of the devices the host's address."""
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", devices[-1])
    for device in ("lo", *devices):
        ip("-n", host.namespace, "link", "set", device, "up")


@contextmanager
def hosts_on_a_switch(count: int, aliases: Sequence[str] = ()) -> Iterator[list[Host]]:
    """Hosts 10.78.0.1, 10.78.0.2, ... each with an interface veth0 to one switch, and nothing else on their network.
    `aliases`: further names of these hosts."""
    require()
    switch = f"muster{os.getpid()}switch"
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["ip", "netns", "del", switch], capture_output=True, timeout=30)
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        hosts = stack.enter_context(made_hosts("10.78.0", count, aliases))
        for i, host in enumerate(hosts):
            link = ["link", "add", "veth0", "netns", host.namespace, "type", "veth"]
            ip(*link, "peer", "name", f"p{i}", "netns", switch)
            ip("-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            bring_up(host, "veth0")
        yield hosts


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2, with nothing else on their network. If hosts cannot be made, skips the test;
    with MUSTER_REQUIRE_HOSTS=1, fails it."""
    require()
    with made_hosts("10.77.0", 2) as (first, second):
        link = ["link", "add", "veth0", "netns", first.namespace, "type", "veth"]
        ip(*link, "peer", "name", "veth0", "netns", second.namespace)
        for host in (first, second):
            bring_up(host, "veth0")
        yield first, second


SECRET = "00112233445566778899aabbccddeeff"


def run_on(
    hosts: tuple[Host, Host],
    binary: Path,
    script: list[str | Path],
    nproc: int = 2,
    options: tuple[str, ...] = (),
    meeting: str = "",
) -> list[tuple[int, str]]:
    """Starts one agent on each host, with the rendezvous at the first host or at the URL `meeting`. Returns their exit
    statuses and outputs."""
    agents = []
    for node, host in enumerate(hosts):
        command = [binary, "run", "--nnodes", "2", "--nproc-per-node", str(nproc)]
        first = ["--node-rank", str(node), "--master-addr", hosts[0].address, "--master-port", "29500"]
        command += [*(["--rdzv-endpoint", meeting] if meeting else first), *options, *script]
        agents.append(host.start(command, env={"MUSTER_SECRET": SECRET}))
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


class LossyNetwork:
    """The network between two hosts: it loses, delays and reorders packets, or drops all of them."""

    def __init__(self, bridge: "subprocess.Popen[str]") -> None:
        self._bridge = bridge
        assert bridge.stdin is not None and bridge.stdout is not None
        self._commands, self._answers = bridge.stdin, bridge.stdout
        assert self._answers.readline() == "ready\n", "the bridge did not start"

    def cut(self, seconds: float, side: int | None = None) -> None:
        """Drops all packets for so many seconds, or only those from host `side`."""
        print("cut", seconds, "" if side is None else side, file=self._commands, flush=True)

    def wait_until_healed(self) -> None:
        assert self._answers.readline() == "healed\n"

    def end(self) -> dict[str, int]:
        """Ends the network. Returns how many packets it passed, lost and so on."""
        self._commands.close()
        figures: dict[str, int] = json.loads(self._answers.readlines()[-1])
        return figures


@contextmanager
def two_lossy_hosts(**options: float) -> Iterator[tuple[tuple[Host, Host], LossyNetwork]]:
    """Two hosts, 10.79.0.1 and 10.79.0.2, whose only link is a lossy_bridge.py with these options."""
    require()
    with made_hosts("10.79.0", 2) as (first, second):
        words = [f"--{name}={value}" for name, value in options.items()]
        program = Path(__file__).with_name("lossy_bridge.py")
        with subprocess.Popen(
            [sys.executable, program, *words, first.namespace, second.namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as bridge:
            try:
                network = LossyNetwork(bridge)
                for host in (first, second):
                    bring_up(host, "tun0")
                yield (first, second), network
            finally:
                bridge.kill()
