"""Makes Dynamo trace the calls of torch.distributed, and Inductor compile them.

Both take more than a second to import, and most programs never do. So each part is registered when torch imports the
module that it extends.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


@functools.cache
def install() -> None:
    """Further calls do nothing."""
    after_import("torch._dynamo", _extend_dynamo)
    after_import("torch._inductor.lowering", _extend_inductor)


def _extend_dynamo() -> None:
    import torch.distributed.nn.functional as dist_nn

    from muster.graph._capture import calls as _calls
    from muster.graph._capture import nn_calls, operators, pending

    operators.register()
    torch.compiler.allow_in_graph(pending.begun)
    if hasattr(torch._dynamo.config, "enable_p2p_compilation"):
        torch._dynamo.config.enable_p2p_compilation = True
    for module, calls in ((dist, _calls.CALLS), (dist, _calls.OBJECT_CALLS), (dist_nn, nn_calls.CALLS)):
        for name, call in calls.items():
            if hasattr(module, name):
                substitute(getattr(module, name), call)


_substituted: set[int] = set()


def substitute(original: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    """From now on Dynamo traces `traceable` in place of `original`. Further calls for the same function do nothing."""
    if id(original) not in _substituted:
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(traceable)
        _substituted.add(id(original))


def _extend_inductor() -> None:
    from muster.graph._capture import lowering

    lowering.register()


def after_import(name: str, function: Callable[[], None]) -> None:
    """Calls `function` when the module has been imported: now, if it is imported already."""
    if name in sys.modules:
        _try(function)
    else:
        sys.meta_path.insert(0, _Finder(name, function))


def _try(function: Callable[[], None]) -> None:
    """Compiling without collectives must work even if a release of torch has changed what this extends."""
    try:
        function()
    except Exception as error:
        warnings.warn(
            f"muster: compiled graphs cannot hold collectives with torch {torch.__version__}: {error}", stacklevel=2
        )


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, function: Callable[[], None]):
        self._name = name
        self._function = function

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._wrap(spec.loader.exec_module)  # type: ignore[method-assign,assignment]
        return spec

    def _wrap(self, execute: Callable[[Any], None]) -> Callable[[Any], None]:
        def execute_and_call(module: Any) -> None:
            execute(module)
            _try(self._function)

        return execute_and_call
