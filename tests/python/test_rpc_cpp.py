"""muster.rpc: calls and references between a worker in Python and one in C++."""

from __future__ import annotations

import sys
from pathlib import Path

from launching import Launch

PROGRAM = """
import torch
from muster import rpc

@rpc.export(name="twice")
def twice(x):
    return 2 * x

rpc.init_rpc("py", world_size=0)
try:
    assert torch.equal(rpc.rpc_sync("cpp", "scale", (torch.ones(3), 2)), torch.full((3,), 2.0))
    assert rpc.rpc_sync("cpp", "moved", ({"x": 1, "y": 2.5},)) == {"x": 2.0, "y": 2.5}
    assert rpc.rpc_sync("cpp", "call_python", ("py", 4)) == 8
    made = rpc.remote("cpp", "make", (5,))
    assert made.to_here() == 5
    assert rpc.rpc_sync("cpp", "read", (made,)) == 5
    assert rpc.rpc_sync("cpp", "read", (rpc.RRef(6),)) == 6
    assert rpc.rpc_sync("cpp", "make_in_python", ("py", 7)).local_value() == 14
    # The release of the worker that made it may arrive before this thread reads the result.
    late = rpc.rpc_async("cpp", "make_in_python", ("py", 8))
    while not late.done():
        pass
    for _ in range(20):
        rpc.rpc_sync("cpp", "call_python", ("py", 4))
    assert late.wait().local_value() == 16
    for function, arguments, text in (
        ("scale", ("x", 2), "expected a tensor, got a string"),
        ("scale", (torch.ones(1),), "expected 2 values, got 1"),
        ("moved", ({"x": 1},), "expected 2 fields, got 1"),
        ("unknown", (), 'there is no function "unknown"'),
    ):
        try:
            rpc.rpc_sync("cpp", function, arguments)
        except Exception as error:
            assert text in str(error), error
        else:
            raise AssertionError(function)
    print("all is well")
finally:
    rpc.rpc_sync("cpp", "end")
    rpc.shutdown()
"""


def test_python_and_cpp_call_each_other(launch: Launch, release_build: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    worker = release_build / "tests/torch/rpc_cpp_worker"
    command = f"[ $RANK = 1 ] && exec {worker}; exec {sys.executable} {program}"
    job = launch("--nproc-per-node", "2", "--no-python", "sh", "-c", command)
    assert job.finish() == 0, job.err
    assert "all is well" in job.out
