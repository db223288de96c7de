"""The two scripts of `benchmarks.curves`: one training, with Unisono and with DistributedDataParallel.

unisono run benchmarks/curves_sides.py --workers 4 -- unisono     # the journal has the loss of each step
torchrun --nproc-per-node 4 benchmarks/curves_sides.py ddp FILE   # rank 0 writes the losses into FILE, as JSON
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

SEED = 7
EPOCHS = 24
BATCH = 128
"""Samples of a step, of all workers together."""
MICROBATCHES = 8
RATE = 0.1


def digits() -> TensorDataset:
    """Four fifths of the 1,797 handwritten digits of scikit-learn: (1, 8, 8) pictures in [0, 1], and labels."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: len(images) * 4 // 5]
    return TensorDataset(images[order], torch.tensor(found.target)[order])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10),
    )  # fmt: skip


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def with_unisono() -> None:
    run = unisono.Run(seed=SEED)
    model = network().to(run.device)
    optimizer = optimizer_of(model)
    run.track(model=model, optimizer=optimizer)
    loader = DataLoader(digits(), batch_size=BATCH, shuffle=True, drop_last=True)
    for _ in run.epochs(EPOCHS):
        for step in run.steps(loader, microbatches=MICROBATCHES):
            for images, labels in step:
                F.cross_entropy(model(images), labels).backward()
            optimizer.step()


def with_ddp(path: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    model = DistributedDataParallel(network())
    optimizer = optimizer_of(model)
    data = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=SEED, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(mean.item())
    if dist.get_rank() == 0:
        path.write_text(json.dumps(losses))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["unisono", "ddp"])
    parser.add_argument("path", nargs="?", type=Path, help="for ddp: where the losses go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side == "unisono":
        with_unisono()
    else:
        with_ddp(options.path)


if __name__ == "__main__":
    main()
