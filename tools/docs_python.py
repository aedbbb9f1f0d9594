"""Makes the Python reference from the docstrings of public names. It imports muster, so muster must be built."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator

MODULES = [
    *("muster", "muster.nn", "muster.hooks", "muster.optim"),
    *("muster.rpc", "muster.rpc.autograd", "muster.rpc.optim", "muster.errors"),
]


def page(module_name: str) -> str:
    module = importlib.import_module(module_name)
    text = [f"# {module_name}\n", docstring(module)]
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.ismodule(value):
            continue
        text += [f"## {name}\n", *entry(f"{module_name}.{name}", value)]
        if inspect.isclass(value):
            for member_name, member in members(value):
                text += [f"### {name}.{member_name}\n", *entry(member_name, member)]
    return "\n".join(text)


def public_names(module: object) -> list[str]:
    """The names in __all__. Without __all__, the classes and functions that the module itself defines."""
    name = getattr(module, "__name__", "")
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name and key[0] != "_"]
    names: list[str] = getattr(module, "__all__", own)
    return [each for each in names if not each.startswith("__")]


def members(cls: type) -> Iterator[tuple[str, object]]:
    """The members that muster adds to a class: its own methods and properties, and those of muster's base classes."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("muster"):
            continue
        for name, value in vars(base).items():
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            described = getattr(value, "__doc__", None)
            callable_or_property = inspect.isroutine(value) or inspect.isdatadescriptor(value)
            if not name.startswith("_") and name not in seen and callable_or_property and described:
                seen.add(name)
                yield name, value


def entry(name: str, value: object) -> list[str]:
    """The declaration and the docstring of a public name."""
    text = docstring(value)
    declaration = ""
    native = re.match(r"\w+(\(.*\))(?: -> .*)?\n\n", text)
    if native:  # pybind11 writes the signature into the docstring
        declaration, text = name + native.group(1), text[native.end() :]
    elif isinstance(value, type) and issubclass(value, Exception):
        declaration = f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif callable(value):
        declaration = name + signature_of(value)
    code = f"```python\n{declaration}\n```\n" if declaration else ""
    return [code, text, ""]


def signature_of(value: Callable[..., object]) -> str:
    """The arguments as a caller sees them. A long list is split over several lines."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    kept = [p for p in signature.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_")]
    # Native methods take `self` as a positional-only argument, which the reference does not show.
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    kept = [p.replace(kind=positional) if p.kind is inspect.Parameter.POSITIONAL_ONLY else p for p in kept]
    text = str(signature.replace(parameters=kept))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations that are strings
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=_?[A-Z])", "", text).removesuffix(" -> None")
    if len(text) < 100:
        return text
    inner, _, result = text[1:].rpartition(")")
    return "(\n    " + ",\n    ".join(re.split(r", (?![^\[(]*[\])])", inner)) + f",\n){result}"


def docstring(value: object) -> str:
    """The docstring as Markdown. Lists of arguments, and columns of names, become Markdown lists."""
    text = inspect.getdoc(value) or ""
    text = re.sub(r"(?m)^ {0,4}(muster\..*?\S|\w+) {2,}(?=\S)", r"- `\1`: ", text)
    return re.sub(r"(?<=\n)([a-z_]+): (?=\S)", r"- `\1`: ", text) + "\n"
