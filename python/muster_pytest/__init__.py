"""A pytest plugin: @pytest.mark.ranks(4) runs a test at four ranks, in processes that the fork server forks.

    @pytest.mark.ranks(4)                                  a process group of muster
    @pytest.mark.ranks(2, backend="gloo", timeout=10)      of another backend, and a deadline in seconds

This package lies outside of `muster`, because pytest imports it in every run, and `import muster` imports torch.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

TIMEOUT = 60.0
_KEY = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "modules that the processes of @pytest.mark.ranks find imported, besides torch"
    parser.addini("ranks_preload", text, type="args", default=["torch._dynamo"])


def pytest_configure(config: pytest.Config) -> None:
    line = (
        "ranks(size, backend='muster', timeout=60): run the test in `size` processes that form a process group; "
        "`timeout`: seconds, for all of it"
    )
    config.addinivalue_line("markers", line)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the fork server, which imports torch while other tests run."""
    if session.config.option.collectonly or not any(item.get_closest_marker("ranks") for item in session.items):
        return
    from muster.forkserver._client import ForkServerError

    from muster import forkserver

    with contextlib.suppress(ForkServerError):  # it runs already
        modules = (*session.config.getini("ranks_preload"), "muster_pytest._run", "muster_pytest._rank")
        forkserver.preload(*modules)
    forkserver.ensure_running()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest_pyfunc_call() is not called for a TestCase, and a coroutine would be created but not run."""
    if item.get_closest_marker("ranks") and not _is_plain_function(item):
        pytest.fail("ranks() takes plain functions; for unittest.TestCase there is muster.testing", False)


def _is_plain_function(item: pytest.Item) -> bool:
    if type(item) is not pytest.Function:
        return False
    return not (inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    from muster_pytest import _run

    pyfuncitem.stash[_KEY] = _run.run(pyfuncitem, **_arguments(*mark.args, **mark.kwargs))
    pyfuncitem.stash[_KEY].raise_outcome()
    return True


def _arguments(size: int, backend: str = "muster", timeout: float = TIMEOUT) -> dict[str, Any]:
    if not isinstance(size, int) or size < 1 or not timeout > 0:
        pytest.fail(f"ranks() takes a number of ranks and a timeout above 0, not {size!r} and {timeout!r}", False)
    return {"size": size, "backend": backend, "timeout": timeout}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    outcome = item.stash.get(_KEY, None)
    if outcome is not None and call.when == "call" and report.failed and outcome.longrepr is not None:
        report.longrepr = outcome.longrepr
    return report
