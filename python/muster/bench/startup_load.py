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
        peer = _workers(stock, None, stock, workers, exchange, arguments.timeout)
    secret = secrets.token_hex(32)
    with muster_server(secret=secret) as root:
        direct = _workers(root, root, root, workers, exchange, arguments.timeout, secret)
    with _tiers(workers, secret) as (root, proxies):
        tiers = _workers(proxies, root, root, workers, exchange, arguments.timeout, secret)
    case = f"start-up, {_EXCHANGES[exchange]}"
    yield from _rows(f"{case}, tiers", workers, tiers, peer)
    yield from _rows(f"{case}, no tiers", workers, direct, peer)


@contextlib.contextmanager
def _tiers(workers: int, secret: str) -> Iterator[tuple[Server, Server]]:
    """Runs the tiers that a job of this size has by default."""
    nodes = -(-workers // _PER_NODE)
    with contextlib.ExitStack() as stack:
        above = root = stack.enter_context(muster_server(secret=secret))
        if nodes > _MANY_NODES:
            above = stack.enter_context(_proxies(root, -(-nodes // _fanout(nodes)), secret))
        yield root, stack.enter_context(_proxies(above, nodes, secret))


def _fanout(nodes: int) -> int:
    """Returns the fanout of `--store-fanout auto` for large jobs."""
    return math.ceil(math.sqrt(nodes))


def _proxies(above: Server, count: int, secret: str) -> contextlib.AbstractContextManager[Server]:
    return muster_server("--upstream", ",".join(above.urls), "--count", str(count), secret=secret)


def _workers(
    asked: Server, stat: Server | None, root: Server, workers: int, exchange: str, timeout: float, secret: str = ""
) -> Figures:
    """Runs workers that use PyTorch's protocol with `asked`. A load has no agents, because its proxies have none."""
    words = ["startup", "--servers", ",".join(asked.addresses), "--pid", str(root.pid), "--timeout", str(timeout)]
    words += ["--workers", str(workers), "--workers-per-node", str(_PER_NODE), "--exchange", exchange]
    words += ["--no-agents"] if exchange == _LOAD_EXCHANGE else []
    return load(words + (["--root", stat.urls[0]] if stat else []), secret)


def _load_root(workers: int, arguments: argparse.Namespace) -> Iterator[Row]:
    case = "load, ring and tree"
    peer: Figures = {}
    try:
        with torch_server() as stock:
            peer = _workers(stock, None, stock, workers, _LOAD_EXCHANGE, arguments.timeout)
    except BenchFailedError as error:
        print(f"note: {workers:,} workers by themselves and torch's server: {error}", file=sys.stderr)
    secret = secrets.token_hex(32)
    with muster_server(secret=secret) as root:
        yield from _rows(f"{case}, tiers", workers, _behind(root, root.urls, workers, arguments.timeout, secret), peer)
    nodes = -(-workers // _PER_NODE)
    if fanout := _fanout(nodes) if arguments.fanout is None else arguments.fanout:
        middles = -(-nodes // fanout)
        with muster_server(secret=secret) as root, _proxies(root, middles, secret) as middle:
            figures = _behind(root, middle.urls, workers, arguments.timeout, secret)
            yield from _rows(f"{case}, middle tier", workers, figures, peer)
    try:
        with muster_server(secret=secret) as root:
            direct = _workers(root, root, root, workers, _LOAD_EXCHANGE, arguments.timeout, secret)
    except BenchFailedError as error:
        print(f"note: {workers:,} workers by themselves and muster's server: {error}", file=sys.stderr)
    else:
        yield from _rows(f"{case}, no tiers", workers, direct, peer)


def _behind(root: Server, urls: list[str], workers: int, timeout: float, secret: str) -> Figures:
    """Runs simulated workers behind real proxies of the servers at `urls`."""
    words = ["storm", "--urls", ",".join(urls), "--root", root.urls[0], "--pid", str(root.pid)]
    words += ["--workers", str(workers), "--workers-per-node", str(_PER_NODE), "--exchange", _LOAD_EXCHANGE]
    return load([*words, "--timeout", str(timeout)], secret)


def _rows(case: str, workers: int, muster: Figures, peer: Figures) -> Iterator[Row]:
    for name, metric in _METRICS.items():
        if name in muster:
            yield row_beside_torch("startup-load", case, workers, metric, muster[name], peer.get(name, 0))
