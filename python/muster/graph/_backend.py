"""The backend "muster" of torch.compile: Inductor, with a planned order of collectives."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.fx
from torch.distributed import distributed_c10d as c10d

from muster import errors as muster_errors
from muster.graph._plan import NAMESPACES
from muster.graph._plan.agreement import Call, Digest, agree, compare
from muster.graph._plan.costs import Costs, costs_of, unknown_costs
from muster.graph._plan.saved import source_of

# In Inductor's code: torch.ops.NAMESPACE.OPERATOR.default(BUFFER, ..., 'GROUP')
_CALL = re.compile(rf"torch\.ops\.(?:{'|'.join(NAMESPACES)})\.(\w+)\.\w+\((.*)\)$", re.MULTILINE)
_GROUP = re.compile(r"'([^']*)'[^']*$")
_MESSAGES = ("exchange", "isend", "irecv", "batch_p2p_ops")  # of two ranks: the others of the group need not compile
# Of these operators, a rank's tensor may have another size than those of other ranks.
_UNEVEN = ("all_gather_uneven", "reduce_scatter_uneven", "all_to_all_single", "scatter")

_RUNS_EAGERLY = (
    "muster: compiling failed, but the model was traced without an error, so it should run eagerly: set "
    "TORCH_COMPILE_DISABLE=1 at all ranks"
)


@dataclass(frozen=True)
class Config:
    """Options of the backend.

    Attributes:
        overlap: begin collectives early, and wait for them late. Without it the order is Inductor's.
        buckets: merge small collectives that do not need each other.
        chunks: cut a product and the collective beside it by rows, and split a product by columns, where one part is
            then sent while another one is computed. It needs overlap.
        max_bytes: results of collectives that begin early may take so much memory more, in bytes.
        timeout: how long a rank waits for the others to compile the same graph.
        plans: a folder. The first rank of the graph's first group saves the plan of each graph there, and compiles it
            anew instead of taking it from Inductor's cache. `muster explain graph` shows such a plan. The default is
            MUSTER_GRAPH_PLANS of the environment.
    """

    overlap: bool = True
    buckets: bool = True
    chunks: bool = True
    max_bytes: float = 1 << 30
    timeout: timedelta = timedelta(minutes=5)
    plans: str | os.PathLike[str] | None = None


def backend(config: Config | None = None) -> Callable[..., Any]:
    """A backend for torch.compile with these options: `torch.compile(model, backend=muster.graph.backend(config))`.

    All ranks of a group must compile the same collectives. They compare them while they compile: MismatchError and
    TimeoutError of muster say what differs. Rank 0's measurements are used by all.
    """
    return functools.partial(_compile, config=config or Config())


def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """torch.compile(backend="muster") calls this."""
    return _compile(module, inputs, config=Config())


def _compile(module: torch.fx.GraphModule, inputs: list[Any], *, config: Config) -> Any:
    from torch._dynamo.exc import TorchDynamoException
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def compile_planned(graph: torch.fx.GraphModule, *arguments: Any, **named: Any) -> Any:
        """Compiles a forward or a backward. Only here have DTensors become the collectives that they stand for."""
        groups = groups_of(graph)
        if not groups:
            return compile_fx_inner(graph, *arguments, **named)
        compared = _with_collectives(groups, collectives_of(graph))  # Inductor will change the graph
        with inductor_config.patch(options_of(groups, config, graph)):
            compiled = compile_fx_inner(graph, *arguments, **named)
        # The order, too: Inductor might fuse other kernels, where graphs differ in numbers. C++ code has no calls that
        # are found here.
        agree(compared, _calls_of(getattr(compiled, "source_code", "")), config.timeout)
        return compiled

    try:
        # A rank that finds the graph in this cache would not compare it with the others. Backward makes views again
        # from what they view, so the mask of a ReLU need not be saved beside its result: it is slow to store.
        with functorch_config.patch(enable_autograd_cache=False, recompute_views=True):
            return compile_fx(module, inputs, inner_compile=compile_planned)
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        # Dynamo catches some of its own, to trace in another way.
        if isinstance(cause, (muster_errors.Error, TorchDynamoException)):
            raise  # ranks that do not fit together would not do so eagerly either
        raise RuntimeError(f"{error}\n{_RUNS_EAGERLY}") from error


def _digest(graph: torch.fx.GraphModule, groups: list[Any]) -> Digest:
    """Of all that the plan depends on, except the costs. Numbers among the arguments may differ by rank."""
    from muster.graph._plan.graph_tasks import number, tensors_of

    nodes = [node for part in _parts(graph) for node in part.graph.nodes]
    places = {node: place for place, node in enumerate(nodes)}
    names = {group.group_name: number for number, group in enumerate(groups)}
    operators, sizes = [str([group.size() for group in groups])], []
    for node in nodes:
        inputs = [places[each] for each in node.all_input_nodes]
        used = [names[each] for each in node.args if isinstance(each, str) and each in names]
        tensors = tensors_of(node.meta.get("val"))
        target = node._pretty_print_target(node.target)  # of a function, without its address
        operators.append(f"{target} {inputs} {used} {[each.dtype for each in tensors]}")
        sizes.append(str([[number(size) for size in each.shape] for each in tensors]))
    return Digest(*(hashlib.sha256("\n".join(lines).encode()).hexdigest() for lines in (operators, sizes)))


def options_of(groups: list[Any], config: Config, graph: torch.fx.GraphModule) -> dict[str, Any]:
    """Of Inductor, for a graph that uses these groups. All ranks of those that have collectives must call it: they
    compare their graphs. Raises as agree() does.

    Groups that only send messages are not compared, because their other ranks may compile nothing. A graph with
    messages keeps its order, and nothing is merged: a rank that waits for a message before it sends its own might wait
    forever.

    What ranks decide must be equal. If their graphs differ in operators, nothing is merged, and collectives begin in
    the order of the program; if only sizes differ, as in uneven parts, only the order is kept.
    """
    from torch._dispatch.python import no_python_dispatcher
    from torch._inductor import config as inductor_config
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    calls = collectives_of(graph)
    compared = _with_collectives(groups, calls)
    same_operators = same_sizes = False
    if compared:
        same_operators, same_sizes = compare(compared, _digest(graph, groups), calls, config.timeout)
    has_messages = any(_call(node) is None for _, node in _group_calls(graph))
    keeps_order = not same_sizes or has_messages
    # The compiler's tensors have no data, and what is measured needs some. Its dispatcher keeps the GIL in collectives,
    # and Gloo's threads take the GIL with Gloo's mutex held, to drop tensors: a deadlock.
    with unset_fake_temporarily(), no_python_dispatcher():
        costs = costs_of(compared) if same_operators else unknown_costs(compared)
    costs = dataclasses.replace(costs, links=unknown_costs(groups).links | costs.links)
    overlap = config.overlap and not getattr(inductor_config, "deterministic", False)  # Inductor would skip the order
    rewrite = _rewriting(
        costs, config, merges=config.buckets and same_operators and not has_messages, plans=overlap and not keeps_order
    )
    # Inductor would move a wait behind a collective that then reduces in place what the pending one still reads.
    options: dict[str, Any] = {"post_grad_custom_post_pass": rewrite, "reorder_for_locality": False}
    if overlap:
        folder = os.fspath(config.plans or os.environ.get("MUSTER_GRAPH_PLANS", ""))
        if folder and groups[0].rank() != 0:
            folder = ""
        if folder:
            options["force_disable_caches"] = True  # a graph from the cache has no plan
        options["reorder_for_compute_comm_overlap"] = True
        options["reorder_for_compute_comm_overlap_passes"] = [Reorder(costs, config.max_bytes, keeps_order, folder)]
        if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):  # torch >= 2.15
            options["aten_distributed_optimizations.enable_simple_overlap"] = False  # it would change the plan
    return options


def _rewriting(costs: Costs, config: Config, merges: bool, plans: bool) -> Any:
    """A pass over Inductor's graph. plans: the order of Inductor will not be kept."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from muster.graph._rewrite.bucket_choice import merge_best
    from muster.graph._rewrite.chunk_choice import cut_best
    from muster.graph._rewrite.columns import split_best
    from muster.graph._rewrite.nodes import keep_inputs
    from muster.graph._rewrite.simplify import simplify

    class Rewrite(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            simplify(graph)
            if config.chunks and plans:
                cut_best(graph, costs, config.max_bytes)
                split_best(graph, costs, config.max_bytes)
            if merges:
                merge_best(graph, costs, config.max_bytes if plans else None)
            keep_inputs(graph)

        def uuid(self) -> Any:
            return "muster.graph", _version(), repr(costs), config.chunks, merges, plans, config.max_bytes

    return Rewrite()


class Reorder:
    """A pass of Inductor's scheduler. It holds what the plan depends on, because it is part of the key of the cache."""

    def __init__(self, costs: Costs, max_bytes: float, keeps_order: bool, folder: str):
        self._costs = costs
        self._max_bytes = max_bytes
        self._keeps_order = keeps_order
        self._folder = folder
        self._version = _version()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from muster.graph._plan.inductor import reorder

        return reorder(nodes, self._costs, self._max_bytes, self._keeps_order, self._folder)


@functools.cache
def _version() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def groups_of(module: torch.fx.GraphModule) -> list[Any]:
    """The groups of the graph's collectives and messages, in the order of their first call."""
    names = dict.fromkeys(name for name, _ in _group_calls(module))
    return [c10d._resolve_process_group(name) for name in names]  # type: ignore[arg-type]


def _with_collectives(groups: list[Any], calls: dict[str, list[Call]]) -> list[Any]:
    return [group for group in groups if group.group_name in calls]


def collectives_of(module: torch.fx.GraphModule) -> dict[str, list[Call]]:
    """The collectives of the graph, by group, without messages, which differ by rank."""
    calls: dict[str, list[Call]] = {}
    for name, node in _group_calls(module):
        call = _call(node)
        if call is not None:
            calls.setdefault(name, []).append(call)
    return calls


def _call(node: torch.fx.Node) -> Call | None:
    from muster.graph._plan.graph_tasks import number, tensors_of

    operator = str(node.target).split(".")[1].rstrip("_")
    if operator in _MESSAGES:
        return None
    tensors = tensors_of(torch.fx.node.map_arg(node.args[0], lambda each: each.meta.get("val")))
    shapes = [[int(number(size)) for size in each.shape] for each in tensors]
    # The group's name is the last text, and the operation of a reduction the one before.
    operations = [each for each in node.args if isinstance(each, str)][:-1]
    count = [] if operator in _UNEVEN else [str(sum(map(math.prod, shapes)))]
    dtypes = dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors)
    source = source_of(node.meta.get("stack_trace"))
    details = ", ".join([*map(str, shapes), *([f"at {source}"] if source else [])])
    return Call(" ".join([operator, *operations, "of", *count, *dtypes]), f"({details})")


def _group_calls(module: torch.fx.GraphModule) -> Iterator[tuple[str, torch.fx.Node]]:
    """The nodes that use a group, each with the group's name."""
    for part in _parts(module):
        for node in part.graph.nodes:
            if node.op == "call_function" and str(node.target).partition(".")[0] in NAMESPACES:
                arguments = reversed([*node.args, *node.kwargs.values()])
                name = next((each for each in arguments if isinstance(each, str) and _is_group(each)), None)
                if name is not None:
                    yield name, node


def _parts(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The graph itself, and those in it, such as the branches of torch.cond."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def _is_group(name: str) -> bool:
    try:
        c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except Exception:
        return False
    return True


def _calls_of(code: str) -> dict[str, list[Call]]:
    """The collectives in Inductor's code, by group, without messages, each with its buffer and its line there. One that
    was merged from several has no line in the program.
    """
    from torch._inductor.codecache import PyCodeCache

    calls: dict[str, list[Call]] = {}
    path = PyCodeCache.write(code)[1]
    for found in _CALL.finditer(code):
        operator, arguments = found.groups()
        group = _GROUP.search(arguments)
        if group is not None and operator not in _MESSAGES:
            buffer, line = arguments.partition(",")[0].lstrip("["), code.count("\n", 0, found.start()) + 1
            details = f"(of {buffer}, at {path}:{line})"
            calls.setdefault(group.group(1), []).append(Call(operator, details))
    return calls
