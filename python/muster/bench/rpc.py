"""muster bench rpc: calls between processes: from C++ beside gRPC and raw sockets, from Python beside TensorPipe."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator

from muster._programs import find_beside, find_program
from muster.bench.report import BenchFailedError, Row

SUMMARY = "remote calls between processes of this host: from C++ against gRPC, from Python against TensorPipe"
PEERS: tuple[str, ...] = ("grpc", "tensorpipe")
PROGRAM = "muster-rpc-load"
AUTOGRAD_PROGRAM = "muster-rpc-autograd-load"  # needs libtorch; wheels do not have it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transports", default="shm,tcp", help="best first, of shm, unix and tcp (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each case as it is measured. gRPC is left out if it was not found when muster was built."""
    try:
        program = find_program(PROGRAM)
    except FileNotFoundError as error:
        raise BenchFailedError(str(error)) from None
    options = ["--transports", arguments.transports, *(["--quick"] if arguments.quick else [])]
    floors: dict[str, float] = {}
    for row in _rows([program, *options]):
        floors[row.case] = row.floor
        yield row
    if autograd_program := find_beside(AUTOGRAD_PROGRAM):
        yield from _rows([autograd_program, *options])
    from muster.bench.rpc_python import SMALL_MESSAGES, python_rows

    floors |= dict.fromkeys(SMALL_MESSAGES, floors.get("tiny call", 0.0))
    for row in python_rows(arguments.quick):
        row.floor = floors.get(row.case.removeprefix("Python: "), 0.0)
        yield row


def _rows(command: list[str]) -> Iterator[Row]:
    """The rows of a program, as it prints them."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as load:
        assert load.stdout is not None and load.stderr is not None
        for line in load.stdout:
            yield _row(json.loads(line))
        errors = load.stderr.read().strip()
    if load.returncode != 0:
        raise BenchFailedError(errors or f"{command[0]} ended with status {load.returncode}")


def _row(figures: dict[str, str | float]) -> Row:
    """The row of a case: with less time or memory, or more calls in a second, muster is better."""
    muster, grpc = float(figures["muster"]), float(figures.get("grpc", 0))
    unit = str(figures["unit"])
    rate = unit == "1/s"
    return Row(
        "rpc",
        str(figures["case"]),
        int(figures.get("ranks", 2)),
        {"1/s": "rate", "us": "round trip", "KiB": "memory"}.get(unit, "time"),
        unit,
        muster,
        grpc,
        "gRPC",
        floor=float(figures.get("floor", 0)),
        ratio=muster / grpc if rate and grpc else 0.0 if not grpc else -1.0,
        note="" if grpc else str(figures.get("note", "gRPC was not found when muster was built")),
    )
