"""Collectives between two nodes (network namespaces with a veth pair), and the bytes that they send."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from muster.bench import measuring
from muster.bench.collectives import common_options, note_of
from muster.bench.groups import Groups
from muster.bench.loading import Figures
from muster.bench.memory import make_tensors
from muster.bench.namespaces import INTERFACE, check_rate, sent_bytes, two_nodes
from muster.bench.operations import OPERATIONS
from muster.bench.ranks import RankSetup, run_ranks
from muster.bench.report import Row, bus_bandwidth, format_size, parse_numbers, parse_size

SUMMARY = "collectives between two network namespaces, against gloo over TCP, and the bytes that cross"
PEERS: tuple[str, ...] = ("gloo",)

_COUNTED_CALLS = 8
# The smallest number of bytes that the busier of 2 nodes must send, as a share of the message, if each node has `local`
# ranks and each rank holds the message. Each node reduces before it sends and copies after it receives.
_CROSSING: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda local: 1.0,
    "reduce": lambda local: 1.0,
    "broadcast": lambda local: 1.0,
    "all_gather_into_tensor": lambda local: 0.5,
    "gather": lambda local: 0.5,
    "scatter": lambda local: 0.5,
    "reduce_scatter_tensor": lambda local: 0.5,
    "all_to_all_single": lambda local: local / 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default="all_reduce,all_gather_into_tensor,reduce_scatter_tensor,broadcast,send_recv")
    parser.add_argument("--sizes", default="8,1Ki,64Ki,1Mi,16Mi", help="bytes of a message (default: %(default)s)")
    parser.add_argument("--crossing", default="64Ki,1Mi,16Mi", help="sizes whose bytes are counted (%(default)s)")
    parser.add_argument("--connection-rate", metavar="RATE", default="", help="of each connection, as tc has it: 1gbit")
    parser.add_argument("--streams", default="1", metavar="N,...", help="muster's connections between two ranks (1)")
    parser.add_argument("--local", default="1,2", metavar="N,...", help="ranks of each node (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields times and then sent bytes, for each number of ranks per node."""
    crossing = [parse_size(text) for text in arguments.crossing.split(",")] if arguments.crossing else []
    options = common_options(arguments) | {"crossing": crossing}
    numbers = (
        parse_numbers("--local", arguments.local, 1, 1024),
        parse_numbers("--streams", arguments.streams, 1, 16),
    )
    if arguments.connection_rate:
        check_rate("--connection-rate", arguments.connection_rate)
    for local, streams in itertools.product(*numbers):
        with two_nodes(connection_rate=arguments.connection_rate) as nodes:
            environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "MUSTER_TCP_STREAMS": str(streams)}
            setups = [RankSetup(node.prefix, environment) for node in nodes for _ in range(local)]
            options["local"] = local
            where = f"2 nodes of {local}" + (f", {streams} streams" if streams > 1 else "")
            for result in run_ranks("network", setups, options, arguments.timeout):
                yield (_bytes_row if "sent" in result else _time_row)(local, where, arguments.vs, result)


def _time_row(local: int, where: str, peer: str, result: dict[str, Any]) -> Row:
    microseconds = {variant: 1e6 * seconds for variant, seconds in result["seconds"].items()}
    row = _row(local, where, peer, result, ("time", "us"), microseconds, microseconds.get("floor", 0.0))
    row.busbw = bus_bandwidth(row.bytes, OPERATIONS[result["op"]].bus(row.ranks), row.muster)
    return row


def _bytes_row(local: int, where: str, peer: str, result: dict[str, Any]) -> Row:
    sent = {variant: count / 1024 for variant, count in result["sent"].items()}
    bound = result["bytes"] * _CROSSING[result["op"]](local)
    return _row(local, where, peer, result, ("sent across", "KiB"), sent, bound / 1024)


def _row(
    local: int, where: str, peer: str, result: dict[str, Any], metric: tuple[str, str], figures: Figures, floor: float
) -> Row:
    case = f"{result['op']}, {format_size(result['bytes'])}, {where}"
    both = figures.get("muster", 0.0), figures.get(peer, 0.0)
    return Row("network", case, 2 * local, *metric, *both, peer, floor, bytes=result["bytes"], note=note_of(result))


def measure(groups: Groups, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields times and then bytes."""
    yield from measuring.measure(groups, options)
    for name in options["ops"]:
        for size in options["crossing"] if name in _CROSSING else []:
            yield _count(groups, name, size, options)


def _count(groups: Groups, name: str, size: int, options: dict[str, Any]) -> dict[str, Any]:
    operation = OPERATIONS[name]
    like = measuring.shapes(operation, size, torch.float32)
    tensors = make_tensors(operation, like, 1)[0]
    sent, notes = {}, {}
    for variant in ("muster", options["peer"]):
        call = operation.call(tensors, groups[variant])
        if reason := measuring.agreed(measuring.failure(operation, tensors, call)):
            notes[variant] = reason
            groups.recreate(variant)
            continue
        dist.barrier()
        before = sent_bytes()
        for _ in range(_COUNTED_CALLS):
            call()
        dist.barrier()  # after this, the other ranks of this node have sent their bytes
        counted = torch.tensor([sent_bytes() - before])
        dist.all_reduce(counted, op=dist.ReduceOp.MAX)
        sent[variant] = int(counted) / _COUNTED_CALLS
    return {"op": name, "bytes": max(like.input.nbytes, like.output.nbytes), "sent": sent, "notes": notes}
