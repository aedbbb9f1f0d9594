"""Calls of other packages that wrap those of torch.distributed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from muster.graph._capture.calls import CALLS
from muster.graph._capture.install import install, substitute

# Packages whose wrappers Dynamo cannot trace: module, and names of functions in it.
_KNOWN = {
    "deepspeed.comm.comm": (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    )
}


def patch(function: Callable[..., Any] | str | None = None, call: str | None = None) -> None:
    """Makes graphs hold the calls of a function that wraps one of torch.distributed. Outside graphs nothing changes.

    Args:
        function: the wrapper, or its name, "package.module.function". Without it, those of known packages that are
            installed: DeepSpeed.
        call: the name of the call in torch.distributed. Default: the function's own name.

    Parameters of the function that torch's call does not have, such as names for a log, are ignored in a graph. What
    the function takes as *args and **kwargs must be arguments of torch's call. Further calls for the same function do
    nothing.

    Raises:
        ValueError: torch.distributed has no such call, or a graph cannot hold it.
    """
    install()
    if function is None:
        for module, names in _KNOWN.items():
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                for name in names:
                    patch(f"{module}.{name}", name)
        return
    wrapper: Any = function
    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        wrapper = getattr(importlib.import_module(module), name)
    name = call or wrapper.__name__
    if name not in CALLS:
        raise ValueError(
            f"{wrapper.__module__}.{wrapper.__name__}: a graph cannot hold torch.distributed.{name}(); "
            "name the call that it wraps with call=..."
        )
    substitute(wrapper, _adapted(wrapper, CALLS[name]))


def _undecorated(wrapper: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function whose arguments the wrapper has. A decorator without functools.wraps() takes (*args, **kwargs)."""
    wrapper = inspect.unwrap(wrapper)
    cells = [cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ()]
    return next((each for each in cells if inspect.isfunction(each) and each.__name__ == name), wrapper)


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty and parameter.default is not None


def _adapted(wrapper: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with the wrapper's arguments. The first ones are those of the call, in the same order."""
    parameters = list(inspect.signature(_undecorated(wrapper, call.__name__)).parameters.values())
    own = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    given = list(inspect.signature(call).parameters)
    known = {each.name: each.name for each in own if each.name in given}
    for parameter, name in zip(own, given, strict=False):
        if parameter.default is parameter.empty and parameter.name not in known and name not in known.values():
            known[parameter.name] = name
    ignored = [each.name for each in own if each.name not in known]
    # The call has its own default where the wrapper's is None.
    defaults = {known[each.name]: each.default for each in own if each.name in known and _has_default(each)}
    order = [each.name for each in own if each.kind is not each.KEYWORD_ONLY]
    if len(own) < len(parameters):  # *args or **kwargs, which bring the other arguments of the call
        rest = [name for name in given if name not in known.values()]
        known |= {name: name for name in rest}
        order += rest if any(each.kind is each.VAR_POSITIONAL for each in parameters) else []
    title = f"{wrapper.__module__}.{wrapper.__name__}"

    def traceable(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > len(order):
            raise TypeError(f"{title}: {len(arguments)} arguments by position, but at most {len(order)} are known")
        passed = dict(defaults)
        for name, value in [*zip(order, arguments, strict=False), *named.items()]:
            if name in known:
                passed[known[name]] = value
            elif name not in ignored:
                raise TypeError(f"{title}: torch.distributed.{call.__name__}() has no argument {name!r}")
        return call(**passed)

    return traceable
