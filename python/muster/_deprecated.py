"""Old names of arguments and attributes, which work for one release."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`names`: maps the old name of an argument to its new name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                text = f"{function.__qualname__}(): the argument {old} is now called {names[old]}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    def read(self: object) -> Any:
        warnings.warn(f"the attribute {old} is now called {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)
