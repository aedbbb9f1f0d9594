"""The load of a job's start-up on the store's root, with and without the proxies of the nodes."""

from __future__ import annotations

import argparse
import contextlib
import math
import secrets
import sys
from collections.abc import Iterator

from muster.bench.loading import Figures, Metric, load, row_beside_torch
from muster.bench.report import BenchFailedError, Row, parse_numbers
from muster.bench.servers import Server, muster_server, torch_server

SUMMARY = "a job's start-up at the store's root, through tiers and without"
PEERS: tuple[str, ...] = ("tcpstore",)

_PER_NODE = 8
_MANY_NODES = 100  # above this, `--store-fanout auto` has a middle tier
_METRICS = {
    "time": Metric("time", "s"),
    "cpu": Metric("root CPU", "ms", 1e3),
    "messages": Metric("root messages", ""),
    "bytes": Metric("root bytes", "KiB", 1 / 1024),
}
_LOAD_EXCHANGE = "ring"
_EXCHANGES = {"full": "full mesh", "doubling": "peers at powers of 2", "ring": "ring and tree"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="N,...", help="instead of the start-ups' own numbers of workers")
    parser.add_argument("--loads", "--storms", metavar="N,...", help="numbers of simulated workers; 0: none")
    parser.add_argument("--fanout", type=int, metavar="N", help="proxies of a middle one; 0: no middle tier (auto)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields start-ups of real workers, then of simulated ones (loads): over tiers of proxies, and without them."""
    quick = arguments.quick
    full = _numbers("--workers", arguments.workers, [128] if quick else [1024])
    doubling = _numbers("--workers", arguments.workers, [512] if quick else [1024, 4096])
    loads = _numbers("--loads", arguments.loads, [2048] if quick else [2048, 16384, 96000])
    for workers in full:
        yield from _startup(workers, "full", arguments)
    for workers in doubling:
        yield from _startup(workers, "doubling", arguments)
    for workers in loads:
        yield from _load_root(workers, arguments)


def _numbers(option: str, text: str | None, usual: list[int]) -> list[int]:
    if text is None:
        return usual
    return [] if text == "0" else parse_numbers(option, text, 2)


def _startup(workers: int, exchange: str, arguments: argparse.Namespace) -> Iterator[Row]:
    with torch_server() as stock:
        peer = _workers(stock, stock, workers, exchange, arguments.timeout)
    with _root() as root:
        direct = _workers(root, root, workers, exchange, arguments.timeout)
    with _tiers(workers) as (root, proxies):
        tiers = _workers(proxies, root, workers, exchange, arguments.timeout)
    case = f"start-up, {_EXCHANGES[exchange]}"
    yield from _rows(f"{case}, tiers", workers, tiers, peer)
    yield from _rows(f"{case}, no tiers", workers, direct, peer)


def _root() -> contextlib.AbstractContextManager[Server]:
    return muster_server(secret=secrets.token_hex(32))


@contextlib.contextmanager
def _tiers(workers: int) -> Iterator[tuple[Server, Server]]:
    """Runs the tiers that a job of this size has by default."""
    nodes = -(-workers // _PER_NODE)
    with contextlib.ExitStack() as stack:
        above = root = stack.enter_context(_root())
        if nodes > _MANY_NODES:
            above = stack.enter_context(_proxies(root, -(-nodes // _fanout(nodes))))
        yield root, stack.enter_context(_proxies(above, nodes))


def _fanout(nodes: int) -> int:
    """Returns the fanout of `--store-fanout auto` for large jobs."""
    return math.ceil(math.sqrt(nodes))


def _proxies(above: Server, count: int) -> contextlib.AbstractContextManager[Server]:
    return muster_server("--upstream", ",".join(above.urls), "--count", str(count), secret=above.secret)


def _workers(asked: Server, root: Server, workers: int, exchange: str, timeout: float) -> Figures:
    """Runs workers that use PyTorch's protocol with `asked`. A load has no agents, because its proxies have none."""
    words = ["startup", "--servers", ",".join(asked.addresses)]
    words += ["--root", root.urls[0]] if root.urls else []
    words += ["--no-agents"] if exchange == _LOAD_EXCHANGE else []
    return _load(words, root, workers, exchange, timeout)


def _behind(root: Server, above: Server, workers: int, timeout: float) -> Figures:
    """Runs simulated workers behind real proxies of `above`."""
    words = ["storm", "--urls", ",".join(above.urls), "--root", root.urls[0]]
    return _load(words, root, workers, _LOAD_EXCHANGE, timeout)


def _load(words: list[str], root: Server, workers: int, exchange: str, timeout: float) -> Figures:
    words += ["--pid", str(root.pid), "--workers", str(workers), "--workers-per-node", str(_PER_NODE)]
    return load([*words, "--exchange", exchange, "--timeout", str(timeout)], root.secret)


def _load_root(workers: int, arguments: argparse.Namespace) -> Iterator[Row]:
    case = "load, ring and tree"
    peer = _by_themselves("torch's", torch_server(), workers, arguments.timeout)
    with _root() as root:
        yield from _rows(f"{case}, tiers", workers, _behind(root, root, workers, arguments.timeout), peer)
    nodes = -(-workers // _PER_NODE)
    if fanout := _fanout(nodes) if arguments.fanout is None else arguments.fanout:
        with _root() as root, _proxies(root, -(-nodes // fanout)) as middle:
            figures = _behind(root, middle, workers, arguments.timeout)
            yield from _rows(f"{case}, middle tier", workers, figures, peer)
    direct = _by_themselves("muster's", _root(), workers, arguments.timeout)
    yield from _rows(f"{case}, no tiers", workers, direct, peer)


def _by_themselves(
    owner: str, starting: contextlib.AbstractContextManager[Server], workers: int, timeout: float
) -> Figures:
    """Runs simulated workers without proxies. If this fails, prints a note and returns no figures."""
    try:
        with starting as server:
            return _workers(server, server, workers, _LOAD_EXCHANGE, timeout)
    except BenchFailedError as error:
        print(f"note: {workers:,} workers by themselves and {owner} server: {error}", file=sys.stderr)
        return {}


def _rows(case: str, workers: int, muster: Figures, peer: Figures) -> Iterator[Row]:
    for name, metric in _METRICS.items():
        if name in muster:
            yield row_beside_torch("startup-load", case, workers, metric, muster[name], peer.get(name, 0))
