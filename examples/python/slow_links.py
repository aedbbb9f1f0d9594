"""Train the network of digits.py over slow links: compress gradients, or synchronize less often.

    muster run --nproc-per-node 2 examples/python/slow_links.py --hook int8
    muster run --nproc-per-node 2 examples/python/slow_links.py --outer diloco --hook bf16

With --hook alone, every step averages compressed gradients. With --outer, each rank trains on its own, and all ranks
synchronize every few steps. docs/howto/slow_links.md says what each of these costs and saves.
"""

import argparse
from typing import Any

import muster.hooks
import torch
import torch.distributed as dist
from digits import DATA, Progress, accuracy_of, load_digits, make_model, train_epoch
from muster.nn import DistributedDataParallel
from muster.optim import DiLoCo, LocalSGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

HOOKS = {
    "all_reduce": muster.hooks.all_reduce,
    "bf16": muster.hooks.bf16,
    "int8": muster.hooks.int8,
    "top_k": muster.hooks.top_k,
    "power_sgd": muster.hooks.power_sgd,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits over slow links.")
    parser.add_argument("--hook", choices=HOOKS, default="all_reduce", help="how averages are sent")
    parser.add_argument("--outer", choices=["local_sgd", "diloco"], help="the optimizer of ranks that meet less often")
    parser.add_argument("--sync-every", type=int, default=10, help="steps between two meetings (default: 10)")
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.outer == "local_sgd" and arguments.hook != "all_reduce":
        parser.error("LocalSGD averages parameters, which no hook compresses")

    dist.init_process_group("muster")
    torch.manual_seed(0)
    training, held_out = load_digits(DATA)
    sampler: DistributedSampler[Any] = DistributedSampler(training, seed=0)
    batches = DataLoader(training, batch_size=max(1, 64 // dist.get_world_size()), sampler=sampler)
    model = make_model()
    if not arguments.outer:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, HOOKS[arguments.hook]())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if arguments.outer == "diloco":
        optimizer = DiLoCo(optimizer, sync_every=arguments.sync_every, hook=HOOKS[arguments.hook]())
    elif arguments.outer == "local_sgd":
        optimizer = LocalSGD(optimizer, sync_every=arguments.sync_every)
    progress = Progress(arguments.epochs, len(batches))
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, batches, epoch, progress)
        if isinstance(optimizer, (DiLoCo, LocalSGD)) and epoch == arguments.epochs:
            optimizer.synchronize()  # until here the ranks' parameters differ
        progress.epoch(epoch, loss, accuracy_of(model, held_out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
