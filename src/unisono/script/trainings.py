"""The training loops that a script can ask for; `unisono.Run` has them all.

A strategy that a script chooses by an argument of ``run.steps``, or by a call of its own, is one file beside this one
(`unisono.engine.loop.strategies`), and some lines here.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from unisono.core.errors import UsageError
from unisono.engine.loop.settings import Arithmetic
from unisono.engine.loop.step import Step
from unisono.engine.loop.steps import Steps
from unisono.engine.loop.strategies import Strategy, Synchronous
from unisono.engine.microbatch.bookmarks import NAME as STREAMS
from unisono.engine.microbatch.iterables import Dataset
from unisono.engine.microbatch.losses import Reduction
from unisono.engine.rounds.inspecting import Inspector
from unisono.engine.state.tracked import Tracked
from unisono.script.length import Length
from unisono.script.loop import Wire, check_wire
from unisono.script.schedule import Planned, check_first_step, schedule
from unisono.script.streamed import Asked, StreamSchedule
from unisono.strategies.delay.prediction import NAME as PREDICTION
from unisono.strategies.delay.prediction import Prediction
from unisono.strategies.delay.strategy import Delayed, check_delay
from unisono.strategies.local.localround import LocalRound, ReplicaSamples, ReplicaStreams, Replication, check_count
from unisono.strategies.local.replica_states import NAME, Replicas
from unisono.strategies.local.strategy import Delta, InnerState, LocalSteps
from unisono.system.process import Process

__all__ = ["Trainings"]


class Trainings(ABC):
    """The calls; the class that inherits them begins the loops."""

    seed: int
    device: torch.device
    _tracked: Tracked
    _process: Process
    _num_epochs: int
    _length: Length
    _asked: Asked
    _replicas: Replicas | None
    _arithmetic: Arithmetic
    _inspector: Inspector | None

    @abstractmethod
    def _begin_loop(
        self,
        planned: Planned,
        strategy: Strategy,
        reduction: Reduction,
        *,
        wire: Wire = "fp32",
        first_step: int = 0,
        is_limited: bool = False,
    ) -> Steps[Any]:
        """Return the iterations of a training loop, which begins with the first of them.

        Args:
            is_limited: the script says for how many epochs, or steps, it trains.
            first_step: how many of them count as done when the run begins.
        """

    def epochs(self, num: int) -> Iterator[int]:
        """Yield the numbers 0 to ``num - 1``: the outer loop of a training with a ``run.steps`` for each epoch.

        ::

            for epoch in run.epochs(10):
                for step in run.steps(loader, microbatches=8):
                    ...

        It is ``range(num)`` for the script, and says how long the run is: for the progress and the time left that the
        terminal, the page and ``unisono watch --once`` show. It skips nothing: a worker that joins later, or a run
        that is resumed, goes through all epochs, and ``run.steps`` skips what is over. Changes no bit.

        Raises:
            UsageError: ``num`` is no whole number, or less than 1.
        """
        check_count("epochs", num)
        return self._length.epochs(num)

    def steps(
        self,
        dataset: Dataset,
        *,
        microbatches: int,
        batch_size: int | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        sampler: Iterable[int] | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        reduction: Reduction = "mean",
        wire: Wire = "fp32",
        delay: int = 0,
        predict: bool = False,
        first_step: int = 0,
    ) -> Steps[Step]:
        """Return an iterator over the steps of a training, each to be iterated over its micro-batches. Collective.

        The epochs of a run are counted over all calls: each call goes on where the one before has ended, with the next
        order of the data and the next augmentation. ``len()`` of the iterator is its number of steps.

        Args:
            dataset: anything with ``len`` and ``[i]``; or a ``torch.utils.data.DataLoader``, which also says what its
                own arguments say: batch size, sampler or shuffling, ``drop_last``, ``collate_fn``, worker processes.
                Data without a length: `unisono.Streams`, `unisono.TarShards`, an ``IterableDataset`` (docs/streams.md).
            batch_size: samples of a **global** batch; the number of workers does not change it. Default: that of the
                DataLoader or of the `unisono.BucketSampler`.
            microbatches: M, the equal cuts of a global batch; must divide it. Part of the recipe: it changes the
                bits, the number of workers does not. Choose it as the largest number of workers you expect, or a
                small multiple where workers differ in speed (docs/choosing_m.md).
            epochs: passes over the data; default: one. A training with more than one ``run.steps`` says its length with
                `epochs`.
            max_steps: end earlier.
            sampler: a sampler of torch, `unisono.BucketSampler`, or anything that gives the sample indices of an epoch
                (``__iter__`` and ``__len__``) and draws from the global generators only.
            shuffle: a new order in every epoch. Default: True; a DataLoader or a sampler decides by itself.
            drop_last: leave out an epoch's last batch when it is partial; otherwise it is trained, weighted exactly.
            collate: list of samples -> batch; default: that of ``DataLoader``.
            loader_workers: processes per worker that load data ahead; 0, the default, loads in this process.
            reduction: what the losses of the script are over the samples of a micro-batch. "mean": the gradients of a
                step are the weighted means over the global batch. "sum": their sums, and ``step.loss`` is a sum, too.
            wire: as what sums of float32 gradients travel between hosts. "bf16" halves the bytes, for slow links:
                the sums of a fixed level of the tree (the lowest one with 8 nodes at most), and all above it, are
                rounded to bfloat16 wherever they are formed, and added in float32. Part of the recipe: it changes the
                bits, and the number of workers does not. With up to 8 micro-batches, the gradient of each is rounded.
            delay: D; the gradient of step s is applied after the inner loop of step s + D, so that sending it, summing
                it and waiting for slow workers are hidden behind the computation of up to D steps. Part of the recipe:
                the gradient is that of parameters which are D updates old. There are D more steps: after the inner loop
                of the first D there is no gradient yet (``.grad`` is None, ``step.loss`` NaN), and the last D have no
                micro-batches. Read docs/delay.md before you use it.
            predict: with a delay, compute micro-batches with the parameters that are expected when their gradient is
                applied: those in force, and D times the newest update. Between two steps the parameters are the true
                ones. Part of the recipe.
            first_step: a run that begins, begins with this step, and the steps before it count as done: the script has
                loaded models and optimizers from a snapshot of its own, as they were before that step. Then the data,
                the random numbers and so the bits are those of a run that has done all steps. In the first training
                loop only, and the same on all workers (``run.broadcast``).

        Raises:
            RecipeError: batch, micro-batches and dataset do not fit together, or the order of the data cannot be known
                in advance. Nothing was trained.
            UsageError: nothing is tracked that could be trained.
        """
        self._process.check("run.steps")
        resized = None
        if self._inspector is not None:
            given = {"microbatches": microbatches, "batch_size": batch_size, "wire": wire, "delay": delay}
            microbatches, wanted, wire, delay = self._inspector.arguments(given).values()
            resized = wanted if wanted != batch_size else None
        check_wire(wire, self._tracked)
        check_delay(delay, predict, self._tracked)
        planned = schedule(
            dataset,
            "run.steps",
            microbatches=microbatches,
            seed=self.seed,
            first_epoch=self._num_epochs,
            asked=self._asked,
            batch_size=batch_size,
            resized=resized,
            epochs=1 if epochs is None else epochs,
            max_steps=max_steps,
            sampler=sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=collate,
            loader_workers=loader_workers,
        )
        is_limited = epochs is not None or max_steps is not None
        check_first_step(first_step, planned.num_steps, is_first_loop=self._num_epochs == 0, delay=delay)
        prediction = Prediction(delay) if predict else None
        if prediction is not None:
            self._tracked.own(PREDICTION, prediction)
        strategy = Delayed(delay, planned.num_steps, prediction) if delay else Synchronous()
        if isinstance(planned, StreamSchedule):
            self._tracked.own(STREAMS, self._asked.bookmarks)
            planned = dataclasses.replace(planned, delay=delay)
        return self._begin_loop(planned, strategy, reduction, wire=wire, first_step=first_step, is_limited=is_limited)

    def local_steps(
        self,
        dataset: Dataset,
        *,
        microbatches: int,
        replicas: int,
        inner_steps: int,
        outer: torch.optim.Optimizer | None = None,
        inner_state: InnerState = "kept",
        delta: Delta = "fp32",
        copies: int = 2,
        delay: int = 0,
        batch_size: int | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        sampler: Iterable[int] | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        reduction: Reduction = "mean",
        wire: Wire = "fp32",
    ) -> Steps[LocalRound]:
        """Return an iterator over rounds in which replicas of the model train by themselves and are then averaged:
        local SGD, or with an outer optimizer DiLoCo. Collective.

        ::

            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            run.track(model=model, optimizer=optimizer, outer=outer)
            for round in run.local_steps(data, batch_size=64, microbatches=8, replicas=4, inner_steps=50, outer=outer):
                for step in round:
                    for batch in step:
                        loss_of(model, batch).backward()
                    optimizer.step()
                round.log(loss=round.loss)

        ``for step in round`` gives the steps of the replicas that this worker computes; after it the model is the new
        global one on all workers. Replicas and inner steps are part of the recipe, the number of workers is not: with
        fewer workers than replicas a worker computes several in turn, and a replica of a worker that is lost is
        computed again by another one. A round counts as one step of the run: in the journal, and for checkpoints, which
        are written between two rounds. See docs/local_steps.md.

        Args:
            dataset, batch_size, microbatches, sampler, shuffle, drop_last, collate, loader_workers, reduction: as of
                `steps`. A batch is that of all replicas together; each gets an equal part of it, next to each other, of
                ``microbatches / replicas`` micro-batches.
            replicas: K, the number of replicas.
            inner_steps: H, the steps of each replica in a round; the last round may have fewer.
            outer: a tracked optimizer over the model's parameters, which gets their mean change as gradient, with the
                sign of a gradient; None: each parameter becomes the weighted mean of the replicas' (local SGD).
            inner_state: "kept": a replica keeps the state of its own optimizer from round to round, as in DiLoCo;
                "fresh": it begins each round without.
            delta: what the changes of the replicas travel as. "int8": 3 bytes for each parameter instead of 8, with
                error feedback for each replica. Part of the recipe.
            copies: how many workers hold the state of each replica between two rounds, on different machines where
                there are several; the run survives the loss of all but one of them within a round. Changes no bit.
            delay: only 0; a delay is one of `steps`.
            epochs, max_steps: the length of the training in global batches, which the inner steps of all replicas
                together use up one by one.
            wire: only "fp32"; what travels in a round are changes, see ``delta``.

        Raises:
            RecipeError: batch, micro-batches, replicas and dataset do not fit together. UsageError: something that is
                tracked, or ``outer``, has no meaning in rounds; nothing was trained.
        """
        self._process.check("run.local_steps")
        if delay != 0:
            raise UsageError(
                f"run.local_steps(delay={delay!r}): local steps have no delay any more. In version 0.2.0 delay=1 "
                "applied the mean change of a round at the end of the next one, and sent it meanwhile. Leave delay= "
                "out, and give more inner_steps=, so that the workers exchange less often; or train with "
                "run.steps(delay=1), which sends gradients while the next step is computed. A run that was begun with "
                "delay=1 is gone on with by version 0.2.0 (pip install unisono==0.2.0)"
            )
        replication = Replication(replicas, inner_steps)
        check_count("copies", copies)
        if wire != "fp32":
            raise UsageError(
                f"wire={wire!r} is for run.steps, whose gradients travel in each step. In run.local_steps the changes "
                'of the replicas travel, once in a round: delta="int8" makes those smaller. Leave wire= out'
            )
        planned = schedule(
            dataset,
            "run.local_steps",
            microbatches=microbatches,
            seed=self.seed,
            first_epoch=self._num_epochs,
            asked=self._asked,
            batch_size=batch_size,
            epochs=1 if epochs is None else epochs,
            max_steps=max_steps,
            sampler=sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=collate,
            loader_workers=loader_workers,
        )
        if isinstance(planned, StreamSchedule):
            self._tracked.own(STREAMS, self._asked.bookmarks)
            streams = ReplicaStreams(planned.cursor, replication)
            samples: ReplicaSamples = streams
            planned = dataclasses.replace(planned, inner_steps=inner_steps, samples=streams)
        else:
            samples = ReplicaSamples(planned.cursor, replication)
            planned = dataclasses.replace(planned, inner_steps=inner_steps, samples=samples)
        if self._replicas is None:
            self._replicas = Replicas()
            self._tracked.own(NAME, self._replicas)
        strategy = LocalSteps(
            replication,
            samples,
            planned.num_steps,
            tracked=self._tracked,
            replicas=self._replicas,
            device=self.device,
            outer=outer,
            inner_state=inner_state,
            copies=copies,
            delta=delta,
            reduction=reduction,
            rehearses=self._arithmetic.deterministic,
        )
        return self._begin_loop(
            planned,
            strategy,
            reduction,
            is_limited=epochs is not None or max_steps is not None,
        )
