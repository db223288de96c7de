"""Unisono: many workers, one result.

Trains an ordinary PyTorch model on as many workers as there are, with the same bits whatever their number and speed,
and whoever dies or joins on the way. Start with `Run`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.core.errors import (
    CheckpointError,
    DeadlineExceeded,
    DivergenceError,
    LaunchError,
    LossError,
    PeerLost,
    ProtocolError,
    RecipeError,
    RunDirectoryError,
    RunStopped,
    StateLost,
    StepError,
    UnisonoError,
    UsageError,
)
from unisono.system.extras import check_platform, needs_torch

if TYPE_CHECKING:
    from unisono.cluster.launcher import launch as launch
    from unisono.core.cadence import Checkpoints as Checkpoints
    from unisono.engine.checkpoint.loading import load_weights as load_weights
    from unisono.engine.loop.step import Step as Step
    from unisono.engine.microbatch.loaders import BucketSampler as BucketSampler
    from unisono.engine.microbatch.shards import TarShards as TarShards
    from unisono.engine.microbatch.streams import Streams as Streams
    from unisono.engine.state.carried import Carried as Carried
    from unisono.script.run import Run as Run
    from unisono.strategies.local.localround import LocalRound as LocalRound
    from unisono.strategies.parallel.parallelize import assemble as assemble
    from unisono.strategies.parallel.parallelize import parallelize as parallelize
    from unisono.strategies.parallel.value import whole as whole
    from unisono.strategies.shard.clipping import clip_grad_norm_ as clip_grad_norm_
    from unisono.strategies.shard.clipping import clip_grad_value_ as clip_grad_value_
    from unisono.strategies.shard.sharding import shard as shard
    from unisono.strategies.stages.module import Stages as Stages

__version__ = "0.3.0"

__all__ = [
    "BucketSampler",
    "Carried",
    "CheckpointError",
    "Checkpoints",
    "DeadlineExceeded",
    "DivergenceError",
    "LaunchError",
    "LocalRound",
    "LossError",
    "PeerLost",
    "ProtocolError",
    "RecipeError",
    "Run",
    "RunDirectoryError",
    "RunStopped",
    "Stages",
    "StateLost",
    "Step",
    "StepError",
    "Streams",
    "TarShards",
    "UnisonoError",
    "UsageError",
    "assemble",
    "clip_grad_norm_",
    "clip_grad_value_",
    "launch",
    "load_weights",
    "parallelize",
    "shard",
    "whole",
]

# The command line and the head import this package too, and have no use for torch.
_LATER = {
    "Carried": "unisono.engine.state.carried",
    "BucketSampler": "unisono.engine.microbatch.loaders",
    "Checkpoints": "unisono.core.cadence",
    "LocalRound": "unisono.strategies.local.localround",
    "Run": "unisono.script.run",
    "Stages": "unisono.strategies.stages.module",
    "Step": "unisono.engine.loop.step",
    "Streams": "unisono.engine.microbatch.streams",
    "TarShards": "unisono.engine.microbatch.shards",
    "launch": "unisono.cluster.launcher",
    "load_weights": "unisono.engine.checkpoint.loading",
    "clip_grad_norm_": "unisono.strategies.shard.clipping",
    "clip_grad_value_": "unisono.strategies.shard.clipping",
    "assemble": "unisono.strategies.parallel.parallelize",
    "parallelize": "unisono.strategies.parallel.parallelize",
    "shard": "unisono.strategies.shard.sharding",
    "whole": "unisono.strategies.parallel.value",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    check_platform()
    with needs_torch(f"unisono.{name}"):
        value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
