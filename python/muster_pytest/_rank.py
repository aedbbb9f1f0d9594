"""What each process of a test does. The fork server imports this module before it forks."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import util
from _pytest.config import _prepareconfig
from _pytest.pathlib import import_path

import muster
from muster_pytest._job import Job, Result, Test

GROUP_SHARE = 0.8  # of a test's timeout: a collective fails before it, because its error names the late rank


def _minimal_config() -> pytest.Config:
    """A configuration with pytest's own plugins. Parsing it installs the import hook that rewrites `assert`."""
    unneeded = [
        word for name in ("capture", "cacheprovider", "terminal", "faulthandler") for word in ("-p", f"no:{name}")
    ]
    with unittest.mock.patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"):
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)
        return _prepareconfig(["-c", os.devnull, "--rootdir=/", "--noconftest", *unneeded])


_config = _minimal_config()
if trace_rules := sys.modules.get("torch._dynamo.trace_rules"):
    trace_rules.clear_lru_cache()  # as init_process_group() would in each rank, which copies 1 MB there


def main(job: Job, test: Test, answer: Connection) -> None:
    for target, fd in enumerate(job.outputs, 1):
        os.dup2(fd, target)  # type: ignore[arg-type]  # it was unpickled
    faulthandler.dump_traceback_later(job.timeout, file=2)
    with answer:
        answer.send_bytes(pickle.dumps(_run(job, test)))


def _run(job: Job, test: Test) -> Result:
    function: Callable[..., object] | None = None
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(job.rank)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(job.size)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.size))
        function = _find(test)
        _form_group(job)
        function(**test.arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        return _result_of(error, test, function)
    return Result("passed")


def _find(test: Test) -> Callable[..., object]:
    for hook in sys.meta_path:
        if hasattr(hook, "fnpats"):
            hook.fnpats = test.python_files
    util._reprcompare = _explain
    found: Any = import_path(test.path, **test.import_options)
    for name in test.names:
        found = getattr(found, name)
        if isinstance(found, type):
            found = found()
    return found


def _explain(op: str, left: object, right: object) -> str | None:
    """Returns what pytest shows for a comparison that failed."""
    explained = _config.hook.pytest_assertrepr_compare(config=_config, op=op, left=left, right=right)
    lines = next(filter(None, explained), None)
    return None if lines is None else "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")


def _form_group(job: Job) -> None:
    limit = timedelta(seconds=job.timeout * GROUP_SHARE)
    store = muster.store(f"file:///proc/self/fd/{job.store}", timeout=limit)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.size, timeout=limit)
    if "gloo" in job.backend:
        dist.barrier()  # a rank whose test has no collectives might leave before Gloo has connected another one to it


def _result_of(error: BaseException, test: Test, function: Callable[..., object] | None) -> Result:
    at = time.monotonic()
    excinfo = pytest.ExceptionInfo.from_exception(error)
    if isinstance(error, pytest.skip.Exception):
        return Result("skipped", str(error.msg), at)
    if isinstance(error, pytest.xfail.Exception):
        return Result("xfailed", str(error.msg), at)

    def filtered(excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        code = getattr(function, "__code__", None)
        frames = excinfo.traceback
        return (
            frames.cut(path=code.co_filename, firstlineno=code.co_firstlineno - 1).filter(excinfo) if code else frames
        )

    options = dict(test.repr_options)
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        options["style"] = "value"
    shown = excinfo.getrepr(tbfilter=filtered, **options)
    return Result("failed", excinfo.exconly(tryshort=True), at, _pickled(error), shown)


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data
