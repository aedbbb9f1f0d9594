"""Several hosts on one machine: network namespaces joined by veth pairs, made and removed by the test."""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@functools.cache
def why_not() -> str:
    """Why this machine lets nobody make a namespace; empty where it does. Root in a container may lack the right."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "making network namespaces takes root and iproute2"
    probe = f"muster{os.getpid()}probe"
    try:
        ip("netns", "add", probe)
        ip("-n", probe, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=30)
    return ""


class Host:
    """One namespace: its name, and its address on the link between the hosts."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace, self.address = namespace, address

    def start(self, command: list[str | Path], env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *map(str, command)],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def require() -> None:
    """Skips where namespaces can't be made, or with MUSTER_REQUIRE_HOSTS=1 fails."""
    if reason := why_not():
        if os.environ.get("MUSTER_REQUIRE_HOSTS") == "1":
            pytest.fail(f"MUSTER_REQUIRE_HOSTS is set, and {reason}", pytrace=False)
        pytest.skip(reason)


@contextmanager
def hosts_on_a_switch(count: int) -> Iterator[list[Host]]:
    """Hosts 10.78.0.1, 10.78.0.2, ... each with an interface veth0 to one switch, and nothing else on their network."""
    require()
    tag = f"muster{os.getpid()}"
    switch = f"{tag}switch"
    hosts = [Host(f"{tag}n{i}", f"10.78.0.{i + 1}") for i in range(count)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(hosts):
            ip("netns", "add", host.namespace)
            ip(
                "link",
                "add",
                "veth0",
                "netns",
                host.namespace,
                "type",
                "veth",
                "peer",
                "name",
                f"p{i}",
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for name in (switch, *(host.namespace for host in hosts)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2, with nothing else on their network. Where namespaces can't be
    made this skips, or with MUSTER_REQUIRE_HOSTS=1 fails."""
    require()
    tag = f"muster{os.getpid()}"
    hosts = Host(f"{tag}a", "10.77.0.1"), Host(f"{tag}b", "10.77.0.2")
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        first, second = (host.namespace for host in hosts)
        ip("link", "add", "veth0", "netns", first, "type", "veth", "peer", "name", "veth0", "netns", second)
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=30)
