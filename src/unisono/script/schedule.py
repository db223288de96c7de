"""Schedule of one call of ``run.steps``: its data, how they are cut, and for how many steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch.utils.data import DataLoader

from unisono.core.cursor import Cursor
from unisono.core.errors import UsageError
from unisono.engine.loop.process_settings import check_whole
from unisono.engine.microbatch.data import Fetcher, Loader, MakeFetcher, MapDataset, Request, Samples
from unisono.engine.microbatch.iterables import Dataset, stream_source_of
from unisono.engine.microbatch.loaders import Source, source_of
from unisono.engine.rounds.life import Rounds
from unisono.script.streamed import Asked, StreamSchedule, stream_schedule

__all__ = ["DataOptions", "Planned", "Schedule", "check_first_step", "schedule"]


@dataclass(frozen=True)
class Schedule:
    """What is trained on, and for how long."""

    source: Source
    cursor: Cursor
    num_steps: int
    inner_steps: int = 1
    """Steps of an iteration: those of a replica in a round of local steps."""
    samples: Samples | None = None
    """Of each micro-batch, where a strategy cuts the data in another way than the cursor."""

    @property
    def dataset(self) -> MapDataset:
        return self.source.dataset

    @property
    def num_epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.num_steps // self.cursor.steps_per_epoch)

    @property
    def num_iterations(self) -> int:
        """Iterations of the training loop: one for each step, or for each round of several."""
        return -(-self.num_steps // self.inner_steps)

    def begins(self) -> None:
        """Note that the training loop begins: nothing depends on it, as each epoch has its own order."""

    def before_step(self, number: int, rounds: Rounds) -> None:
        """Do nothing: samples are found by their index on each worker."""

    def fetcher(self, device: torch.device) -> MakeFetcher:
        """Return what makes the `Fetcher` of these data."""

        def make(upcoming: Callable[[], Iterator[Request]]) -> Loader:
            return Fetcher(
                self.source.dataset,
                self.samples if self.samples is not None else self.cursor,
                device=device,
                loading=self.source.loading,
                upcoming=upcoming,
            )

        return make


Planned = Schedule | StreamSchedule


class DataOptions(TypedDict, total=False):
    """Arguments of `unisono.Run.steps` that say how the data are cut, and for how long they are trained on."""

    batch_size: int | None
    epochs: int | None
    max_steps: int | None
    sampler: Iterable[int] | None
    shuffle: bool | None
    drop_last: bool | None
    collate: Callable[[list[Any]], Any] | None
    loader_workers: int | None


def schedule(
    dataset: Dataset,
    caller: str,
    *,
    microbatches: int,
    seed: int,
    asked: Asked,
    batch_size: int | None = None,
    resized: int | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    sampler: Iterable[int] | None = None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    loader_workers: int | None = None,
) -> Planned:
    """Return the schedule that the arguments of a script say; see `unisono.Run.steps` for them.

    Args:
        caller: the method that got them, for errors.
        seed: of the run.
        asked: what calls of the run before have asked for.
        resized: for a trial, the batch size that counts instead of the script's, from wherever the script has it.

    Raises:
        RecipeError: batch, micro-batches and dataset do not fit together, or the order of the data cannot be known in
            advance. UsageError: there is no epoch, or an argument is no whole number.
    """
    epochs = 1 if epochs is None else epochs
    for name, value in {"microbatches": microbatches, "epochs": epochs}.items():
        check_whole(name, value)
    for name, number in {"batch_size": batch_size, "max_steps": max_steps}.items():
        if number is not None:
            check_whole(name, number)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "sampler": sampler,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "collate": collate,
        "loader_workers": loader_workers,
    }
    if (streams := stream_source_of(dataset, caller, **options)) is not None:
        return stream_schedule(
            streams if resized is None else dataclasses.replace(streams, batch_size=resized),
            caller,
            microbatches=microbatches,
            seed=seed,
            epochs=epochs,
            max_steps=max_steps,
            asked=asked,
        )
    source = source_of(cast("MapDataset | DataLoader[Any]", dataset), caller, shuffles=True, **options)
    if resized is not None:
        source = source.resized(resized)
    cursor = Cursor(
        order=source.order,
        batch_size=source.batch_size,
        microbatches=microbatches,
        seed=seed,
        drop_last=source.drop_last,
        first_epoch=asked.num_epochs,
    )
    if epochs < 1:
        raise UsageError(f"epochs must be at least 1, got {epochs}")
    num_steps = cursor.steps_per_epoch * epochs
    return Schedule(source, cursor, num_steps if max_steps is None else max(0, min(num_steps, max_steps)))


def check_first_step(first_step: int, num_steps: int, *, is_first_loop: bool, delay: int) -> None:
    """Raise UsageError unless a training loop of ``num_steps`` can begin with this step."""
    check_whole("first_step", first_step)
    if not 0 <= first_step <= num_steps:
        raise UsageError(f"first_step must be from 0 to the {num_steps} steps of this training loop, got {first_step}")
    if first_step and not is_first_loop:
        raise UsageError(
            f"run.steps(first_step={first_step}) is not the first training loop of this run, and the one before it has "
            "done other steps: load the snapshot in a run of its own"
        )
    if first_step and delay:
        raise UsageError(
            f"run.steps(first_step={first_step}, delay={delay}): a snapshot of the script has no gradients that are on "
            "their way; go on from a checkpoint of the run (unisono.Checkpoints)"
        )
