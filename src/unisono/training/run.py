"""A run: what the user's script holds on to."""

from __future__ import annotations

import gc
import os
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import default_collate

from unisono import member as members
from unisono.decisions.cadence import Checkpoints
from unisono.decisions.checks import is_rehearsed, rehearsal
from unisono.decisions.cursor import Cursor
from unisono.decisions.plan import Plan
from unisono.decisions.plan import plan as even_plan
from unisono.errors import RunStopped, StepError, UnisonoError, UsageError
from unisono.faults import at_step, point
from unisono.journal import end_line
from unisono.messages import RunDirectory, StepDone, Told
from unisono.training.agreement import Agreement, Digests, check_digests
from unisono.training.connect import build_exchange
from unisono.training.data import Fetcher, MapDataset, check_dataset
from unisono.training.evaluation import Evaluator, Totals, check_batches, evaluate
from unisono.training.gradients import GradientFolder
from unisono.training.guards import (
    Guards,
    Structure,
    UnusedGradients,
    warn_of_clipping,
    watched_schedulers,
    watched_zero_grad,
)
from unisono.training.keeping import Keeper
from unisono.training.process import Process, tell
from unisono.training.randomness import seed_place
from unisono.training.rounds import Rounds
from unisono.training.settings import Arithmetic, choose_device, choose_threads
from unisono.training.step import Clock, Step, StepContext
from unisono.training.team import AloneTeam, HeadTeam, Team
from unisono.training.tracked import Tracked
from unisono.words import progress

__all__ = ["Run"]

TELL_EVERY_S = 5.0


class Run:
    """One training job. Use it as a context manager around the whole script::

        with unisono.Run("runs/digits", seed=7) as run:
            model = Net().to(run.device)
            optimizer = torch.optim.AdamW(model.parameters())
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(train_set, batch_size=256, microbatches=8, epochs=10):
                for images, labels in step:
                    step.backward(F.cross_entropy(model(images), labels))
                optimizer.step()

    Started by ``python train.py`` it runs alone, in this process; started by ``unisono run train.py --workers 4`` this
    process is one of four workers. The result is the same, to the bit.

    Args:
        directory: where the journal and the checkpoints go; None writes nothing. ``--run-dir`` wins over it.
        seed: of everything random: initial parameters, order of the data, augmentation, dropout.
        threads: CPU threads of a worker, part of what the bits depend on. Default: ``--threads``, else 1.
        device: default: this worker's GPU if there is one, else the CPU.
        deterministic: use deterministic kernels only; torch names an operation that has none. Without it, "same bits"
            is not promised.
        balance: give faster workers more micro-batches. Changes no bit.
        checkpoint: when checkpoints are written, and which are kept; None: only when `save` is called.
        resume: "auto": go on with the run that the directory holds, if it holds one, else begin. A path: go on from
            that run or checkpoint, which may lie elsewhere. ``--resume`` wins over it.
        resume_anyway: names of what may differ from the checkpoint's recipe, e.g. ``{"microbatches"}``. It changes the
            bits.
        overwrite: replace another run that the directory holds.

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
        deterministic: bool = True,
        balance: bool = True,
        checkpoint: Checkpoints | None = None,
        resume: str | os.PathLike[str] | None = None,
        resume_anyway: Collection[str] = (),
        overwrite: bool = False,
    ) -> None:
        told = members.told()
        chosen = told.run_dir or directory
        self.directory = Path(chosen) if chosen is not None else None
        self.seed = seed
        self.device = choose_device(device, told.local_rank)
        self._arithmetic = Arithmetic(choose_threads(threads, told.threads), deterministic)
        self._balance = balance
        self._tracked = Tracked()
        self._keeper = Keeper(
            self.directory,
            tracked=self._tracked,
            policy=checkpoint,
            resume=told.resume or os.fspath(resume or ""),
            anyway=resume_anyway,
            also_anyway=told.resume_anyway,
            command=told.command,
            overwrite=overwrite or told.overwrite,
            device=self.device,
            threads=self._arithmetic.threads,
        )
        self._journal = self._keeper.journal
        self._process = Process()
        self._writes = False
        self._phases = 0
        self._num_evaluations = 0
        self._steps_before = 0
        self._told_at = 0.0
        self._tells = False
        self._done: StepDone | None = None
        self._step: Step | None = None
        self._training: Generator[Step, None, None] | None = None
        self._inside = False
        self._end_step: Callable[[], None] = _nothing
        self._team: Team | None = None
        self._rounds: Rounds | None = None
        self._joined = False
        self._made_before: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    # -- life ----------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        self._process = Process()
        member = members.current()
        if member is not None:
            member.begin_run()
        self._run_id = member.welcome.run_id if member is not None else uuid.uuid4().hex[:12]
        self._keeper.enter(self._run_id, alone=member is None)
        self._arithmetic.enter()
        self._team = self._make_team(member)
        self._rounds = Rounds(self._team, self._tracked, balance=self._balance)
        self._rounds.about_checkpoints = self._keeper.tell
        self._rounds.heard_about_checkpoints = partial(self._keeper.hear, team=self._team)
        self._rounds.unwritten = self._journal.unwritten
        self._made_before.update(one for one in gc.get_objects() if issubclass(type(one), nn.Module))
        seed_place(self.seed, "start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._process.is_this:
            self._process.keep(self)
            return
        try:
            if error is None:
                assert self._rounds is not None
                try:
                    if self._training is not None:
                        self._training.close()
                    self._leave_step()
                    self._note_where_it_was_left()
                    digests = self._tracked.digests()
                    if self._joined:
                        self._end_together(self._rounds, digests)
                except UnisonoError as failure:
                    self._append_failure(failure)
                    raise
                self._append(end_line(ok=True, digests=digests))
            else:
                self._note_place(error)
                if isinstance(error, SystemExit) and error.code in (None, 0) and self._is_step_complete():
                    self._leave_step()
                if self._joined and not self._is_others_affair(error):
                    self._append_failure(error)
        finally:
            if self._training is not None:
                self._training.close()
            assert self._team is not None
            self._team.close()
            self._keeper.close()
            self._arithmetic.leave()

    def _end_together(self, rounds: Rounds, digests: dict[str, str]) -> None:
        """Write the last checkpoint, and compare what the members end with. Collective.

        All members are at the end of the run, and have left the training loop at the same step.

        Raises:
            DivergenceError: the members do not end with the same.
        """
        assert self._team is not None
        self._team.leaving(rounds.phase, rounds.step)
        own = Digests(self._team.arithmetic, digests if self._team.size > 1 else {})
        letters = rounds.together(lambda: None, msgspec.msgpack.encode(own))
        told = [msgspec.msgpack.decode(letter, type=Digests) for letter in letters]
        check_digests(dict(zip(self._team.worker_ids, told, strict=False)))  # before anything of it is kept
        self._keeper.save_together(rounds)
        self._tell_done(None)
        self._team.in_loop(None)

    def _make_team(self, member: members.Member | None) -> Team:
        if member is None:
            return AloneTeam(self.device)
        options = member.welcome.options
        return HeadTeam(
            member,
            lambda notice, rank: build_exchange(
                notice,
                rank,
                member=member,
                device=self.device,
                wanted=options.get("exchange", "auto"),
                timeout_s=float(options.get("timeout_s", "300")),
            ),
        )

    # -- what the script asks ------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's position among the members right now. It can change: for printing, never for deciding."""
        return self._team.rank if self._team is not None else 0

    @property
    def num_workers(self) -> int:
        """How many members there are right now."""
        return self._team.size if self._team is not None else 1

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that prints and writes."""
        return self.rank == 0

    def track(self, **objects: Any) -> None:
        """Name what the run consists of: modules, optimizers, schedulers, and anything with ``state_dict`` and
        ``load_state_dict``.

        Gradients are summed for the parameters of tracked modules and optimizers. A worker that joins receives the
        state of everything that is tracked, and a checkpoint holds it.

        Raises:
            UsageError: an object has no ``state_dict``, or its name is taken.
        """
        self._process.check("run.track")
        if self._inside:
            raise UsageError("run.track was called inside of run.steps; track everything before the loop")
        self._tracked.add(objects)
        for name, value in objects.items():
            if (
                isinstance(value, nn.Module)
                and value in self._made_before
                and next(value.parameters(), None) is not None
            ):
                self._warn_of_early(name)

    def _warn_of_early(self, name: str) -> None:
        member = members.current()
        if member is None or member.worker_id == "w0":  # once for all workers
            warnings.warn(
                f"{name!r} was made before `with unisono.Run(...)` began, so neither the seed of the run nor its "
                "number of threads was in force: its initial values may be others on one worker than on several. Make "
                "models, optimizers and random data inside of the `with` (a model whose weights come from a file is "
                "the same wherever it is made)",
                stacklevel=3,
            )

    def steps(
        self,
        dataset: MapDataset,
        *,
        batch_size: int,
        microbatches: int,
        epochs: int = 1,
        max_steps: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
    ) -> Iterator[Step]:
        """The steps of a training, each to be iterated over its micro-batches. Collective.

        Args:
            dataset: anything with ``len`` and ``[i]``.
            batch_size: samples of a **global** batch; the number of workers does not change it.
            microbatches: M, the equal cuts of a global batch; must divide it. Part of the recipe: it changes the
                bits, the number of workers does not. Choose it as the largest number of workers you expect, not more.
            epochs: passes over the data.
            max_steps: end earlier.
            shuffle: a new order in every epoch.
            drop_last: leave out an epoch's last batch when it is partial; otherwise it is trained, weighted exactly.
            collate: list of samples -> batch; default: that of ``DataLoader``.
            loader_workers: processes per worker that load data ahead; 0 loads in this process.

        Raises:
            RecipeError: batch, micro-batches and dataset do not fit together. Nothing was trained.
            UsageError: nothing is tracked that could be trained.
        """
        self._process.check("run.steps")
        if self._team is None:
            raise UsageError("run.steps works inside `with unisono.Run(...) as run:`")
        cursor = Cursor(
            num_samples=check_dataset(dataset),
            batch_size=batch_size,
            microbatches=microbatches,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        if epochs < 1:
            raise UsageError(f"epochs must be at least 1, got {epochs}")
        self._tracked.check(self.device)
        num_steps = cursor.steps_per_epoch * epochs
        num_steps = num_steps if max_steps is None else min(num_steps, max_steps)
        # A generator would put the checks above off until the first step.
        self._training = self._train(cursor, dataset, num_steps, collate, loader_workers)
        return self._training

    def save(self) -> None:
        """Write a checkpoint now, whatever the policy says.

        Inside of the loop nothing is waited for: it will hold the state before the next step, or before the one after
        it. Outside of the loop it holds the state as it is, and is on the disk when this returns.

        Raises:
            UsageError: the run has no directory, or has not begun.
        """
        self._process.check("run.save")
        if self.directory is None:
            raise UsageError("run.save needs the directory of the run: unisono.Run(directory), or --run-dir")
        if self._rounds is None or not self._joined:
            raise UsageError("run.save writes the state of a training; call it inside of run.steps, or after it")
        self._keeper.saver.request()
        if not self._inside:
            self._keeper.save_together(self._rounds)

    def evaluate(
        self,
        dataset: MapDataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
    ) -> Totals:
        """Exact totals over a dataset, e.g. of correct answers and samples: no padding, no duplicates, the same bits.
        Collective.

        Tracked modules are in ``eval()`` mode meanwhile, without gradients.

        Args:
            function: batch -> totals of that batch by name (numbers or tensors), which are added up in float64 or as
                integers.
            batch_size: samples given to ``function`` at a time; every worker evaluates some of the batches.

        Returns:
            The totals by name; int, float, or a CPU tensor.
        """
        self._process.check("run.evaluate")
        if self._team is None or self._rounds is None:
            raise UsageError("run.evaluate works inside `with unisono.Run(...) as run:`")
        if self._step is not None and self._step.microbatch is not None:
            raise UsageError(
                "run.evaluate was called inside of `for batch in step`, where each worker is at another micro-batch: "
                "call it after that loop"
            )
        num_samples = check_dataset(dataset)
        num_batches = check_batches(num_samples, batch_size)
        rounds = self._rounds if self._joined else None
        rehearses = self._arithmetic.deterministic and is_rehearsed(self._num_evaluations)
        shares = even_plan(self._team.size if rounds is not None else 1, num_batches)
        rank = self._team.rank if rounds is not None else 0
        other = rehearsal(shares, rank, self._num_evaluations).other if rehearses else None
        mine = [*shares.ranges[rank], *([other] if other is not None else [])]
        fetcher = Fetcher(
            dataset,
            lambda _, batch: (0, list(range(batch * batch_size, min((batch + 1) * batch_size, num_samples)))),
            seed=self.seed,
            device=self.device,
            collate=collate,
            loader_workers=loader_workers,
            upcoming=lambda: ((0, batch) for batch in mine),
        )
        before = Structure(self._tracked)
        for tracked in self._tracked.modules.values():
            tracked.eval()
        try:
            evaluator = Evaluator(fetcher, function, self._tracked, seed=self.seed)
            totals = evaluate(
                rounds,
                evaluator,
                num_batches=num_batches,
                rehearses=rehearses,
                number=self._num_evaluations,
            )
            self._num_evaluations += 1
        finally:
            fetcher.close()
            before.restore_modes()
        shown = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in totals.items()}
        self._append({"kind": "evaluation", "step": self._steps_before, "totals": shown})
        # Every member has evaluated other batches, and what comes next may draw random numbers.
        seed_place(self.seed, "after", self._journal.number)
        return totals

    # -- the outer loop ------------------------------------------------------------------------------

    def _train(
        self,
        cursor: Cursor,
        dataset: MapDataset,
        num_steps: int,
        collate: Callable[[list[Any]], Any] | None,
        loader_workers: int,
    ) -> Generator[Step, None, None]:
        assert self._rounds is not None
        assert self._team is not None
        if self._inside:
            raise UsageError(
                "run.steps was called inside of another run.steps; finish the first, or train on both in one loop"
            )
        self._leave_step()
        if self._step is not None and self._joined:
            self._note_where_it_was_left()
            self._team.leaving(self._rounds.phase, self._rounds.step, goes_on=True)
        rounds, phase = self._rounds, self._phases
        self._phases += 1
        first = self._join(phase, cursor, num_steps)
        if first is None:
            return
        if first >= num_steps > 0 and self.is_main:
            tell(f"unisono: nothing is left to do: {progress(first, num_steps)} are done")
        agreement = Agreement(rounds, rehearses=self._arithmetic.deterministic, num_steps=num_steps)
        base = self._steps_before - first
        ahead = _Ahead(rounds, cursor, num_steps, lambda number, plan: agreement.expected(number, base + number, plan))
        fetcher = Fetcher(
            dataset,
            lambda step, leaf: (cursor.position(step).epoch, cursor.indices(step, leaf)),
            seed=self.seed,
            device=self.device,
            collate=collate or default_collate,
            loader_workers=loader_workers,
            upcoming=ahead.upcoming,
        )
        folder = self._make_folder()

        def current_folder() -> GradientFolder:
            nonlocal folder
            if [id(parameter) for _, parameter in self._tracked.trained()] != folder.identities or (
                self._tracked.buffers().places != folder.buffers.places
            ):
                folder.close()
                folder = self._make_folder()
            return folder

        clock = Clock()
        self._inside = True
        unused = UnusedGradients(self._tracked)
        context = StepContext(
            rounds=rounds,
            folder=current_folder,
            fetcher=fetcher,
            cursor=cursor,
            seed=self.seed,
            first_number=base,
            note_plan=ahead.note,
            guards=Guards(self._tracked),
            unused=unused,
            agreement=agreement,
            process=self._process,
        )

        def before_update(name: str) -> None:
            self._refuse_update(name)
            unused.before_update(name)

        hooks = self._tracked.before_updates(before_update)
        try:
            with (
                warn_of_clipping(self._is_in_microbatch),
                watched_zero_grad(unused.dropped),
                watched_schedulers(self._refuse_schedule),
            ):
                for number in range(first, num_steps):
                    at_step(number)
                    self._note_position(number)
                    self._team.in_loop((phase, number))
                    self._keeper.boundary(rounds)
                    seed_place(self.seed, "step", base + number)
                    step = self._step = Step(context, number, clock)
                    self._end_step = partial(self._finish, step, clock, base + num_steps)
                    point("step_head")
                    yield step
                    self._process.check("run.steps")
                    self._leave_step()
            self._note_position(max(first, num_steps))
            self._keeper.save_last(rounds)
            self._step = None
            self._team.in_loop(None)
        finally:
            self._inside = False
            for hook in hooks:
                hook.remove()
            fetcher.close()
            folder.close()

    def _refuse_schedule(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises: StepError: within the inner loop."""
        if self._is_in_microbatch() and any(optimizer is tracked for tracked in self._tracked.optimizers.values()):
            raise StepError(
                "the step() of a learning rate scheduler was called inside of `for batch in step`, where each worker "
                "computes other micro-batches, so it would count other steps on each: call it after that loop"
            )

    def _is_in_microbatch(self) -> bool:
        return self._step is not None and self._step.microbatch is not None

    def _refuse_update(self, name: str) -> None:
        """Raises: StepError: within the inner loop."""
        if self._step is not None and self._step.microbatch is not None:
            raise StepError(
                f"{name}.step() was called inside of `for batch in step` (micro-batch {self._step.microbatch}), where "
                "parameters have no gradient yet: call it after that loop"
            )

    def _note_position(self, step: int) -> None:
        assert self._rounds is not None
        self._rounds.step, self._rounds.total, self._rounds.lines = step, self._steps_before, self._journal.number

    def _note_where_it_was_left(self) -> None:
        """A loop that was left by ``break`` has not come to its end, where it would have said so."""
        if self._step is not None and self._rounds is not None and self._joined:
            self._note_position(self._step.number + (1 if self._step.has_begun else 0))

    def _join(self, phase: int, cursor: Cursor, num_steps: int) -> int | None:
        """Get into the run; returns the step to begin with, None if the run is past this phase."""
        assert self._rounds is not None
        assert self._team is not None
        rounds, recipe = self._rounds, self._keeper.recipe(cursor, num_steps)
        if self._joined:
            rounds.enter_phase(phase, recipe)
            return 0
        if not rounds.join(phase, recipe, partial(self._keeper.begin, phase, cursor)):
            return None
        self._joined = True
        self._steps_before = rounds.total
        self._keeper.joined(cursor, rounds)
        # All who see it: the first may be lost before, or be on a machine where that path is nothing.
        if self._keeper.saver.reaches and self.directory is not None and (member := members.current()) is not None:
            policy = self._keeper.policy
            on_signal = policy.on_signal if policy is not None and policy.on_signal is not None else -1
            member.send(RunDirectory(path=str(self.directory.resolve()), on_signal=on_signal))
        if self._team.size > cursor.microbatches and self.is_main:
            warnings.warn(
                f"{self._team.size} workers share {cursor.microbatches} micro-batches: "
                f"{self._team.size - cursor.microbatches} of them "
                "have nothing to compute; use more micro-batches or fewer workers",
                stacklevel=4,
            )
        return rounds.step

    def _make_folder(self) -> GradientFolder:
        assert self._rounds is not None
        for _, parameter in self._tracked.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # of when it was trained; an optimizer would apply it again
        frozen = [(name, one) for name, one in self._tracked.parameters() if not one.requires_grad]
        folder = GradientFolder(self._tracked.trained(), self._tracked.buffers(), frozen, self._tracked.calls)
        self._rounds.use(folder.layout)
        return folder

    def _leave_step(self) -> None:
        """The loop goes on after the step that it got last, or was left there by ``break``.

        Raises:
            StepError: the step has no gradient.
        """
        end, self._end_step = self._end_step, _nothing
        if self._inside or (self._step is not None and self._step.has_begun):
            end()

    def _is_step_complete(self) -> bool:
        return self._step is not None and self._step.is_complete

    def _finish(self, step: Step, clock: Clock, num_steps: int) -> None:
        """The step is over: its line, for the journal and for who watches."""
        assert self._team is not None
        step.close()
        point("after_step")
        self._steps_before += 1
        seconds = clock.reset()
        assert self._rounds is not None
        workers = {
            worker_id: {
                "leaves": told.leaves,
                "data": round(told.data_s, 6),
                "compute": round(told.compute_s, 6),
                "last": {part: round(value, 6) for part, value in told.last._asdict().items()},
            }
            for worker_id, told in zip(self._team.worker_ids, self._rounds.telemetry, strict=False)
        }
        line = {
            **step.line,
            "num_steps": num_steps,
            "generation": self._team.generation,
            "seconds": {name: round(value, 6) for name, value in seconds.items()},
            "workers": workers,
            "logs": step.logs,
        }
        self._keeper.metrics |= {"loss": line["loss"], **step.logs}
        if news := self._keeper.saver.news():
            line["checkpoint"] = news
        # Not a line of its own: who finishes this step after a loss knows of no change, and lines are numbered alike.
        if step.news:
            line["balance"] = step.news
        if self._team.warnings:
            line["warnings"] = list(self._team.warnings)
            self._team.warnings.clear()
        self._append(line)
        member = members.current()
        # The journal has all of them; on a screen, steps of milliseconds would say nothing else.
        if (
            step.news
            and member is not None
            and self._team.rank == 0
            and time.monotonic() - self._told_at > TELL_EVERY_S
        ):
            self._told_at = time.monotonic()
            member.send(Told(text=step.news))
        if member is not None:
            self._tell_done(
                StepDone(
                    step=line["step"],
                    epoch=line["epoch"],
                    num_steps=num_steps,
                    loss=line["loss"],
                    samples=line["samples"],
                    seconds=sum(seconds.values()),
                    digest=line["digest"],
                    generation=self._team.generation,
                    num_workers=self._team.size,
                    logs=step.logs,
                )
            )

    def _tell_done(self, done: StepDone | None) -> None:
        """Rank 0 tells the head of each step that is done.

        A worker that has become rank 0 tells of its last step first: the rank 0 before it may have been lost between
        that step and telling of it.

        Args:
            done: the step that has just been done; None: there is none.
        """
        assert self._team is not None
        member, is_first = members.current(), self._team.rank == 0
        if member is not None and is_first:
            for each in (None if self._tells else self._done, done):
                if each is not None:
                    member.step_done(each)
        self._tells, self._done = is_first, done or self._done

    def _append(self, line: dict[str, Any]) -> None:
        # In a team nobody has a rank before it has joined; the first writer writes what was said until then.
        # Who was left behind is not the writer any more, whatever its rank was.
        writes = (
            self._team is not None
            and self._keeper.writes(self._team)
            and (self._joined or members.current() is None)
            and not self._team.is_out()
        )
        if writes != self._writes:
            self._writes = writes
            self._journal.start(writer=writes)
        self._journal.append(line, writer=writes)

    def _is_others_affair(self, error: BaseException) -> bool:
        """This worker ends, and the run perhaps does not: it was asked to leave, or another tries the same again."""
        assert self._team is not None
        is_tried_again = self._team.size > 1 and hasattr(error, "unisono_place")
        return isinstance(error, (SystemExit, RunStopped)) or is_tried_again

    def _append_failure(self, error: BaseException) -> None:
        self._append(end_line(ok=False, reason=f"{type(error).__name__}: {error}"))

    def _note_place(self, error: BaseException) -> None:
        """Say where in the data an error of the user's code came from."""
        if self._step is None or isinstance(error, UnisonoError) or not isinstance(error, Exception):
            return
        place = self._step.microbatch
        if place is not None:
            samples = self._step.sample_indices(place)
            shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
            error.add_note(f"(in step {self._step.number}, micro-batch {place}, samples {shown})")
            error.unisono_place = (self._step.place, place, samples)  # type: ignore[attr-defined]


def _nothing() -> None:
    pass


class _Ahead:
    """What this worker will probably compute next, for loader processes."""

    def __init__(
        self, rounds: Rounds, cursor: Cursor, num_steps: int, rehearsed: Callable[[int, Plan], int | None]
    ) -> None:
        self._rounds = rounds
        self._cursor = cursor
        self._num_steps = num_steps
        self._rehearsed = rehearsed
        self._number = -1
        self._plan: Plan | None = None
        self._other: int | None = None

    def note(self, number: int, plan: Plan, other: int | None) -> None:
        self._number, self._plan, self._other = number, plan, other

    def upcoming(self) -> Iterator[tuple[int, int]]:
        rank = self._rounds.team.rank
        if self._plan is not None:
            yield from ((self._number, leaf) for leaf in _of(self._plan, rank))
            if self._other is not None:
                yield self._number, self._other
        for number in range(self._number + 1, self._num_steps):
            plan = self._rounds.predicted(self._cursor.position(number).num_leaves)
            yield from ((number, leaf) for leaf in _of(plan, rank))
            other = self._rehearsed(number, plan)
            if other is not None:
                yield number, other


def _of(plan: Plan, rank: int) -> Sequence[int]:
    """A plan is of one generation, a rank perhaps of the next."""
    return plan.ranges[rank] if rank < len(plan.ranges) else ()
