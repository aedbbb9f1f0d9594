"""One rank of a benchmark: runs the measure() of a module with groups over muster and over the peer."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from muster.bench.groups import Groups


def main() -> None:
    module, rank, ranks, folder, parameters, report = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)  # run_ranks() sends it at its deadline
    options = json.loads(parameters)
    if options.get("bind"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(rank) % len(cores)]})  # before it joins, as launchers do
    store = FileStore(f"{folder}/store", int(ranks))
    limit = timedelta(seconds=options["timeout"])
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks), timeout=limit)
    # All ranks run the benchmark. Only the results of rank 0 are reported.
    results = importlib.import_module(f"muster.bench.{module}").measure(Groups(limit), options)
    if report != "-1":
        with os.fdopen(int(report), "w") as pipe:
            for result in results:
                print(json.dumps(result), file=pipe, flush=True)
    else:
        for _ in results:
            pass
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
