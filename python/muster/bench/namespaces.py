"""Two nodes on one machine: network namespaces with a veth pair, for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.bench.report import BenchFailedError

INTERFACE = "veth0"
_CLASSES = 64


@dataclass
class Node:
    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """The prefix of a command that runs in this namespace."""
        return ["ip", "netns", "exec", self.namespace]


def check_rate(option: str, rate: str) -> None:
    """Raises ValueError for a rate that tc does not accept."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?([kmgt]i?)?(bit|bps)", rate.lower()):
        raise ValueError(f"{option} takes a rate as tc writes it, such as 1gbit or 100mbit; not {rate!r}")


@contextlib.contextmanager
def two_nodes(rate: str = "", connection_rate: str = "") -> Iterator[list[Node]]:
    """Yields two nodes, 10.77.1.1 and 10.77.1.2, alone on their network.

    rate: of the network, as tc writes it, such as 1gbit. connection_rate: of each connection.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise BenchFailedError("making network namespaces takes root and iproute2 (the program `ip`)")
    nodes = [Node(f"musterbench{os.getpid()}{name}", f"10.77.1.{i + 1}") for i, name in enumerate("ab")]
    first, second = (node.namespace for node in nodes)
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.namespace)
        _run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for node in nodes:
            _run("ip", "-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", node.namespace, "link", "set", device, "up")
            if rate:
                _tc(node, "qdisc", "root", "tbf", "rate", rate, "burst", "128k", "latency", "50ms")
            if connection_rate:
                _limit_connections(node, connection_rate)
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True, timeout=30)


def _limit_connections(node: Node, rate: str) -> None:
    """Makes a class for each value of some bits of the connecting side's port, so that few connections share a class.

    The connecting side has the even port, because the system gives odd ports to listeners.
    """
    _tc(node, "qdisc", "root", "handle", "1:", "htb")
    for value in range(_CLASSES):
        name = f"1:{1 + value:x}"
        port = (hex(2 * value), hex(2 * _CLASSES - 1))
        _tc(node, "class", "parent", "1:", "classid", name, "htb", "rate", rate, "quantum", "60000")
        for prio, end in (("1", "dport"), ("2", "sport")):
            match = ("u32", "match", "ip", end, *port, "flowid", name)
            _tc(node, "filter", "parent", "1:", "protocol", "ip", "prio", prio, *match)


def _tc(node: Node, what: str, *words: str) -> None:
    if shutil.which("tc") is None:
        raise BenchFailedError("a network of a certain rate takes iproute2's program `tc`")
    _run("tc", "-n", node.namespace, what, "add", "dev", INTERFACE, *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise BenchFailedError(f"network namespaces cannot be made here: {done.stderr.strip()}")


def sent_bytes() -> int:
    """Returns the bytes that this node has sent to the other node, including headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0
