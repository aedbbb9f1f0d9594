"""A script that continues after a restart: it saves a checkpoint at every step and loads it when it starts.

    muster run --nproc-per-node 2 --max-restarts 3 examples/python/elastic.py --checkpoint elastic.pt --fail-at 5

--fail-at makes rank 1 of the first run die at that step. The launcher restarts all ranks, and they continue from the
last checkpoint.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 10


def save(path: Path, step: int, weights: torch.Tensor) -> None:
    """The file is the old checkpoint or the new one, whenever the process dies."""
    temporary = path.with_suffix(".new")
    torch.save({"step": step, "weights": weights}, temporary)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count steps through restarts.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--fail-at", type=int, help="the step at which rank 1 dies, once")
    arguments = parser.parse_args()

    dist.init_process_group("muster")
    rank, restarts = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    step, weights = 0, torch.zeros(4)
    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        step, weights = state["step"], state["weights"]
    if rank == 0:
        print(f"restart {restarts}: begins at step {step}", flush=True)
    while step < STEPS:
        gradient = torch.full((4,), float(rank + 1))
        dist.all_reduce(gradient)
        weights += gradient
        step += 1
        if rank == 0:
            save(arguments.checkpoint, step, weights)
        dist.barrier()  # no rank is a step ahead of the checkpoint
        if step == arguments.fail_at and rank == 1 and restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        print(f"step {step}: weights {weights.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
