"""Offer a C++ function from a worker in Python. Its calls do not wait for Python code.

    muster run --nproc-per-node 3 examples/python/counters.py

Rank 0 compiles ../cpp/counters.cpp, which takes about half a minute, and offers the operator in it. The other ranks
call that by name, and need neither the library nor a compiler.
"""

import os
from pathlib import Path

import torch
from torch.utils.cpp_extension import load

from muster import rpc

SOURCE = Path(__file__).resolve().parents[1] / "cpp/counters.cpp"
RANK = int(os.environ["RANK"])

if RANK == 0:
    load("counters", [str(SOURCE)], is_python_module=False)
    rpc.export(torch.ops.counters.add)

rpc.init_rpc(f"worker{RANK}", rpc_backend_options=rpc.Options(join_timeout=300))
if RANK > 0:
    for _ in range(100):
        total = rpc.rpc_sync("worker0", "counters::add", ("seen", torch.ones(3)), {"weight": 0.5})
    print(f"worker{RANK} has seen {total[0]:.1f}")
rpc.shutdown()
if RANK == 0:
    print(f"in all {torch.ops.counters.add('seen', torch.zeros(3))[0]:.1f}")
