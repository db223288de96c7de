"""``unisono ray``: train on a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

import click

from unisono.cli.run import Options, read, run_options, start

__all__ = ["ray"]


@click.command()
@run_options
@click.option("--address", default="auto", show_default=True, metavar="auto|HOST:PORT", help="The Ray cluster.")
@click.option("--gpus-per-worker", type=click.FloatRange(min=0), show_default="1 where the cluster has GPUs",
              help="GPUs that Ray reserves for a worker.")  # fmt: skip
@click.option("--send-folder", is_flag=True, help="Let Ray send the current folder to its nodes; else it lies there at "
              "the same path.")  # fmt: skip
def ray(address: str, gpus_per_worker: float | None, send_folder: bool, **given: Any) -> int:
    """Train SCRIPT on a Ray cluster, with the same bits at any number of workers.

    Agents are actors, with as many CPUs as their workers have threads. With --workers A:B the run begins with A, and
    takes up to B as the cluster, or its autoscaler, has room:

        unisono ray train.py --workers 2:8 -- --lr 0.01
    """
    from unisono.launchers import Request
    from unisono.launchers.ray import Ray

    options = Options(**given)
    spec, workers = read(options)
    request = Request(
        workers=workers, threads=spec.threads, environment=dict(os.environ), takes_all=options.workers == "auto"
    )
    return start(options, Ray(request, address=address, gpus=gpus_per_worker, sends_folder=send_folder))
