"""One rank of a benchmark: joins the others over muster and over the peer, and runs the benchmark's measure()."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from muster.bench import benches
from muster.bench.groups import Groups


def main() -> None:
    bench, rank, ranks, folder, parameters, report = sys.argv[1:]
    options = json.loads(parameters)
    if options.get("bind"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(rank) % len(cores)]})  # before it joins, as launchers bind
    store = FileStore(f"{folder}/store", int(ranks))
    limit = timedelta(seconds=options["timeout"])
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks), timeout=limit)
    results = benches.RANK_BENCHES[bench].measure(Groups(limit), options)
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
