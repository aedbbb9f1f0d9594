"""Copies of PyTorch's test modules, with changes in their source."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Mapping


def load_copy(
    original: str,
    name: str,
    rules: Mapping[str, str],
    file: str,
    rewrite: Callable[[str], str] = lambda source: source,
) -> types.ModuleType:
    """The module `original` under the name `name`, changed by `rules` (replacements, by text) and then by `rewrite`.

    file: where the rules are. A rule that no longer finds its place raises AssertionError, which names this file.
    """
    spec = importlib.util.find_spec(original)
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as code:
        source = code.read()
    for old, new in rules.items():
        if old not in source:
            raise AssertionError(f"{original} of this torch has no {old!r} any more: mend RULES in {file}")
        source = source.replace(old, new)
    module = types.ModuleType(name)
    module.__file__ = spec.origin
    module.__package__ = spec.parent
    sys.modules[name] = module
    exec(compile(rewrite(source), spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module
