"""Log a training to MLflow: loss, times, logged numbers and evaluations; one MLflow run, whichever workers come and go.

pip install '.[mlflow]'
unisono run examples/log_to_mlflow.py --workers 4
mlflow ui --backend-store-uri runs/log_to_mlflow/mlruns      # `mlflow` has the page, `mlflow-skinny` has not
MLFLOW_TRACKING_URI=http://127.0.0.1:5000 unisono run examples/log_to_mlflow.py --workers 4     # to a server
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.views.watch.mlflow import MLflow


def blobs(size: int) -> TensorDataset:
    """Points of three classes in 16 dimensions, which overlap."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (size,), generator=draw)
    return TensorDataset(torch.randn(size, 16, generator=draw) + 0.4 * labels.unsqueeze(1), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run-dir", default="runs/log_to_mlflow")
    arguments = parser.parse_args()
    data = blobs(1200)
    with unisono.Run(arguments.run_dir, seed=7, overwrite=True) as run:
        run.add_sink(MLflow("blobs"))  # on every worker; the one that writes the journal logs
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        def count(batch: list[Tensor]) -> dict[str, Tensor]:
            inputs, labels = batch
            return {"right": (model(inputs).argmax(1) == labels).sum()}

        for step in run.steps(data, batch_size=96, microbatches=8, epochs=1000, max_steps=arguments.steps):
            for inputs, labels in step:
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            scheduler.step()
            step.log(learning_rate=scheduler.get_last_lr()[0])
            if step.number % 50 == 49:
                run.evaluate(data, count, batch_size=100)


if __name__ == "__main__":
    main()
