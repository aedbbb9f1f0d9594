"""Which functions and classes other workers may name, in a call or inside a pickle.

A name is "module:qualified.name". It is looked up in modules that are imported already: a message never imports one.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import functools
import importlib
import inspect
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

MAIN = "__main__"
_MAIN_NAMES = (MAIN, "__mp_main__")  # of a child that multiprocessing has spawned

_exported: dict[str, Any] = {}
_allowed: set[str] = set()
_found: dict[str, Any] = {}  # the results of find()
_all_allowed = False
_names: dict[Any, str] = {}  # the results of name_of(), which takes as long as the rest of a small call
_MAX_NAMES = 4096
_LASTING = (types.FunctionType, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # kinds that _names may keep

# Functions of more than their arguments: it reads or writes a file.
_NOT_PURE = {"from_file"}
_TORCH_FUNCTIONS = torch._C._VariableFunctions
# Methods of torch's classes and of numpy's arrays that write files, start programs, or return an object that does.
_UNSAFE_METHODS = {"compile", "dump", "numpy", "save", "storage", "tofile", "typed_storage", "untyped_storage"}

# Classes of plain data. numpy's are not here: it may not be installed.
_DATA: dict[str, Any] = {
    f"{kind.__module__}:{kind.__qualname__}": kind
    for kind in (
        *(bytearray, complex, frozenset, range, set, slice, type(...), type(NotImplemented)),
        *(bool, bytes, dict, float, int, list, str, tuple),  # the factory of a defaultdict
        *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, pathlib.PosixPath, pathlib.PurePosixPath, uuid.UUID, uuid.SafeUUID),
        *(torch.Size, torch.device),
    )
}
_NUMPY = {"ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer"}


@overload
def export(function: _Callable) -> _Callable: ...
@overload
def export(*, name: str) -> Callable[[_Callable], _Callable]: ...
def export(function: Any = None, *, name: str | None = None) -> Any:
    """Marks a function that other workers may call, or a class that they may create and send.

    It may be an operator of torch, such as one of a C++ library that torch.ops.load_library() has loaded:
    export(torch.ops.tables.pull). If it was exported before init_rpc(), its calls do not wait for Python code.

    name: callers may use it in place of the function, also from C++: rpc_sync("ps", "pull").
    """
    if function is None:
        return lambda marked: _export(marked, name)
    return _export(function, name)


def _export(function: Any, name: str | None) -> Any:
    if not callable(function):
        raise TypeError(f"only a function or a class can be exported, not {function!r}")
    if isinstance(function, torch._ops.OpOverloadPacket):
        _export(_only_overload(function), name)
        return function
    if isinstance(function, torch._ops.OpOverload):
        torch._C._dispatch_find_schema_or_throw(*function.name().partition(".")[::2])  # not one of TorchScript
    if name is not None and (":" in name or "#" in name):
        raise ValueError(f"the name of an exported function must have no colon and no #: {name!r}")
    if name is not None and _exported.setdefault(name, function) is not function:
        raise ValueError(f"another function was exported as {name!r}")
    _exported[_qualified(function)] = function
    _found.clear()
    return function


def operators() -> dict[str, str]:
    """The exported operators in C++, by the names of their functions."""
    return {
        name: function.name()
        for name, function in _exported.items()
        if isinstance(function, torch._ops.OpOverload) and not function._defined_in_python
    }


def _only_overload(packet: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload:
    names = packet.overloads()
    if len(names) != 1:
        raise ValueError(f"{packet} has the overloads {', '.join(names)}: name one, such as {packet}.{names[0]}")
    return getattr(packet, names[0])


def allow(names: str | Iterable[str]) -> None:
    """Adds to the list of what other workers may call: "package.module:function" for one function or class and what
    belongs to it, or "package.module" for all that are defined in this module and the modules below it.
    """
    _allowed.update([names] if isinstance(names, str) else names)
    _found.clear()


def name_of(function: Any) -> str | None:
    """The name of a function or class for other workers. None if it has none, such as a lambda.

    Raises ValueError for an operator with several overloads.
    """
    try:
        return _names[function]
    except (KeyError, TypeError):  # TypeError: it cannot be hashed
        pass
    name = _name_of(function)
    if name is not None and len(_names) < _MAX_NAMES and isinstance(function, _LASTING):
        _names[function] = name
    return name


def _name_of(function: Any) -> str | None:
    if isinstance(function, types.BuiltinFunctionType) and _of_torch(function.__name__) is function:
        return f"torch:{function.__name__}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = _only_overload(function)
    if isinstance(function, torch._ops.OpOverload):
        return _qualified(function)
    if isinstance(function, types.MethodType) and not isinstance(function.__self__, type):
        return None  # its object would have to travel, too
    if not isinstance(getattr(function, "__qualname__", None), str) or getattr(function, "__module__", None) is None:
        return None
    qualified = _qualified(function)
    return None if "<" in qualified else qualified


def allow_all(allowed: bool) -> None:
    """Whether other workers may name everything, and import modules. Then they can run any code here."""
    global _all_allowed
    _all_allowed = allowed
    _found.clear()


def allows_all() -> bool:
    return _all_allowed


def find(name: str) -> Any:
    """The function or class with this name, if other workers may use it. Raises LookupError or PermissionError."""
    if (found := _found.get(name)) is None:
        found = _found[name] = _find_any(name) if _all_allowed else _find(name)
    return found


def _find_any(name: str) -> Any:
    module, colon, path = name.partition(":")
    if name in _exported or not colon or path.startswith(":"):  # "library::operator"
        return _find(name)
    return functools.reduce(
        getattr, path.split("."), importlib.import_module(MAIN if module in _MAIN_NAMES else module)
    )


def _find(name: str) -> Any:
    if name in _exported:
        return _exported[name]
    if name in _DATA:
        return _DATA[name]
    module_name, colon, path = name.partition(":")
    if path.startswith(":"):
        raise PermissionError(f"other workers must not call the operator {name}: export it with muster.rpc.export()")
    if not colon:
        raise LookupError(f"no function was exported as {name!r}")
    module = sys.modules.get(MAIN if module_name in _MAIN_NAMES else module_name)
    if module is None:
        raise LookupError(f"module {module_name!r} is not imported in this process")
    if module_name == "torch" and (found := _of_torch(path)) is not None:
        return found
    found = _walk(module, path, name)
    if _may_use(found, module_name, path):
        return found
    raise PermissionError(
        f"other workers must not use {name}: mark it with @muster.rpc.export, or allow it with "
        f"muster.rpc.allow({name!r})"
    )


def _walk(module: types.ModuleType, path: str, name: str) -> Any:
    found: Any = module
    for part in path.split("."):
        if part.startswith("__") or (found is not module and not isinstance(found, type)):
            raise LookupError(f"{name} is not a function or a class")
        if not hasattr(found, part):
            raise LookupError(f"there is no {name} in this process")
        found = getattr(found, part)
    return found


def _may_use(found: Any, module_name: str, path: str) -> bool:
    if not (inspect.isroutine(found) or isinstance(found, type)):
        return False
    defined_in = getattr(found, "__module__", None)
    if module_name in _MAIN_NAMES:
        return defined_in in _MAIN_NAMES
    if _is_listed(found, module_name, path):
        return True
    if module_name in ("builtins", "muster.errors"):
        return isinstance(found, type) and issubclass(found, BaseException)
    if module_name.split(".")[0] == "numpy":
        return path in _NUMPY
    return isinstance(found, type) and defined_in == module_name and _is_of_torch_nn(found)


def _is_listed(found: Any, module_name: str, path: str) -> bool:
    """True if the program has exported or allowed it."""
    parents = path.split(".")
    if any(
        f"{module_name}:{'.'.join(parents[:count])}" in _allowed | set(_exported)
        for count in range(1, len(parents) + 1)
    ):
        return True
    modules = any(module_name == each or module_name.startswith(each + ".") for each in _allowed)
    return modules and getattr(found, "__module__", None) == module_name


def _of_torch(name: str) -> Any:
    """A constant of torch, such as a dtype, or a function in C++."""
    found = getattr(torch, name, None)
    if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        return found
    is_native = found is not None and getattr(_TORCH_FUNCTIONS, name, None) is not None and name not in _NOT_PURE
    return found if is_native and isinstance(found, types.BuiltinFunctionType) else None


def check_method(kind: type, name: str) -> None:
    """Raises PermissionError if other workers must not call this method of a value of this class.

    They can make values of the standard library, of torch and of numpy without a function of the program. Methods of
    these must not write files or start processes, and must not lead to objects whose methods do.
    """
    library = kind.__module__.split(".")[0]
    if kind is types.FunctionType:
        return  # only the program makes such values
    if library in ("torch", "numpy"):
        safe = name not in _UNSAFE_METHODS
    elif library in sys.stdlib_module_names:
        safe = _qualified(kind) in _DATA and not issubclass(kind, pathlib.PurePath)
    else:
        return  # a class of the program
    if not (safe or _all_allowed or _is_listed(kind, kind.__module__, kind.__qualname__)):
        raise PermissionError(
            f"other workers must not call {kind.__qualname__}.{name}(): call a function of your own that does, or "
            f"allow the class with muster.rpc.allow({_qualified(kind)!r})"
        )


def _is_of_torch_nn(found: type) -> bool:
    if found.__module__.startswith("torch.nn.modules."):
        return issubclass(found, torch.nn.Module)
    return found.__module__.startswith("torch.optim.") and issubclass(found, torch.optim.Optimizer)


def _qualified(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return function.name()
    module = function.__module__
    return f"{MAIN if module in _MAIN_NAMES else module}:{function.__qualname__}"


def exception_class(name: str) -> type[BaseException] | None:
    """The class of a remote exception, if it is one of Python's or of those that may travel.

    None for SystemExit and the like: they would end the caller.
    """
    found = getattr(builtins, name, None)
    if found is None and ":" in name:
        try:
            found = find(name)
        except (LookupError, PermissionError):
            return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
