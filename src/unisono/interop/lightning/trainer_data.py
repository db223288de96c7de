"""Data loaders of a Trainer, as Lightning's loops see them.

What Lightning takes for a batch of the training is a step of the run, a `GlobalBatch`; the strategy loops over its
micro-batches. What it takes for the only batch of an evaluation is the whole set, a `WholeSet`, which all workers
evaluate together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NoReturn

from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from unisono.core.errors import StepError, UsageError
from unisono.engine.loop.step import Step
from unisono.engine.microbatch.loaders import has_own_iter
from unisono.script.run import Run

__all__ = [
    "EvaluationLoader",
    "GlobalBatch",
    "StepLoader",
    "WholeSet",
    "checked",
    "in_global_batches",
    "in_one_order",
    "steps_of",
    "stretches",
]

ENDLESS = 1 << 20
"""Epochs of a training without ``max_epochs`` and ``max_steps``, which ends by ``trainer.should_stop``."""


def checked(loader: object, what: str) -> DataLoader[Any]:
    """Return a loader whose samples have numbers, by which the workers share them.

    Args:
        what: what it is for, for errors.

    Raises:
        UsageError: it is of another kind, or makes its batches in a way of its own.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        if has_own_iter(loader):
            raise UsageError(
                f"the loader of {what} is a {type(loader).__qualname__}, which makes its batches in its own way (it "
                "overrides __iter__), but UnisonoStrategy loads the samples itself: give a torch DataLoader, and move "
                "the work of __iter__ into its collate_fn or the dataset"
            )
        return loader
    of = f" of a {type(loader.dataset).__qualname__}" if isinstance(loader, DataLoader) else ""
    raise UsageError(
        f"UnisonoStrategy distributes the samples of {what} by index, and a {type(loader).__qualname__}{of} has none: "
        "give a torch DataLoader of a dataset with __len__ and __getitem__"
    )


def in_one_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of an evaluation, whose samples have the same order on all workers.

    Raises:
        UsageError: its sampler has a generator, whose state a worker that joins does not have.
    """
    for sampler in (loader.sampler, loader.batch_sampler):
        if getattr(sampler, "generator", None) is not None:
            raise UsageError(
                f"UnisonoStrategy: the {type(sampler).__qualname__} of a loader for an evaluation has a generator, "
                "with which a worker that joins later would cut different batches: leave out generator=, or "
                "shuffle=True"
            )
    return loader


class GlobalBatch:
    """One step of the run, in the place of a batch. It cannot be iterated over: `UnisonoStrategy` does that.

    Attributes:
        step: the `unisono.Step`.
        batch_size: samples of a batch of the loader.
        index: which batch of the step Lightning is at.
        is_computed: its micro-batches are done.
    """

    def __init__(self, step: Step, batch_size: int) -> None:
        self.step = step
        self.batch_size = batch_size
        self.index = 0
        self.is_computed = False

    @property
    def num_samples(self) -> int:
        """Samples of the whole step, on all workers together."""
        return self.step.num_samples

    @property
    def batch_samples(self) -> int:
        """Samples of the batch of the loader that Lightning is at; without accumulation, of the whole step."""
        return min(self.batch_size, self.num_samples - self.index * self.batch_size)

    def __repr__(self) -> str:
        return f"<global batch of {self.num_samples} samples, step {self.step.number}>"


def steps_of(batches: int, per_epoch: int, accumulates: int) -> int:
    """Return how many steps the first batches of an epoch are.

    Args:
        per_epoch: batches of an epoch, with the last of which a step ends in any case.
        accumulates: batches of a step.

    Raises:
        UsageError: the last one is in the middle of a step.
    """
    if batches % accumulates and batches != per_epoch:
        raise UsageError(
            f"UnisonoStrategy: the Trainer resumes after batch {batches} of an epoch, in the middle of a step of "
            f"{accumulates} batches (accumulate_grad_batches={accumulates}), whose gradient was not kept: resume from "
            "a checkpoint that was written after a step"
        )
    return -(-batches // accumulates)


def stretches(
    *, steps: int, epochs: int, done: int, per_epoch: int, max_epochs: int, max_steps: int
) -> list[tuple[int, int]]:
    """Return what is left of a training, as pairs (epochs, steps) for calls of ``run.steps``.

    Args:
        steps, epochs: that the Trainer has behind it, by a checkpoint of Lightning or by an earlier fit, whose epochs
            may have had another length.
        done: steps of the epoch that it is in; the rest of that epoch is a stretch of its own, so that the epochs of
            the data and those of the Trainer begin together.
        per_epoch: steps of an epoch.
        max_epochs, max_steps: of the Trainer; -1: no limit.
    """
    left = ((ENDLESS if max_epochs < 0 else max_epochs) - epochs) * per_epoch - done
    if max_steps >= 0:
        left = min(left, max_steps - steps)
    found = []
    if done and left > 0:
        found.append((1, min(left, per_epoch - done)))
        left -= found[0][1]
    if left > 0:
        found.append((-(-left // per_epoch), left))
    return found


class _Limited(Sampler[int]):
    """The first samples of each epoch of another sampler."""

    def __init__(self, sampler: Any, num_samples: int) -> None:
        self.sampler = sampler
        self.num_samples = num_samples
        self.generator = getattr(sampler, "generator", None)  # is found here, to be set before each epoch

    def set_epoch(self, epoch: int) -> None:
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), self.num_samples)


def in_global_batches(loader: DataLoader[Any], *, batches: int, accumulates: int) -> DataLoader[Any]:
    """Return a loader whose batches are the global batches of the steps: each has the samples of several of another
    loader's. The last one of an epoch may have fewer.

    Args:
        batches: of the other loader that an epoch has; the samples after them are left out.
        accumulates: batches of the other loader that make one.
    """
    cuts = loader.batch_sampler
    if (batches >= len(loader) and accumulates == 1) or type(cuts) is not BatchSampler:
        return loader  # `run.steps` refuses one with batches of its own
    num_samples = batches * cuts.batch_size
    return DataLoader(
        loader.dataset,
        batch_size=accumulates * cuts.batch_size,
        sampler=loader.sampler if num_samples >= len(loader.sampler) else _Limited(loader.sampler, num_samples),  # type: ignore[arg-type]
        drop_last=loader.drop_last and accumulates == 1,  # what Lightning drops has no batch among those that are left
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
    )


class _InPlaceOf:
    """Has the length and the attributes of a ``DataLoader``; scripts read ``trainer.train_dataloader.dataset``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__qualname__} has no attribute {name}")
        return getattr(self._loader, name)


class StepLoader(_InPlaceOf):
    """The training ``DataLoader`` as an iterator over the steps of the run, epoch after epoch.

    With ``accumulate_grad_batches=k`` it gives each step k times, in the place of k batches, of which only the last
    one computes it.

    Args:
        loader: of the script.
        steps: loader of global batches, as `in_global_batches` makes it.
        find_stretches: returns what is to be trained; called when the first step is asked for.
        accumulates: returns whether the step has more batches than those that were asked for.
        on_step: called with each step, before Lightning gets it.
    """

    def __init__(
        self,
        run: Run,
        loader: DataLoader[Any],
        steps: DataLoader[Any],
        *,
        microbatches: int,
        find_stretches: Callable[[], Sequence[tuple[int, int]]],
        accumulates: Callable[[], bool],
        on_step: Callable[[Step], None],
    ) -> None:
        super().__init__(loader)
        self._run = run
        self._source = steps
        self._microbatches = microbatches
        self._find_stretches = find_stretches
        self._accumulates = accumulates
        self._on_step = on_step
        self._steps: Generator[Step, None, None] | None = None
        self._is_last = False
        self._current: GlobalBatch | None = None

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> GlobalBatch:
        """Begin the next step, or go on with one that accumulates. Collective."""
        if self._steps is None:
            self._steps = self._begin()
        if self._current is not None and not self._current.is_computed:
            if self._accumulates():
                self._current.index += 1
                return self._current
            raise StepError(
                f"step {self._current.step.number} was not trained: did on_train_batch_start return -1, or did a "
                "hook iterate over trainer.train_dataloader? All steps of an epoch are trained: to end the training "
                "early, set trainer.should_stop = True; for samples iterate over the DataLoader that you gave to fit"
            )
        try:
            step = next(self._steps)
        except StopIteration:
            if self._current is None:  # the run is past this training, and this worker came later
                raise _TunerExitException from None
            raise
        self._on_step(step)
        assert self._loader.batch_size is not None  # `run.steps` refuses others
        self._current = GlobalBatch(step, self._loader.batch_size)
        return self._current

    def _begin(self) -> Generator[Step, None, None]:
        # A worker that comes to a second fit later has no counters yet.
        plan = self._run.broadcast(list(self._find_stretches()))
        for number, (epochs, max_steps) in enumerate(plan, 1):
            steps = self._run.steps(self._source, microbatches=self._microbatches, epochs=epochs, max_steps=max_steps)
            try:
                for step in steps:
                    self._is_last = number == len(plan) and step.number_in_loop + 1 == len(steps)
                    yield step
            finally:
                steps.close()

    def end(self) -> None:
        """End the training loop of the run, at its last step or before. Collective."""
        if self._steps is None:
            return
        if self._is_last and self._current is not None and self._current.is_computed:
            next(self._steps, None)
        self.leave()

    def leave(self) -> None:
        """Leave the training loop of the run where it is."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self._current = None


class WholeSet:
    """All batches of an evaluation, in the place of one batch: ``[i]`` is (i, batch).

    Args:
        number: of the loader.
        num_batches: those after the first ones are left out.
    """

    def __init__(self, loader: DataLoader[Any], number: int, num_batches: int) -> None:
        self.number = number
        self._dataset: Any = loader.dataset
        self._collate = loader.collate_fn
        self.loader_workers = loader.num_workers
        # Without a batch size the samples are batches already.
        cuts: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self._cuts = list(itertools.islice(cuts, num_batches))

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> NoReturn:
        raise UsageError(
            "within an evaluation the loaders of the Trainer have one item, which stands for all batches, because the "
            "workers share them: to look at batches there, iterate over the DataLoader that you gave to the Trainer"
        )

    def __getitem__(self, index: int) -> tuple[int, Any]:
        cut = self._cuts[index]
        if not isinstance(cut, (list, tuple)):
            return index, self._collate(self._dataset[cut])
        if callable(fetch := getattr(self._dataset, "__getitems__", None)):
            return index, self._collate(fetch(list(cut)))
        return index, self._collate([self._dataset[i] for i in cut])

    @property
    def num_samples(self) -> int:
        """Samples of all batches."""
        return sum(map(self.samples_of, range(len(self))))

    def samples_of(self, index: int) -> int:
        """Return the number of samples of a batch; 1 where the loader has no batch size."""
        cut = self._cuts[index]
        return len(cut) if isinstance(cut, (list, tuple)) else 1


class EvaluationLoader(_InPlaceOf):
    """A ``DataLoader`` of an evaluation, which gives one `WholeSet`; outside of evaluations, the batches of the loader.

    Args:
        find_place: returns the number of this loader, and how many batches are to be evaluated at most; None: outside.
    """

    def __init__(
        self, loader: DataLoader[Any], find_place: Callable[[EvaluationLoader], tuple[int, float] | None]
    ) -> None:
        super().__init__(loader)
        self._find_place = find_place

    def __iter__(self) -> Iterator[Any]:
        place = self._find_place(self)
        if place is None:
            yield from self._loader
        else:
            number, limit = place
            yield WholeSet(self._loader, number, int(min(len(self), limit)))
