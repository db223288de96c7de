"""`Run`: the interface of the user's script. Each call is checked here, and done by an object that the run owns:

==============  ================================================================================
`Training`      the training loops, one after the other, and the places of calls
`Course`        how many steps are done; who is told of each: journal, sinks, profile, inspector
`Evaluations`   totals over datasets, at once or beside the training
`Talk`          barriers, values that workers exchange
`Keeper`        checkpoints and journal
`Ending`        the end of the run
==============  ================================================================================
"""

from __future__ import annotations

import dataclasses
import gc
import os
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.cluster.worker import member as members
from unisono.core.cadence import Checkpoints
from unisono.core.errors import UsageError
from unisono.core.settings import AuditThen, Instructions
from unisono.engine.exchange.lanes import LaneMemory
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.loop.process_settings import Arithmetic, choose_device, choose_threads
from unisono.engine.loop.step import Step, Steps, numbers
from unisono.engine.loop.strategies import Strategy
from unisono.engine.microbatch.iterables import Dataset
from unisono.engine.microbatch.losses import Reduction
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds import Round
from unisono.engine.rounds.connect import build_exchange, build_lanes, build_part, open_wire
from unisono.engine.rounds.evaluation import Totals
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import HeadTeam, Team
from unisono.engine.state.tracked import Tracked
from unisono.script import open_runs
from unisono.script.batches import Batches, RunTotal
from unisono.script.closing import Ending
from unisono.script.course import Course
from unisono.script.evaluating import Evaluations
from unisono.script.inspecting import inspector_of
from unisono.script.keeping import Keeper
from unisono.script.loop import Summing, Wire
from unisono.script.profiling import Profiling
from unisono.script.recording import Recorder, Unwatched
from unisono.script.schedule import DataOptions, check_first_step, schedule
from unisono.script.talking import Talk
from unisono.script.training import Training
from unisono.script.worker_troubles import OwnTroubles
from unisono.strategies.audit.audits import Audits, make_audits
from unisono.strategies.delay.pending import NAME as PENDING
from unisono.strategies.delay.pending import Pending
from unisono.strategies.delay.prediction import NAME as PREDICTION
from unisono.strategies.delay.prediction import Prediction
from unisono.strategies.delay.strategy import Delayed, check_delay
from unisono.strategies.evaluators.beside import Evaluation
from unisono.strategies.evaluators.requests import Requests
from unisono.strategies.local.localround import LocalRound, Replication, check_count, check_options, samples_of
from unisono.strategies.local.replica_states import NAME as REPLICAS
from unisono.strategies.local.replica_states import Replicas
from unisono.strategies.local.strategy import Delta, InnerState, LocalSteps
from unisono.strategies.stages.strategy import Staged, evaluated, find_stages
from unisono.system import accelerators, tasks
from unisono.system.arithmetic import check
from unisono.system.process import IS_WATCHED, Process
from unisono.views.watch import Sink, is_of_agents, named

__all__ = ["Run"]

R = TypeVar("R", bound=Round)


class Run:
    """One training job, which begins here and ends with the script::

        run = unisono.Run("runs/digits", seed=7)
        model = Net().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(train_set, batch_size=256, microbatches=8, epochs=10):
            for images, labels in step:
                F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    Started by ``python train.py`` it runs alone, in this process; started by ``unisono run train.py --workers 4`` this
    process is one of four workers. The result is the same, to the bit.

    The run ends at the end of the script (or of the function given to `unisono.launch`), or earlier: at the end of a
    block ``with unisono.Run(...) as run:``, or by `close`. An exception that ends the script ends the run as failed.

    Attributes:
        directory: where it writes (``pathlib.Path``): as ``--run-dir`` says, else as the script does; None: nowhere.
        seed: of everything random, as given.
        device: on which this worker computes (``torch.device``).

    Alone, another ``unisono.Run`` ends the one before it, unless that one is in a ``with`` block: so the cell of a
    notebook may be run twice. At a prompt an exception does not end the run.

    Args:
        directory: where the journal and the checkpoints go; None writes nothing. ``--run-dir`` wins over it.
        seed: of everything random: initial parameters, order of the data, augmentation, dropout.
        threads: CPU threads of a worker, part of what the bits depend on. Default: ``--threads``, else 1.
        device: default: this worker's GPU if there is one, else the CPU.
        arithmetic: the instructions that this process has to compute with, "avx2", "avx512" or "compatible", part of
            what the bits depend on. They are chosen before torch is loaded, by ``--set arithmetic=avx2``, which wins
            over it. Default: what libraries choose for the processor. See docs/guarantees.md.
        deterministic: use deterministic kernels only; torch names an operation that has none. Without it, "same bits"
            is not promised.
        balance: give faster workers more micro-batches. Changes no bit.
        checkpoint: when checkpoints are written, and which are kept; None: only when `save` is called.
        resume: "auto": resume the run in the directory if there is one, else begin. A path: resume from
            that run or checkpoint, which may lie elsewhere, also a URL of copies. ``--resume`` wins over it.
        resume_anyway: names of what may differ from the checkpoint's recipe, e.g. ``{"microbatches"}``. Changes the
            bits.
        overwrite: replace another run that the directory holds; its files are put aside, into ``replaced`` there, until
            the next time. (One without a step is replaced in any case, and removed.)
        sinks: objects with ``emit(event)`` and ``close()`` (`unisono.views.watch.Sink`) that get the run's events. One
            worker at a time gives events to its sinks: the one that writes the journal. A sink that raises is dropped.
        audit: share of the micro-batches that a second worker computes as well, from 0 to 0.5, to find a machine that
            computes wrong values; see docs/audit.md. ``--audit`` wins over it. It changes no bit.
        audit_then: what follows when a worker was found to be wrong: "go-back" to the newest checkpoint from before
            what it may have spoilt, or "go-on". ``--set audit-then`` wins over it.
        profile: steps of the run that torch.profiler records on all workers, e.g. ``range(100, 105)``, for one trace in
            the directory. ``--profile`` wins over it.
        data_digest: a digest of the samples, of any kind, which a certificate of the run names (docs/certificate.md).
            Default: that of the first data set that has one (``datasets.Dataset``).

    Under ``unisono run`` a script makes one of these; `steps` can be called as often as there are phases.

    Raises:
        RunDirectoryError: the directory holds another run. UsageError: it is the second one under ``unisono run``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        device: str | torch.device | None = None,
        arithmetic: Instructions | None = None,
        deterministic: bool = True,
        balance: bool = True,
        checkpoint: Checkpoints | None = None,
        resume: str | os.PathLike[str] | None = None,
        resume_anyway: Collection[str] = (),
        overwrite: bool = False,
        sinks: Sequence[Sink] = (),
        audit: float = 0.0,
        audit_then: AuditThen = "go-back",
        profile: range | None = None,
        data_digest: str = "",
    ) -> None:
        worker = members.spec()
        spec, settings = worker.run, worker.run.settings
        chosen = settings.run_dir or directory
        self.directory = Path(chosen) if chosen is not None else None
        self._inspector = inspector_of(spec)
        keep_best = checkpoint.keep_best if checkpoint is not None else None
        if self._inspector is not None:
            checkpoint, sinks, profile = None, (), None
        self.seed = seed
        self.device = choose_device(device, worker.gpu_number)
        if arithmetic is not None and settings.arithmetic is None and not settings.inspect:
            check(arithmetic, os.environ, is_alone=members.current() is None)
        self._arithmetic = Arithmetic(choose_threads(threads, spec.threads), deterministic)
        self._tracked = Tracked()
        self._keeper = Keeper(
            self.directory,
            tracked=self._tracked,
            policy=checkpoint,
            keep_best=keep_best,
            resume=settings.resume or os.fspath(resume or ""),
            anyway=resume_anyway,
            also_anyway=settings.resume_anyway,
            command=spec.command(),
            copies=settings.copies_to,
            overwrite=overwrite or settings.overwrite,
            device=self.device,
            threads=self._arithmetic.threads,
        )
        self._keeper.inspector = self._inspector
        self._keeper.note_data(data_digest)
        self._process = Process()
        self._talk = Talk(self._tracked, seed)
        audits = make_audits(settings, audit, audit_then, seed, members.current())
        self._requests = Requests(self._tracked, seed=seed, device=self.device, deterministic=deterministic)
        self._recorder = (Recorder if IS_WATCHED else Unwatched)(
            self._keeper.journal, [*sinks, *_named(settings.sinks)], members.current()
        )
        steps = settings.profiled or profile
        profiling = Profiling(steps, self.directory, self.device) if steps is not None else None
        self._replicas = Replicas()
        self._pending, self._prediction = Pending(), Prediction()
        self._made_before: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._begin(members.current(), audits, profiling, balance=balance, patience_s=settings.timeout_s)

    # -- life ----------------------------------------------------------------------------------------

    def _begin(
        self,
        member: members.Member | None,
        audits: Audits | None,
        profiling: Profiling | None,
        *,
        balance: bool,
        patience_s: float,
    ) -> None:
        if member is not None:
            member.begin_run()
        else:
            tasks.refuse_others(os.environ)
            open_runs.end_forgotten()
        run_id = member.welcome.run_id if member is not None else uuid.uuid4().hex[:12]
        with ExitStack() as begun:  # what the end takes back, or an error on the way
            self._arithmetic.enter()
            begun.callback(self._arithmetic.leave)
            self._keeper.enter(run_id, alone=member is None)
            begun.callback(self._keeper.close)
            team = self._make_team(member, checks=audits is not None)
            begun.callback(team.close)
            begun.callback(self._recorder.close)
            kept = self.directory if self._inspector is None else None
            troubles = OwnTroubles(kept, run_id, self.device, member, self._recorder.problem)
            if profiling is not None:
                begun.callback(profiling.close)
            if self._inspector is not None:
                begun.callback(self._inspector.close)
            self._rounds = Rounds(team, self._tracked, reporter=self._keeper, balance=balance)
            if self._inspector is not None:
                self._rounds.taps.append(self._inspector)
            if audits is not None:
                audits.enter(self._rounds)
            if member is not None:
                self._rounds.note_round = member.progress.in_round
            begun.callback(self._rounds.abandon)
            self._course = Course(
                self._rounds,
                self._keeper,
                self._recorder,
                troubles,
                inspector=self._inspector,
                audits=audits,
                profiling=profiling,
            )
            self._training = Training(self._course, self._talk, self._process, self._arithmetic, self.device)
            begun.callback(self._training.close)
            self._evaluations = Evaluations(
                self._course, self._training, self._talk, seed=self.seed, device=self.device, patience_s=patience_s
            )
            self._made_before.update(one for one in gc.get_objects() if issubclass(type(one), nn.Module))
            seed_at(self.seed, "start")
            self._ending = Ending(
                self._course,
                self._training,
                self._evaluations,
                self._process,
                begun=begun.pop_all(),
                is_alone=member is None,
            )
        open_runs.begun(self._ending, is_alone=member is None)

    def __enter__(self) -> Run:
        self._process.check("with run")
        open_runs.in_block(self._ending)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.end(error, "its `with` block is over")

    def close(self) -> None:
        """End the run, as the end of the script would: the last checkpoint and the journal's last line are written.

        Collective. Does nothing if the run has ended.
        """
        self._ending.end(None, "run.close() was called")

    def _make_team(self, member: members.Member | None, *, checks: bool) -> Team:
        device = accelerators.adds_on(self.device)
        if member is None:
            return Team(device)
        settings = member.spec.run.settings
        given: dict[str, Any] = {"member": member, "device": device, "timeout_s": settings.timeout_s}
        build = partial(build_exchange, wanted=settings.exchange, checks=checks, **given)
        part = partial(build_part, wanted=settings.exchange, **given)
        if settings.parts > 1:
            memory = LaneMemory(WorkerPage() if member.page is not None else None)
            build = partial(
                build_lanes,
                member=member,
                timeout_s=settings.timeout_s,
                memory=memory,
                build=build,
                build_part=part,
            )
        return HeadTeam(
            member,
            build,
            partial(open_wire, **given),
            part,
        )

    # -- what the script asks ------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's position among the members right now. It can change: for printing, never for deciding.

        Before the first step, the number of the worker. An evaluator is no member, and has -1.
        """
        member = members.current()
        if self._training.visiting is not None:
            return -1
        if not self._course.has_joined and member is not None:
            return int(member.worker_id.removeprefix("w"))
        return self._rounds.team.rank

    @property
    def num_workers(self) -> int:
        """Number of members right now."""
        return self._rounds.team.size

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that prints and writes."""
        return self.rank == 0 and not self._is_catching_up()

    @property
    def is_catching_up(self) -> bool:
        """Whether the script is at a part of the run that is over already: this worker came later, or the run resumed.

        Such a script skips the steps of its first calls of `steps`, and runs the code between them. What that code
        writes or measures by itself is done; an epoch loop that has much of it says, after its training steps::

            if run.is_catching_up:
                continue
        """
        self._evaluations.collecting.is_guarded = True
        return self._is_catching_up()

    def _is_catching_up(self) -> bool:
        visiting = self._training.visiting
        if visiting is not None and visiting.is_at(self._training.phases):
            return False  # an evaluator, at what it is to evaluate
        return self._training.phases > 0 and not self._course.has_joined

    @property
    def has_begun(self) -> bool:
        """Whether the script has come to a training loop: before it each worker evaluates alone, and then together."""
        return self._training.phases > 0

    @property
    def loss(self) -> float:
        """The mean loss over the steps that are done, of the newest epoch of the newest ``run.steps``; exact.

        Weighted as the gradients are: that of an epoch is the mean over all its samples. (With ``reduction="sum"``, the
        mean over the steps; of several passes over a batch, that of the first in which anything counts.) As `totals`,
        it is known also where the steps were skipped. NaN before the first step.
        """
        return self._tracked.sums.loss(self._training.phases - 1)

    @property
    def totals(self) -> dict[str, Any]:
        """The sums of ``step.add`` over the steps that are done, of the newest epoch of the newest ``run.steps``.

        By name; exact, and equal on all workers. Also on a worker that has skipped that ``run.steps`` because it came
        later.
        """
        return self._training.totals

    def total(self, name: str) -> RunTotal:
        """Return a number that is added up over all workers: for a variable that a loop counts up. Local.

        ::

            train_loss = run.total("train_loss")  # was: train_loss = 0
            for step in run.steps(train_loader, microbatches=8):
                for images, labels in step:
                    loss = F.cross_entropy(model(images), labels)
                    loss.backward()
                    train_loss += loss.detach() * len(labels)
                optimizer.step()
            print(f"{train_loss / len(train_set):.4f}")

        ``+=`` is for the inner loop of a step, where it does what ``step.add`` does, and for the loop over
        `batches`. Outside of these, it is used as a number or tensor (also by numpy and torch; ``total.tensor`` is the
        tensor): the total of the newest epoch, or of the newest loop over `batches`; 0 where nothing was added. To keep
        the value of an epoch, keep ``float(total)`` or ``total.tensor``.

        Args:
            name: in the journal and in `totals`; that of a sum of the training, or of evaluations.
        """
        return RunTotal(name, self._evaluations.add_to_total, self._evaluations.total)

    def log(self, values: Mapping[str, float | Tensor] | None = None, /, **named: float | Tensor) -> None:
        """Write figures into a line of the journal, for charts, tools, reports and ``keep_best``. Collective.

        ::

            run.log({"val/rmse": (squared / n) ** 0.5})

        After a training loop, or within `steps` after the inner loop. The values of rank 0 count. Does nothing in a
        part of the run that is over. After a training loop, the name of `Checkpoints.keep_best` has the checkpoint
        written once more, with this value.

        Args:
            values: numbers, or tensors of one element, by name.
            named: the same.

        Raises:
            UsageError: no step of the run has begun, or a value is no number; called within the inner loop.
        """
        self._evaluations.log(self._training.place("run.log"), numbers(values, named, "run.log"))

    def track(self, **objects: Any) -> None:
        """Name the objects of the run: modules, optimizers, schedulers, and anything with ``state_dict`` and
        ``load_state_dict``.

        Gradients are summed for the parameters of tracked modules and optimizers. A worker that joins receives the
        state of everything that is tracked, and a checkpoint holds it. Every worker names the same objects, before the
        training loop that uses them; a later loop may have more, under new names. Local: nothing is exchanged.

        Raises:
            UsageError: an object has no ``state_dict``, its name is taken, or this is called inside of `steps`.
        """
        self._process.check("run.track")
        if self._training.is_open:
            raise UsageError("run.track was called inside run.steps; track everything before the loop")
        self._tracked.add(objects)
        for name, value in objects.items():
            if isinstance(value, nn.Module):
                self._arithmetic.keep_torchscript_alike(value)
                if value in self._made_before and next(value.parameters(), None) is not None:
                    self._warn_of_early(name)

    def _warn_of_early(self, name: str) -> None:
        member = members.current()
        if member is None or member.worker_id == "w0":  # once for all workers
            warnings.warn(
                f"{name!r} was made before `unisono.Run(...)`, so neither the run's seed nor its number of threads "
                "was in effect: its initial values may differ between one worker and several. Create models, "
                "optimizers and random data after `unisono.Run(...)` (a model whose weights come from a file is the "
                "same wherever it is made)",
                stacklevel=3,
            )

    def add_sink(self, sink: Sink) -> None:
        """Give the run's events to one more object with ``emit(event)`` and ``close()``, from now on; see ``sinks=``.

        Every worker calls this, before its first training loop (a worker that comes later skips what is over), and the
        worker that writes the journal gives its sink the events. A sink that is added while the training goes on gets
        the start of the run first.

        Raises:
            UsageError: it is no sink, or the run has ended.
        """
        self._process.check("run.add_sink")
        if self._inspector is None:
            self._recorder.add_sink(sink)

    # -- training ------------------------------------------------------------------------------------

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
        return self._training.length.epochs(num)

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
                Data without a length: `unisono.Streams`, `unisono.TarShards`, an ``IterableDataset`` (docs/data.md).
            batch_size: samples of a **global** batch; the number of workers does not change it. Default: that of the
                DataLoader or of the `unisono.BucketSampler`.
            microbatches: M, the equal cuts of a global batch; must divide it. Part of the recipe: it changes the
                bits, the number of workers does not. Choose it as the largest number of workers you expect, or a
                small multiple where workers differ in speed (docs/choosing_m.md).
            epochs: passes over the data; default: one, or as many as ``max_steps`` takes. A training with more than one
                ``run.steps`` says its length with `epochs`.
            max_steps: end after so many steps; with ``epochs`` after whichever comes first.
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
                micro-batches. Read docs/strategies.md before you use it.
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
        asked, resized = self._training.asked, None
        if self._inspector is not None:
            given = {"microbatches": microbatches, "batch_size": batch_size, "wire": wire, "delay": delay}
            microbatches, wanted, wire, delay = self._inspector.arguments(given).values()
            resized = wanted if wanted != batch_size else None
        summing = Summing(reduction, wire)
        summing.check(self._tracked)
        check_delay(delay, predict, self._tracked)
        planned = schedule(
            dataset,
            "run.steps",
            microbatches=microbatches,
            seed=self.seed,
            asked=asked,
            batch_size=batch_size,
            resized=resized,
            epochs=epochs,
            max_steps=max_steps,
            sampler=sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=collate,
            loader_workers=loader_workers,
        )
        check_first_step(first_step, planned.num_steps, is_first_loop=asked.num_epochs == 0, delay=delay)
        prediction = self._prediction if predict else None
        if prediction is not None:
            self._tracked.own(PREDICTION, prediction)
        strategy = self._staged("run.steps") or Strategy()
        if delay:
            if isinstance(strategy, Staged):
                raise UsageError(
                    "the model is a unisono.Stages, but run.steps(delay=...) is for models that are not cut: leave out "
                    "one of the two"
                )
            self._tracked.own(PENDING, self._pending)
            strategy = Delayed(delay, planned.num_steps, self._pending, prediction)
        return self._training.begin(dataclasses.replace(planned, delay=delay), strategy, summing, first_step=first_step)

    def _staged(self, call: str) -> Staged | None:
        """Return the strategy for a model that is cut into stages; None: it is not.

        Raises:
            UsageError: the run has groups of several processes, and the model is not cut.
        """
        stages = find_stages(self._tracked)
        if stages is not None:
            return Staged(stages, self._tracked, self._rounds.team)
        if self._rounds.team.num_parts > 1:
            raise UsageError(
                f"{call}: this run has groups of {self._rounds.team.num_parts} processes (--workers "
                f"Nx{self._rounds.team.num_parts}), each of which carries a part of the model, but no unisono.Stages "
                "is tracked: cut the model into stages, or start with --workers N"
            )
        return None

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
        reduction: Reduction = "mean",
        **data: Unpack[DataOptions],
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
        are written between two rounds. See docs/strategies.md.

        Args:
            dataset, microbatches, reduction: as of `steps`. A batch is that of all replicas together; each gets an
                equal part of it, next to each other, of ``microbatches / replicas`` micro-batches.
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
            data: batch_size, epochs, max_steps, sampler, shuffle, drop_last, collate, loader_workers: as of `steps`.
                ``epochs`` and ``max_steps`` are the length of the training in global batches, which the inner steps of
                all replicas together use up one by one.

        Raises:
            RecipeError: batch, micro-batches, replicas and dataset do not fit together. UsageError: something that is
                tracked, or ``outer``, has no meaning in rounds; nothing was trained.
        """
        self._process.check("run.local_steps")
        if find_stages(self._tracked) is not None or self._rounds.team.num_parts > 1:
            raise UsageError(
                "run.local_steps trains replicas of a whole model, not of one that is cut into stages "
                "(unisono.Stages): use run.steps"
            )
        check_options(data, DataOptions.__annotations__)
        replication = Replication(replicas, inner_steps)
        check_count("copies", copies)
        summing, asked = Summing(reduction), self._training.asked
        summing.check(self._tracked)
        planned = schedule(
            dataset,
            "run.local_steps",
            microbatches=microbatches,
            seed=self.seed,
            asked=asked,
            **data,
        )
        samples = samples_of(planned.cursor, replication)
        self._tracked.own(REPLICAS, self._replicas)
        strategy = LocalSteps(
            replication,
            samples,
            planned.num_steps,
            tracked=self._tracked,
            replicas=self._replicas,
            device=accelerators.adds_on(self.device),
            outer=outer,
            inner_state=inner_state,
            copies=copies,
            delta=delta,
            rehearses=self._arithmetic.deterministic,
        )
        planned = dataclasses.replace(planned, inner_steps=inner_steps, samples=samples)
        return self._training.begin(planned, strategy, summing)

    def save(self) -> None:
        """Write a checkpoint now, whatever the policy says.

        Inside of the loop this returns at once, and the call of one worker is enough: the checkpoint will hold the
        state before the next step, or before the one after it. Outside of the loop it is collective: the checkpoint
        holds the current state, and is on the disk when this returns. A script that resumes from it repeats the code
        between the loop and this call, and then has the saved state again.

        Raises:
            UsageError: the run has no directory, or has not begun.
        """
        self._process.check("run.save")
        self._course.check_not_in_batches("run.save was called")
        if self.directory is None:
            raise UsageError("run.save needs the directory of the run: unisono.Run(directory), or --run-dir")
        if not self.has_begun:
            raise UsageError("run.save writes the state of a training; call it inside run.steps, or after it")
        if self._training.is_open:
            self._keeper.saver.request()
        else:
            self._evaluations.save(self._training.place("run.save"))

    def play(self, make: Callable[[Rounds], R]) -> R:
        """Take part in a round of a kind of one's own, between two steps. Collective.

        Args:
            make: returns the round; see `unisono.engine.rounds.Round`.

        Returns:
            The round, which is over then.

        Raises:
            UsageError: no step of the run has begun yet, or it was called within the inner loop.
        """
        self._process.check("run.play")
        if not self._course.has_joined:
            raise UsageError("run.play needs the members of a training; call it inside run.steps, or after it")
        if self._training.is_apart():
            raise UsageError(
                "run.play was called inside a loop in which each worker is elsewhere: call it after that loop"
            )
        round_ = make(self._rounds)
        for _ in self._rounds.play(round_):
            pass
        return round_

    # -- evaluation ----------------------------------------------------------------------------------

    @overload
    def evaluate(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        wait: Literal[True] = True,
    ) -> Totals: ...

    @overload
    def evaluate(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        wait: Literal[False],
    ) -> Evaluation: ...

    def evaluate(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        wait: bool = True,
    ) -> Totals | Evaluation:
        """Return exact totals over a dataset, e.g. of correct answers and samples: no padding, no duplicates, the same
        bits. Collective.

        Tracked modules are in ``eval()`` mode meanwhile, without gradients.

        Args:
            dataset: anything with ``len`` and ``[i]``; data without a length (`TarShards`, an ``IterableDataset``); or
                a ``DataLoader``, whose sampler and ``drop_last`` decide which samples count.
            function: batch -> totals of that batch by name (numbers or tensors), which are added up in float64 or as
                integers.
            batch_size: samples given to ``function`` at a time; every worker evaluates some of the batches. Default:
                that of the DataLoader.
            collate: list of samples -> batch; default: that of ``DataLoader``.
            loader_workers: processes per worker that load data ahead; default: 0, or the DataLoader's.
            wait: False: write a snapshot of the models, and let an evaluator (``unisono run --evaluators N``, ``unisono
                evaluate RUN``) compute the totals while the training goes on. Without an evaluator the workers compute
                them now. The bits are the same.

        Returns:
            The totals by name; int, float, or a CPU tensor of the shape that ``function`` gives. With ``wait=False`` an
            `Evaluation`, whose `result` gives them. Equal on all workers.

        Raises:
            RecipeError: the dataset and the options do not fit together. UsageError: called within the inner loop, or
                ``function`` returns no totals. StepError: ``function`` has made or replaced parameters.
            DivergenceError: the models of the workers, or two results of one batch, are not the same.
        """
        place = self._training.place("run.evaluate")
        if self._rounds.team.num_parts > 1 and (stages := find_stages(self._tracked)) is not None:
            function = evaluated(stages, self._rounds, function)
        request = self._requests.make(
            dataset, function, batch_size=batch_size, collate=collate, loader_workers=loader_workers
        )
        return self._evaluations.now(place, request) if wait else self._evaluations.begin(place, request)

    def batches(
        self,
        dataset: Dataset,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
    ) -> Batches:
        """Return the batches of a dataset for a loop that evaluates, shared out over the workers. Collective.

        ::

            loss, right = run.total("loss"), run.total("right")
            for images, labels in run.batches(test_loader):
                logits = model(images)
                loss += F.cross_entropy(logits, labels, reduction="sum")
                right += (logits.argmax(1) == labels).sum()
            print(loss / len(test_set), right / len(test_set))

        As `evaluate`: exact totals, no padding, no duplicates, the same bits; tracked modules are in ``eval()`` mode
        meanwhile, without gradients. In a part of the run that is over the loop gives no batch, and the totals are
        those that the run had there. See docs/evaluation.md.

        Args:
            dataset, batch_size, collate, loader_workers: as of `evaluate`.

        Returns:
            An iterable with `add`, `totals`, `index` and a length. To leave its loop by ``break`` is an error.

        Raises:
            RecipeError: the dataset and the options do not fit together.
        """
        if self._rounds.team.num_parts > 1:
            raise UsageError(
                "run.batches gives batches to the script, but in this run the model is on several processes "
                f"(--workers Nx{self._rounds.team.num_parts}): use run.evaluate(dataset, function)"
            )
        request = self._requests.make(
            dataset, None, batch_size=batch_size, collate=collate, loader_workers=loader_workers
        )
        return Batches(request.num_batches, partial(self._evaluations.loop, request))

    def collect(self, **rows: Tensor | Sequence[Any] | Any) -> None:
        """Collect rows of the batch in hand, one for each of its samples, e.g. predictions. Local.

        ::

            for images, labels in run.batches(test_loader):
                run.collect(labels=labels, found=model(images).argmax(1))
            f1 = run.once(lambda: f1_score(run.collected("labels"), run.collected("found"), average="macro"))

        Within the loop over `batches`, or in the function of `evaluate`. Each batch collects the same names, once.

        Args:
            rows: by name: tensors of any dtype or numpy arrays, (samples of the batch, ...), or lists of one item for
                each sample (e.g. boxes). Items are as of `broadcast`.

        Raises:
            StepError: called elsewhere. UsageError: there is not one row for each sample, or an item cannot be sent.
        """
        self._evaluations.collecting.collect(rows)

    def collected(self, name: str) -> Any:
        """Return the rows of all samples that `collect` has got, each once, in the order of the dataset. Local.

        Equal on all workers, on the CPU: a tensor or array (samples, ...), or a list, as it was collected. Rows of an
        evaluation within `steps` are known in that step; of one after it, until the next training loop begins. They are
        not kept for a worker that joins in a later loop, or a run that resumes there: keep what is computed of them, by
        `once`. All rows of an evaluation may have 1 GiB; more raise a `UsageError` at its end, before any is sent.

        Raises:
            UsageError: no such rows were collected here, or those of two batches differ in shape or dtype. StepError:
                their evaluation is not over, or was skipped on this worker.
        """
        return self._evaluations.collecting.collected(name, self._training.place("run.collected"))

    @property
    def pending_evaluations(self) -> list[Evaluation]:
        """The evaluations that were begun with ``wait=False`` and whose result was not asked for, the oldest first.
        Local.

        Equal on all workers, also on one that has come later, and in a run that has resumed: their scripts have no
        variable with the handle. So ask for results by it::

            if step.number % 100 == 50:
                for evaluation in run.pending_evaluations:
                    print(evaluation.step, evaluation.result())
        """
        return self._evaluations.pending

    # -- talking -------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all workers have come to this call. Collective.

        A worker that is lost is not waited for, and one that comes later passes at once.

        Raises:
            UsageError: called within the inner loop. StepError: the workers are at different calls.
        """
        self._talk.barrier(self._training.place("run.barrier"))

    def broadcast(self, value: Any) -> Any:
        """Return the main worker's value on all workers, also on those that come to this call later. Collective.

        Args:
            value: numbers, strings, bytes, None, tensors (they arrive on the CPU), numpy arrays, and lists, tuples,
                sets and dicts of them. Only that of the main worker counts; the others may give None. Before the first
                step of the run give it on each: when the first worker is lost, the value of the next one counts.

        Raises:
            UsageError: the value cannot be sent, or the call is within the inner loop. StepError: the workers are at
                different calls.
        """
        return self._talk.broadcast(self._training.place("run.broadcast"), value)

    def once(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns; in a part of the run that is over, what it has returned there. Collective.

        So a worker that comes later, or a run that resumes, has the value without what the function needs::

            f1 = run.once(lambda: f1_score(run.collected("labels"), run.collected("found")))

        Each worker calls the function, which makes no collective call. The value of the main worker counts. It is kept
        with the state of the run, so it should be small.

        Args:
            function: returns a value as of `broadcast`.

        Raises:
            UsageError: the value cannot be sent, or the call is within the inner loop. StepError: the workers are at
                different calls.
        """
        return self._talk.computed(self._training.place("run.once"), function)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank, on all workers. Collective.

        The list is as long as there were workers. **A script whose training depends on it has other bits with another
        number of workers**; use `evaluate` or ``step.add`` for sums that have not.

        Args:
            value: as of `broadcast`.

        Raises:
            UsageError: the value cannot be sent, or the call is within the inner loop. StepError: the workers are at
                different calls.
        """
        return self._talk.all_gather(self._training.place("run.all_gather"), value)

    def main_first(self) -> AbstractContextManager[bool]:
        """Return a context whose block the main worker runs before all others, e.g. to download data. Collective.

        ::

            with run.main_first() as is_first:
                dataset = MNIST("data", download=is_first)

        Each worker runs the block once, and leaves it when all have run it. The value of the context is True on the
        worker that runs it first. If that worker is lost in the block, the next one runs it first. No other collective
        call may be in it. After it the generators have the same state on all workers, whatever it has drawn.

        Raises:
            UsageError: used within the inner loop. StepError: the workers are at different calls.
        """
        return self._talk.main_first(partial(self._training.place, "run.main_first"))

    def process_group(self) -> dist.ProcessGroup:
        """Return a group of ``torch.distributed`` that connects the members of the current generation. Collective.

        For experts. What is exchanged through it is the script's own: the bits may depend on the number of workers, and
        no loss is repaired. Ask for it at every step: as long as the members are the same, that costs one small
        exchange and gives the same group. When the members have changed it gives a new group, and when a member is
        lost, collectives of the old one raise ``RuntimeError``.

        Raises:
            UsageError: called outside of ``run.steps``, where members may not have joined yet, or in the inner loop.
        """
        return self._talk.process_group(self._training.place("run.process_group"))


def _named(texts: Sequence[str]) -> list[Sink]:
    """Return the sinks of the command line."""
    return [sink for text in texts if not is_of_agents(text) and (sink := named(text)) is not None]
