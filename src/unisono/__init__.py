"""Unisono: many workers, one result.

Trains an ordinary PyTorch model on as many workers as there are, with the same bits whatever their number and speed,
and whoever dies or joins on the way. Start with `Run`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.errors import (
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
from unisono.platforms import check_platform

if TYPE_CHECKING:
    from unisono.checkpoint.loading import load_model as load_model
    from unisono.decisions.cadence import Checkpoints as Checkpoints
    from unisono.launcher import launch as launch
    from unisono.microbatch.loaders import BucketSampler as BucketSampler
    from unisono.microbatch.shards import TarShards as TarShards
    from unisono.microbatch.streams import Streams as Streams
    from unisono.state.carried import Carried as Carried
    from unisono.state.sharding import shard as shard
    from unisono.training.localround import LocalRound as LocalRound
    from unisono.training.run import Run as Run
    from unisono.training.step import Step as Step

__version__ = "0.2.0"

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
    "StateLost",
    "Step",
    "StepError",
    "Streams",
    "TarShards",
    "UnisonoError",
    "UsageError",
    "launch",
    "load_model",
    "shard",
]

# The command line and the head import this package too, and have no use for torch.
_LATER = {
    "Carried": "unisono.state.carried",
    "BucketSampler": "unisono.microbatch.loaders",
    "Checkpoints": "unisono.decisions.cadence",
    "LocalRound": "unisono.training.localround",
    "Run": "unisono.training.run",
    "Step": "unisono.training.step",
    "Streams": "unisono.microbatch.streams",
    "TarShards": "unisono.microbatch.shards",
    "launch": "unisono.launcher",
    "load_model": "unisono.checkpoint.loading",
    "shard": "unisono.state.sharding",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    check_platform()
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
