"""Compiled graphs with collectives: how much of the communication the ranks hide behind computing."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from muster.bench.ddp import wire_time
from muster.bench.jobs import running
from muster.bench.namespaces import INTERFACE, check_rate, two_nodes
from muster.bench.ranks import RankSetup, run_ranks
from muster.bench.report import ALSO, Row, parse_names, parse_numbers
from muster.bench.timing import find_repeats

SUMMARY = "compiled graphs with collectives, against Inductor's order and torch's own passes"
PEERS: tuple[str, ...] = ("gloo",)
# A compiler, and a backend of torch.distributed. inductor: its default order; passes: torch's reorder and sink passes.
OURS, THEIRS = "muster muster", "inductor gloo"
PACKAGE = "package muster"
OTHERS = tuple(name for name in ALSO["graph"] if name != "whole")
PARTS = ("small", "calls", "norms", "perceptron", "decoder", "gather", "blocks", "compile", "ddp", "layouts")
_WITH_SIDES = "gather, blocks, compile and ddp"  # which, like layouts, are over a network
# Of part layouts: a kind of model, and how it is split among the ranks.
MODELS = (
    "perceptron-data",
    "perceptron-sharded",
    "perceptron-tensor",
    "transformer-data",
    "transformer-sharded",
    "transformer-tensor",
    "transformer-sequence",
    "transformer-context",
    "convolutions-data",
    "experts",
    "tables",
    "words",
)
_MODEL_VARIANTS = (PACKAGE, THEIRS, "inductor muster", "muster gloo", "eager muster", "eager gloo", "bare")
HEAD = 64  # features of an attention head of the decoder
_LAYERS, _SMALL, _DECODER_LAYERS, _BLOCKS, _COMPILED_BLOCKS, _DDP_LAYERS = 8, 32, 4, 4, 16, 4
_CHAINED, _CHAINED_BYTES = 16, 16384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help=f"of {', '.join(PARTS)}; {_WITH_SIDES}, and layouts, are over a network",
    )
    parser.add_argument("--models", default=",".join(MODELS), help="of part layouts (default: %(default)s)")
    parser.add_argument("--ranks", default="2,4", help="of the other parts (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of the network, as tc writes it (default: %(default)s)")
    parser.add_argument(
        "--side", type=int, default=1024, help=f"of the weights of {_WITH_SIDES} (default: %(default)s)"
    )
    parser.add_argument("--width", type=int, default=1024, help="of part decoder (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help=f"of {_WITH_SIDES} (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    check_rate("--rate", arguments.rate)
    ranks = parse_numbers("--ranks", arguments.ranks, 2)
    parts = parse_names("--parts", arguments.parts, PARTS)
    arguments.models = parse_names("--models", arguments.models, MODELS)
    unfit = [count for count in ranks if arguments.width <= 0 or arguments.width % (HEAD * count)]
    if unfit and "decoder" in parts:
        raise ValueError(f"--width takes a multiple of {HEAD * unfit[0]}: each of {unfit[0]} ranks has heads of {HEAD}")
    over_network = {"gather": _gather, "blocks": _blocks, "compile": _compile, "ddp": _ddp, "layouts": _layouts}
    in_memory = {
        "small": _small,
        "calls": _calls,
        "norms": _norms,
        "perceptron": _perceptron,
        "decoder": _decoder,
    }
    for part in parts:
        if part in over_network:
            yield from over_network[part](arguments)
        else:
            for count in ranks:
                yield in_memory[part](arguments, count)


def _steps(
    arguments: argparse.Namespace, setups: list[RankSetup], options: dict[str, Any], module: str = "graph_steps"
) -> dict[str, float]:
    """Milliseconds of a step, by variant."""
    step = _result(arguments, setups, options, module)["step"]
    return {variant: 1e3 * seconds for variant, seconds in step.items()}


def _result(
    arguments: argparse.Namespace, setups: list[RankSetup], options: dict[str, Any], module: str
) -> dict[str, Any]:
    rounds = 3 if arguments.quick else 15
    options = {"variants": [OURS, THEIRS, *OTHERS, "bare"], "rounds": rounds, "timeout": arguments.timeout, **options}
    (result,) = run_ranks(module, setups, options, arguments.timeout)
    return result


def _small(arguments: argparse.Namespace, ranks: int) -> Row:
    """Independent reductions of 256 bytes."""
    steps = _steps(arguments, [RankSetup()] * ranks, {"model": "small", "side": 64, "layers": _SMALL})
    return _row(f"{_SMALL} all_reduces of 256 B", ranks, "step", "ms", 256 * _SMALL, steps, steps["bare"])


def _calls(arguments: argparse.Namespace, ranks: int) -> Row:
    """all_reduces one after the other, each alone. The floor is the same call from C++."""
    steps = _chain_steps(arguments, ranks, norms=False)
    figures = {name: 1e3 * (step - steps["bare"]) / _CHAINED for name, step in steps.items()}
    floor = 1e6 * _call_from_cpp(ranks, arguments)
    return _row("all_reduce of 16 KiB in a package", ranks, "call", "us", _CHAINED_BYTES, figures, floor, PACKAGE)


def _norms(arguments: argparse.Namespace, ranks: int) -> Row:
    """The same, with a sum and an RMSNorm after each. The floor is without these: what a kernel that fuses all three
    could reach at best.
    """
    steps = _chain_steps(arguments, ranks, True, "alone muster")
    figures = {name: 1e3 * step / _CHAINED for name, step in steps.items()}
    case = "all_reduce of 16 KiB, sum and RMSNorm in a package"
    return _row(case, ranks, "each", "us", _CHAINED_BYTES, figures, figures["alone muster"], PACKAGE)


def _chain_steps(arguments: argparse.Namespace, ranks: int, norms: bool, *variants: str) -> dict[str, float]:
    options = {"model": "chain", "width": _CHAINED_BYTES // 4, "chained": _CHAINED, "norms": norms, "calls": 100}
    options["variants"] = [*_MODEL_VARIANTS, *variants]
    return _steps(arguments, [RankSetup()] * ranks, options, "graph_models")


def _call_from_cpp(ranks: int, arguments: argparse.Namespace) -> float:
    """Seconds of an all_reduce."""
    with (
        tempfile.TemporaryDirectory(prefix="muster-bench-") as folder,
        running(["muster"], ranks, Path(folder), arguments.timeout) as jobs,
    ):
        jobs["muster"].ask("prepare", "all_reduce", _CHAINED_BYTES, 1, 1, "ordinary")
        timed = partial(jobs["muster"].time, "run", "all_reduce", _CHAINED_BYTES, 1)
        repeats = find_repeats(timed, 0.03, 1_000_000)
        return statistics.median(timed(repeats) / repeats for _ in range(3 if arguments.quick else 15))


def _perceptron(arguments: argparse.Namespace, ranks: int) -> Row:
    """Compiled ahead of time, one all_reduce of 512 bytes."""
    options = {"model": "perceptron", "width": 128, "calls": 200, "variants": _MODEL_VARIANTS}
    steps = _steps(arguments, [RankSetup()] * ranks, options, "graph_models")
    figures = {name: 1e3 * step for name, step in steps.items()}
    return _row("perceptron in a package", ranks, "step", "us", 512, figures, figures["bare"], PACKAGE)


def _decoder(arguments: argparse.Namespace, ranks: int) -> Row:
    """Compiled ahead of time, one token at a time. "whole" is one rank alone with the whole model."""
    options = {"model": "decoder", "width": arguments.width, "head": HEAD, "layers": _DECODER_LAYERS, "calls": 10}
    variants = {"variants": [*_MODEL_VARIANTS, "whole"]}
    steps = _steps(arguments, [RankSetup()] * ranks, options | variants, "graph_models")
    rates = {name: 1e3 / step for name, step in steps.items()}
    case = f"decoder of width {arguments.width} in a package"
    row = _row(case, ranks, "tokens", "1/s", 4 * arguments.width, rates, rates["bare"], PACKAGE)
    row.ratio = row.muster / row.peer
    return row


def _gather(arguments: argparse.Namespace) -> list[Row]:
    """Layers whose weights are spread over two ranks, one on each side of the network: gather, wait, multiply."""
    size = _LAYERS * arguments.side**2 * 4
    options = {"model": "gather", "side": arguments.side, "batch": arguments.batch, "layers": _LAYERS}
    steps = _steps_over_network(arguments, options | {"sent": size // 2})  # a rank sends its half
    return gather_rows(steps, size, arguments.rate)


def gather_rows(steps: dict[str, float], size: int, rate: str) -> list[Row]:
    """The time of a step, and how much of the network's time is hidden, unless nothing can be.

    `steps` has the milliseconds of each variant. A rank sends half of `size` bytes at `rate`.
    """
    wire = 1e3 * wire_time(size // 2, rate)
    both = steps["bare"] + wire
    # Nothing hides the first gather, and nothing is left to send while the last layer multiplies.
    floor = max(steps["bare"] + wire / _LAYERS, wire + steps["bare"] / _LAYERS, steps["overlapped"])
    case = f"{_LAYERS} layers, gather and multiply"
    rows = [_row(case, 2, f"step at {rate}", "ms", size, steps, floor)]
    if floor < both:
        hidden = {each: 100 * (both - step) / (both - floor) for each, step in steps.items()}
        rows.append(_row(case, 2, "hidden of what can be", "%", size, hidden, 100.0))
        rows[-1].ratio = 0
    return rows


def _blocks(arguments: argparse.Namespace) -> Iterator[Row]:
    """Blocks of two products in tensor-parallel parts, with gathered and scattered rows, over a network."""
    size = 2 * _BLOCKS * arguments.batch * arguments.side * 4
    options = {"model": "blocks", "side": arguments.side, "batch": arguments.batch, "layers": _BLOCKS}
    steps = _steps_over_network(arguments, options | {"sent": size // 2})
    case = f"{_BLOCKS} tensor-parallel blocks"
    yield _row(case, 2, f"step at {arguments.rate}", "ms", size, steps, steps["overlapped"])


def _compile(arguments: argparse.Namespace) -> Iterator[Row]:
    """The time to compile more of these blocks, with their C++ kernels in the cache."""
    options = {"side": arguments.side, "batch": arguments.batch, "layers": _COMPILED_BLOCKS, "model": "blocks"}
    variants = {"variants": [OURS, THEIRS, "inductor muster", "muster gloo"]}
    with _network(arguments) as setups:
        seconds = _result(arguments, setups, options | variants, "graph_compile")["compile"]
    yield _row(f"{_COMPILED_BLOCKS} tensor-parallel blocks", 2, "compile", "s", 0, seconds, 0)


def _ddp(arguments: argparse.Namespace) -> Iterator[Row]:
    """Two ranks, one on each side of the network, train a perceptron."""
    variants = (OURS, THEIRS, "inductor muster", "eager muster", "eager gloo", "bare")
    size = _DDP_LAYERS * (arguments.side**2 + arguments.side) * 4
    options = {"side": arguments.side, "batch": arguments.batch, "layers": _DDP_LAYERS, "variants": variants}
    steps = _steps_over_network(arguments, options | {"sent": size}, "graph_training")
    case = f"DDP, {_DDP_LAYERS} layers"
    yield _row(case, 2, f"step at {arguments.rate}", "ms", size, steps, steps["overlapped"])


def _layouts(arguments: argparse.Namespace) -> Iterator[Row]:
    """Models of several kinds, split among two ranks in the usual ways, forward and backward."""
    variants = (OURS, THEIRS, "inductor muster", "passes muster", "eager muster", "bare")
    for model in arguments.models:
        with _network(arguments) as setups:
            result = _result(arguments, setups, {"model": model, "variants": variants}, "graph_layouts")
        steps = {variant: 1e3 * seconds for variant, seconds in result["step"].items()}
        yield _row(model, 2, f"step at {arguments.rate}", "ms", result["sent"], steps, steps["overlapped"])


def _steps_over_network(
    arguments: argparse.Namespace, options: dict[str, Any], module: str = "graph_steps"
) -> dict[str, float]:
    with _network(arguments) as setups:
        return _steps(arguments, setups, options, module)


@contextlib.contextmanager
def _network(arguments: argparse.Namespace) -> Iterator[list[RankSetup]]:
    """Of two ranks, one on each side."""
    with two_nodes(arguments.rate) as nodes:
        yield [RankSetup(node.prefix, {"GLOO_SOCKET_IFNAME": INTERFACE}) for node in nodes]


def _row(
    case: str, ranks: int, metric: str, unit: str, size: int, figures: dict[str, float], floor: float, ours: str = OURS
) -> Row:
    also = {name: figures[name] for name in ALSO["graph"] if name in figures}
    return Row("graph", case, ranks, metric, unit, figures[ours], figures[THEIRS], "gloo", floor, bytes=size, also=also)
