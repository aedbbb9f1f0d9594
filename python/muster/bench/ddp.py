"""Training steps under data parallelism: the cost of communication, on one host or between two."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from muster.bench.ddp_models import MODELS
from muster.bench.ddp_training import FLOAT32
from muster.bench.namespaces import INTERFACE, check_rate, two_nodes
from muster.bench.ranks import RankSetup, run_ranks
from muster.bench.report import Row, parse_names

SUMMARY = "training steps with muster's DDP, against torch's over gloo, and torch's over muster's backend"
PEERS: tuple[str, ...] = ("gloo",)
PARTS = ("steps", "alone", "memory")
VARIANTS = ("muster", "stock", "gloo")
REPLICAS = ("DP", "torch DP")
HOOKS = [("muster", FLOAT32), ("muster", "bf16"), ("muster", "int8"), ("gloo", FLOAT32), ("gloo", "fp16")]
# The share of the gradients' bytes that each of two ranks sends; int8 has a scale for each 256 elements.
_SENT = {FLOAT32: 1.0, "bf16": 0.5, "fp16": 0.5, "int8": (1 + 4 / 256) / 4}
# Exposed communication is a difference of two times; below this it is noise.
_MIN_EXPOSED = 1e-4
# Keeps freed memory in the process. By default glibc returns most of it to the system. Page faults then take a tenth of
# a step, in a variant that depends on the memory that the previous variant freed.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_HERE = RankSetup([], {"GLOO_SOCKET_IFNAME": "lo", **_KEEP_MEMORY})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", help=f"some of: {', '.join(MODELS)} (default: all but tiny; with --network mlp, which sends most)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="steps, alone (1 rank), memory (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each (default: %(default)s)")
    parser.add_argument("--network", action="store_true", help="instead: between two network namespaces, with hooks")
    parser.add_argument("--rate", default="1gbit", help="of that network, as tc writes it (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    if arguments.ranks < 2:
        raise ValueError(f"--ranks takes a number from 2 on; not {arguments.ranks}")
    check_rate("--rate", arguments.rate)
    parts = ["network"] if arguments.network else parse_names("--parts", arguments.parts, PARTS)
    models = arguments.models or ("mlp" if arguments.network else ",".join(name for name in MODELS if name != "tiny"))
    for model in parse_names("--models", models, MODELS):
        for part in parts:
            yield from _RUNS[part](arguments, model)


def _measured(arguments: argparse.Namespace, setups: list[RankSetup], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of rank 0."""
    options = {"variants": VARIANTS, "rounds": 5 if arguments.quick else 21, "timeout": arguments.timeout, **options}
    (result,) = run_ranks("ddp_training", setups, options, arguments.timeout)
    return result


def _steps(arguments: argparse.Namespace, model: str) -> Iterator[Row]:
    result = _measured(arguments, [_HERE] * arguments.ranks, {"part": "steps", "model": model})
    replicas = {"part": "replicas", "model": model, "variants": REPLICAS, "replicas": arguments.ranks}
    # Without accelerators: with one, torch's DataParallel refuses a model on the CPU.
    in_threads = _measured(arguments, [RankSetup([], {"CUDA_VISIBLE_DEVICES": "", **_KEEP_MEMORY})], replicas)
    steps = result["step"] | in_threads["step"]
    milliseconds = {variant: 1e3 * seconds for variant, seconds in steps.items()}
    yield _row(model, arguments.ranks, result["bytes"], "step", "ms", milliseconds, milliseconds["bare"])
    exposed = {variant: 1e3 * max(seconds, _MIN_EXPOSED) for variant, seconds in result["exposed"].items()}
    yield _row(model, arguments.ranks, result["bytes"], "exposed", "ms", exposed, 1e3 * result["copy"])


def _alone(arguments: argparse.Namespace, model: str) -> Iterator[Row]:
    result = _measured(arguments, [_HERE], {"part": "alone", "model": model})
    percent = {variant: 100 * share for variant, share in result["overhead"].items()}
    yield dataclasses.replace(_row(model, 1, 0, "overhead", "%", percent, 0), ratio=0)


def _memory(arguments: argparse.Namespace, model: str) -> Iterator[Row]:
    """Runs each variant in its own processes."""
    peak = {}
    for variant in VARIANTS:
        options = {"part": "memory", "model": model, "variants": [variant]}
        result = _measured(arguments, [RankSetup()] * arguments.ranks, options)
        peak[variant] = result["peak"] / 2**20
    yield _row(model, arguments.ranks, result["bytes"], "peak memory", "MiB", peak, result["base"] / 2**20)


def _network(arguments: argparse.Namespace, model: str) -> Iterator[Row]:
    with two_nodes(arguments.rate) as nodes:
        setups = [RankSetup(node.prefix, {"GLOO_SOCKET_IFNAME": INTERFACE, **_KEEP_MEMORY}) for node in nodes]
        result = _measured(arguments, setups, {"part": "hooks", "model": model, "hooks": HOOKS})
    steps, size = result["step"], result["bytes"]
    floors = {hook: max(steps["bare"], share * wire_time(size, arguments.rate)) for hook, share in _SENT.items()}
    for hook in dict.fromkeys(hook for _, hook in HOOKS):
        seconds = {variant: steps.get(f"{variant} {hook}", 0) for variant in ("muster", "gloo")}
        milliseconds = {variant: 1e3 * each for variant, each in seconds.items()}
        yield _row(f"{model}, {hook}", 2, size, f"step at {arguments.rate}", "ms", milliseconds, 1e3 * floors[hook])
        if hook != FLOAT32:
            gains = {variant: steps[f"{variant} {FLOAT32}"] / each if each else 0 for variant, each in seconds.items()}
            most = floors[FLOAT32] / floors[hook]
            yield dataclasses.replace(_row(f"{model}, {hook}", 2, size, "against float32", "x", gains, most), ratio=0)


# Of Ethernet: 1,448 bytes of TCP in a frame of 1,514 bytes.
_FRAMES = 1514 / 1448


def wire_time(size: int, rate: str) -> float:
    """Returns the seconds in which a node sends `size` bytes and their headers; 0 for a rate that is not in bits."""
    if not (match := re.fullmatch(r"([0-9.]+)([kmgt]?)bit", rate.lower())):
        return 0.0
    return _FRAMES * 8 * size / (float(match[1]) * 1e3 ** " kmgt".index(match[2] or " "))


_RUNS = {"steps": _steps, "alone": _alone, "memory": _memory, "network": _network}


def _row(case: str, ranks: int, size: int, metric: str, unit: str, figures: dict[str, float], floor: float) -> Row:
    also = {variant: figures[variant] for variant in ("stock", *REPLICAS) if variant in figures}
    both = figures["muster"], figures["gloo"]
    return Row("ddp", case, ranks, metric, unit, *both, "gloo", floor, bytes=size, also=also)
