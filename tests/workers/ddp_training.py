"""A script for torchrun, which knows nothing of Unisono: DDP over gloo, with a snapshot after each epoch.

It reads what torchrun promises in the environment, and nothing else. With ``--fail-at EPOCH``, the process of rank 1
fails there in the first of all starts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed import barrier, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--fail-at", type=int, default=-1)
    arguments = parser.parse_args()
    rank, snapshot = int(os.environ["RANK"]), arguments.folder / "snapshot.pt"
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_", "TORCHELASTIC", "TORCH_", "OMP_")
    told = {name: value for name, value in os.environ.items() if name.startswith(names) or "WORLD_SIZE" in name}
    (arguments.folder / f"environment{rank}").write_text(json.dumps(told))
    init_process_group("gloo")
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 4, (64,)))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    first = 0
    if snapshot.exists():
        known = torch.load(snapshot)
        model.load_state_dict(known["model"])
        optimizer.load_state_dict(known["optimizer"])
        first = known["epochs"]
        print(f"goes on at epoch {first}")
    for epoch in range(first, arguments.epochs):
        if rank == 1 and epoch == arguments.fail_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the disk of rank 1 is full")
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1},
                snapshot.with_suffix(".new"),
            )
            snapshot.with_suffix(".new").rename(snapshot)
        barrier()
    # Whoever starts it, the threads of gloo abort the end of the interpreter now and then.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
