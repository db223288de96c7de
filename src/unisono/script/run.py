"""`Run`: the interface of the user's script."""

from __future__ import annotations

import gc
import json
import os
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from unisono.cluster.worker import member as members
from unisono.core.audits import too_few
from unisono.core.cadence import Checkpoints, Position
from unisono.core.errors import StepError, UsageError
from unisono.core.events import RunStarted
from unisono.core.messages import RunDirectory
from unisono.core.settings import AuditThen
from unisono.engine.loop.settings import Arithmetic, choose_device, choose_threads
from unisono.engine.loop.step import Iteration, numbers
from unisono.engine.loop.steps import Steps
from unisono.engine.loop.strategies import Strategy
from unisono.engine.microbatch.data import MakeFetcher, Samples
from unisono.engine.microbatch.losses import Reduction
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds import Round
from unisono.engine.rounds.admission import Admission
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.connect import build_exchange, build_part, open_wire
from unisono.engine.rounds.evaluation import Totals
from unisono.engine.rounds.finite import Finiteness
from unisono.engine.rounds.gathering import TalkRound
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import AloneTeam, HeadTeam, Team
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.engine.state.sums import plain
from unisono.engine.state.tracked import Tracked
from unisono.record.rundir import read_facts
from unisono.script import life
from unisono.script.batches import RunTotal
from unisono.script.calls import Calls
from unisono.script.ending import Ending, Reached
from unisono.script.evaluating import About, Evaluating, Evaluations
from unisono.script.evaluator import Visiting
from unisono.script.inspecting import inspector_of
from unisono.script.keeping import Keeper
from unisono.script.length import Length
from unisono.script.loop import TrainingLoop, Wire
from unisono.script.notes import Beginning
from unisono.script.profiling import Profiling
from unisono.script.recording import OUTSIDE, Recorder, Role, Unwatched
from unisono.script.schedule import Planned
from unisono.script.streamed import Asked
from unisono.script.talking import Place, Talk
from unisono.script.trainings import Trainings
from unisono.script.troubles import OwnTroubles
from unisono.strategies.audit.audited import make_audits, spoil
from unisono.strategies.evaluators.requests import drive
from unisono.strategies.local.replica_states import Replicas
from unisono.system import tasks
from unisono.system.process import Process
from unisono.system.unwatched import IS_WATCHED
from unisono.views.watch import Sink, named

__all__ = ["Run"]


class Run(Calls, Evaluating, Trainings):
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

    Alone, another ``unisono.Run`` ends the one before it, unless that one is in a ``with`` block: so the cell of a
    notebook may be run twice. At a prompt an exception does not end the run.

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
            that run or checkpoint, which may lie elsewhere, also a URL of copies. ``--resume`` wins over it.
        resume_anyway: names of what may differ from the checkpoint's recipe, e.g. ``{"microbatches"}``. It changes the
            bits.
        overwrite: replace another run that the directory holds. (One without a step is replaced in any case.)
        sinks: objects with ``emit(event)`` and ``close()`` (`unisono.views.watch.Sink`) that get the run's events. One
            worker at a time gives events to its sinks: the one that writes the journal. A sink that raises is dropped.
        audit: share of the micro-batches that a second worker computes as well, from 0 to 0.5, to find a machine that
            computes wrong values; see docs/audit.md. ``--audit`` wins over it. It changes no bit.
        audit_then: what follows when a worker was found to be wrong: "go-back" to the newest checkpoint from before
            what it may have spoilt, or "go-on". ``--set audit-then`` wins over it.
        profile: steps of the run that torch.profiler records on all workers, e.g. ``range(100, 105)``, for one trace in
            the directory. ``--profile`` wins over it.

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
        sinks: Sequence[Sink] = (),
        audit: float = 0.0,
        audit_then: AuditThen = "go-back",
        profile: range | None = None,
    ) -> None:
        worker = members.spec()
        spec, settings = worker.run, worker.run.settings
        chosen = settings.run_dir or directory
        self.directory = Path(chosen) if chosen is not None else None
        self._inspector = inspector_of(spec)
        if self._inspector is not None:
            checkpoint, sinks, profile = None, (), None
        self._visiting = self._inspector if isinstance(self._inspector, Visiting) else None
        self.seed = seed
        self.device = choose_device(device, worker.gpu_number)
        self._arithmetic = Arithmetic(choose_threads(threads, spec.threads), deterministic)
        self._balance = balance
        self._tracked = Tracked()
        self._keeper = Keeper(
            self.directory,
            tracked=self._tracked,
            policy=checkpoint,
            resume=settings.resume or os.fspath(resume or ""),
            anyway=resume_anyway,
            also_anyway=settings.resume_anyway,
            command=spec.command(),
            copies=settings.copies_to,
            overwrite=overwrite or settings.overwrite,
            device=self.device,
            threads=self._arithmetic.threads,
        )
        self._journal = self._keeper.journal
        self._process = Process()
        self._talk = Talk(self._tracked, seed)
        self._audits = make_audits(settings, audit, audit_then, seed, members.current())
        self._evaluations = Evaluations(
            self._tracked,
            self._talk,
            self._keeper,
            seed=seed,
            device=self.device,
            deterministic=deterministic,
            find_place=self._place,
            record=self._record_evaluation,
            lines=lambda: self._journal.number,
            apart=lambda: self._loop.apart() if self._loop is not None else nullcontext(),
            patience_s=settings.timeout_s,
            visiting=self._visiting,
            audits=self._audits,
        )
        self._recorder = (Recorder if IS_WATCHED else Unwatched)(
            self._journal, [*sinks, *_named(settings.sinks)], members.current()
        )
        steps = settings.profiled or profile
        self._profiling = Profiling(steps, self.directory, self.device) if steps is not None else None
        self._phases = 0
        self._num_steps = 0  # of the run, that are done
        self._num_epochs = 0  # of the calls of `steps` so far
        self._length = Length()
        self._asked = Asked()  # the same for data without a length
        self._loop: TrainingLoop | None = None  # the one that has begun last
        self._training: weakref.ref[Steps[Any]] | None = None  # weak: after a `break` nobody holds it
        self._replicas: Replicas | None = None
        self._team: Team | None = None
        self._rounds: Rounds | None = None
        self._joined = False
        self._beginning: Beginning | None = None
        self._made_before: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._begin(members.current())

    # -- life ----------------------------------------------------------------------------------------

    def _begin(self, member: members.Member | None) -> None:
        if member is not None:
            member.begin_run()
        else:
            tasks.refuse_others(os.environ)
            life.end_forgotten()
        self._run_id = member.welcome.run_id if member is not None else uuid.uuid4().hex[:12]
        with ExitStack() as begun:  # what the end takes back, or an error on the way
            self._arithmetic.enter()
            begun.callback(self._arithmetic.leave)
            self._keeper.enter(self._run_id, alone=member is None)
            begun.callback(self._keeper.close)
            self._team = self._make_team(member)
            begun.callback(self._team.close)
            begun.callback(self._recorder.close)
            kept = self.directory if self._inspector is None else None
            self._troubles = OwnTroubles(kept, self._run_id, self.device, member, self._recorder.problem)
            self._finiteness = Finiteness(self._troubles.not_finite)
            if self._profiling is not None:
                begun.callback(self._profiling.close)
            if self._inspector is not None:
                begun.callback(self._inspector.close)
            self._rounds = Rounds(self._team, self._tracked, reporter=self._keeper, balance=self._balance)
            if member is not None:
                self._rounds.note_round = member.in_round
            self._admission = Admission(self._rounds, self._keeper.checkpoint)
            begun.callback(self._rounds.abandon)
            self._made_before.update(one for one in gc.get_objects() if issubclass(type(one), nn.Module))
            seed_at(self.seed, "start")
            self._ending = Ending(
                self._rounds,
                self._keeper,
                self._recorder,
                self._process,
                role=self._role,
                before_end=self._before_end,
                reached=lambda: Reached(self._loop, self._steps(), self._joined, self._num_steps, self._beginning),
                begun=begun.pop_all(),
                is_alone=member is None,
                troubles=self._troubles,
            )
        life.begun(self._ending, is_alone=member is None)

    def __enter__(self) -> Run:
        self._process.check("with run")
        life.in_block(self._ending)
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

    def _make_team(self, member: members.Member | None) -> Team:
        if member is None:
            return AloneTeam(self.device)
        settings = member.spec.run.settings
        return HeadTeam(
            member,
            lambda notice, rank: build_exchange(
                notice,
                rank,
                member=member,
                device=self.device,
                wanted=settings.exchange,
                timeout_s=settings.timeout_s,
                checks=self._audits is not None,
            ),
            partial(open_wire, member=member, device=self.device, timeout_s=settings.timeout_s),
            partial(
                build_part, member=member, device=self.device, wanted=settings.exchange, timeout_s=settings.timeout_s
            ),
        )

    # -- what the script asks ------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's position among the members right now. It can change: for printing, never for deciding.

        Before the first step, the number of the worker. An evaluator is no member, and has -1.
        """
        member = members.current()
        if self._visiting is not None:
            return -1
        if not self._joined and member is not None:
            return int(member.worker_id.removeprefix("w"))
        return self._team.rank if self._team is not None else 0

    @property
    def num_workers(self) -> int:
        """Number of members right now."""
        return self._team.size if self._team is not None else 1

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that prints and writes."""
        return self.rank == 0 and not self.is_catching_up

    @property
    def is_catching_up(self) -> bool:
        """Whether the script is at a part of the run that is over already: this worker came later, or the run resumed.

        Such a script skips the steps of its first calls of `steps`, and runs the code between them. What that code
        writes or measures by itself is done; an epoch loop that has much of it says, after its training steps::

            if run.is_catching_up:
                continue
        """
        if self._visiting is not None and self._visiting.is_at(self._phases):
            return False  # an evaluator, at what it is to evaluate
        return self._phases > 0 and not self._joined

    @property
    def has_begun(self) -> bool:
        """Whether the script has come to a training loop: before it each worker evaluates alone, and then together."""
        return self._phases > 0

    @property
    def loss(self) -> float:
        """The mean loss over the steps that are done, of the newest epoch of the newest ``run.steps``; exact.

        Weighted as the gradients are: that of an epoch is the mean over all its samples. (With ``reduction="sum"``, the
        mean over the steps; of several passes over a batch, that of the first counts.) As `totals`, it is known also
        where the steps were skipped. NaN before the first step.
        """
        return self._tracked.sums.loss(self._phases - 1)

    @property
    def totals(self) -> dict[str, Any]:
        """The sums of ``step.add`` over the steps that are done, of the newest epoch of the newest ``run.steps``.

        By name; exact, and equal on all workers. Also on a worker that has skipped that ``run.steps`` because it came
        later.
        """
        return self._tracked.sums.totals(self._phases - 1)

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
        `batches`. Outside of these, it is used as a number: the total of the newest epoch, or of the newest loop
        over `batches`; 0 where nothing was added.

        Args:
            name: in the journal and in `totals`; that of a sum of the training, or of evaluations.
        """
        return RunTotal(name, self._add_up, self._added_up)

    def _add_up(self, name: str, value: float | Tensor) -> None:
        loop, batches = self._loop, self._evaluations.in_loop
        if batches is not None:
            self._refuse_two(name, self.totals)
            batches.add(**{name: value})
        elif loop is not None and loop.step is not None:
            self._refuse_two(name, self._evaluations.newest)
            loop.step.add(**{name: value})
        else:
            raise StepError(
                f"run.total({name!r}) += ... stands outside of the loops that it adds up: within `for batch in step` "
                "or `for batch in run.batches(...)`. Elsewhere all workers would add the same"
            )

    def _refuse_two(self, name: str, others: Collection[str]) -> None:
        if name in others:
            raise UsageError(
                f"run.total({name!r}) is added up in the training and in an evaluation: give it another name in one of "
                "the two"
            )

    def _added_up(self, name: str) -> Any:
        self._refuse_in_batches(f"the value of run.total({name!r}) was read")
        if self._loop is not None and self._loop.is_apart():
            raise StepError(f"the value of run.total({name!r}) is known after the inner loop `for batch in step`")
        newest = self._evaluations.newest
        return newest[name] if name in newest else self.totals.get(name, 0)

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
        place = self._place("run.log")
        own, is_new = numbers(values, named, "run.log"), False
        if place.is_early:
            raise UsageError("run.log writes into the journal of a training: call it after the first step of the run")

        def tell() -> Generator[Any, None, dict[str, float]]:
            nonlocal is_new
            if place.is_skipped:
                return {}
            is_new, rounds = True, place.rounds
            said = TalkRound(rounds, "run.log", lambda: to_bytes(own) if rounds.members.rank == 0 else b"")
            yield from rounds.play(said)
            found: dict[str, float] = from_bytes(said.values[0])
            return found

        found = drive(self._talk.once(place, "run.log", tell), lambda nothing: None)
        if place.is_skipped:
            return
        self._keeper.note(found)
        self._recorder.evaluation_finished(self._num_steps, {}, self._role(), logs=found)
        policy = self._keeper.policy
        if is_new and place.step is None and policy is not None and policy.keep_best in found:
            self._keeper.request()  # the checkpoint of this step was written without the figure
            self._keeper.save_together(place.rounds)

    def _refuse_in_batches(self, what: str) -> None:
        """Raise StepError if the script is in a loop over ``run.batches``, or has left one before its end."""
        if self._evaluations.in_loop is not None:
            self._evaluations.in_loop.check_not_open(what)

    def track(self, **objects: Any) -> None:
        """Name the objects of the run: modules, optimizers, schedulers, and anything with ``state_dict`` and
        ``load_state_dict``.

        Gradients are summed for the parameters of tracked modules and optimizers. A worker that joins receives the
        state of everything that is tracked, and a checkpoint holds it. Every worker names the same objects, before its
        training loop. Local: nothing is exchanged.

        Raises:
            UsageError: an object has no ``state_dict``, its name is taken, or this is called inside of `steps`.
        """
        self._process.check("run.track")
        if self._loop is not None and self._loop.is_open:
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
                f"{name!r} was made before `unisono.Run(...)`, so neither the seed of the run nor its number of "
                "threads was in force: its initial values may be others on one worker than on several. Make models, "
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

    def _begin_loop(
        self,
        planned: Planned,
        strategy: Strategy,
        reduction: Reduction,
        *,
        samples: Samples | None = None,
        num_iterations: int | None = None,
        wire: Wire = "fp32",
        first_step: int = 0,
        is_limited: bool = False,
    ) -> Steps[Any]:
        """Return the iterations of a training loop, which begins with the first of them.

        Args:
            is_limited: the script says for how many epochs, or steps, it trains.
            samples: of each micro-batch, where the strategy cuts the data in another way than the cursor.
            num_iterations: how many there are; None: one for each global batch.
            first_step: how many of them count as done when the run begins.
        """
        if reduction not in ("mean", "sum"):
            raise UsageError(f'reduction is "mean" or "sum", as of the losses of torch; got {reduction!r}')
        self._tracked.check(self.device)
        # By what the script asks for, not by what was done: a worker that skips this call must count alike.
        self._num_epochs += planned.num_epochs
        planned.begins()
        rounds, _ = self._in_rounds()
        self._troubles.begins(planned.dataset)
        num_steps = planned.num_steps if num_iterations is None else num_iterations
        loop = TrainingLoop(
            rounds=rounds,
            tracked=self._tracked,
            keeper=self._keeper,
            journal=self._journal,
            process=self._process,
            cursor=planned.cursor,
            num_steps=num_steps,
            seed=self.seed,
            arithmetic=self._arithmetic,
            num_done=lambda: self._num_steps,
            on_step=partial(self._finish, more=self._length.steps_after(num_steps, is_limited=is_limited)),
            finiteness=self._finiteness,
            on_head=self._begin_step,
            before_step=planned.before_step,
            strategy=strategy,
            reduction=reduction,
            wire=wire,
            inspector=self._inspector,
            audits=self._audits,
        )
        # The loop's checks come here, and not with its first step.
        fetcher = planned.fetcher(self.device, samples)
        steps = Steps(self._train(loop, fetcher, first_step), num_steps + strategy.num_more)
        self._training = weakref.ref(steps)
        return steps

    def save(self) -> None:
        """Write a checkpoint now, whatever the policy says.

        Inside of the loop this returns at once, and the call of one worker is enough: the checkpoint will hold the
        state before the next step, or before the one after it. Outside of the loop it is collective: the checkpoint
        holds the current state, and is on the disk when this returns.

        Raises:
            UsageError: the run has no directory, or has not begun.
        """
        self._process.check("run.save")
        self._refuse_in_batches("run.save was called")
        if self.directory is None:
            raise UsageError("run.save needs the directory of the run: unisono.Run(directory), or --run-dir")
        if self._rounds is None or not self._joined:
            raise UsageError("run.save writes the state of a training; call it inside of run.steps, or after it")
        self._keeper.request()
        if self._loop is None or not self._loop.is_open:
            self._keeper.save_together(self._rounds)

    def _place(self, what: str) -> Place:
        """Return the place of a call in which all workers take part, in the script."""
        self._process.check(what)
        self._refuse_in_batches(f"{what} was called")
        if self._rounds is None:
            raise UsageError(f"{what} works inside `with unisono.Run(...) as run:`")
        loop = self._loop
        if self._visiting is not None:
            visited = self._visiting.step
            at = visited.number if visited is not None else None
            return Place(rounds=self._rounds, phases=self._phases, step=at, has_joined=False)
        if loop is not None and loop.is_apart():
            where = "`for batch in step`, where each worker is at another micro-batch"
            if not loop.is_in_microbatch():
                where = "`for step in round`, where each worker is at another replica"
            raise UsageError(f"{what} was called inside of {where}: call it after that loop")
        return Place(
            rounds=self._rounds,
            phases=self._phases,
            step=loop.step.number if loop is not None and loop.is_open and loop.step is not None else None,
            has_joined=self._joined,
        )

    def play(self, make: Callable[[Rounds], Round]) -> Round:
        """Take part in a round of a kind of one's own, between two steps. Collective.

        Args:
            make: returns the round; see `unisono.engine.rounds.Round`.

        Returns:
            The round, which is over then.

        Raises:
            UsageError: no step of the run has begun yet, or it was called within the inner loop.
        """
        self._process.check("run.play")
        if self._rounds is None or not self._joined:
            raise UsageError("run.play needs the members of a training; call it inside of run.steps, or after it")
        if self._loop is not None and self._loop.is_apart():
            raise UsageError(
                "run.play was called inside of a loop in which each worker is elsewhere: call it after that loop"
            )
        round_ = make(self._rounds)
        for _ in self._rounds.play(round_):
            pass
        return round_

    # -- the outer loop ------------------------------------------------------------------------------

    def _train(
        self, loop: TrainingLoop, make_fetcher: MakeFetcher, first_step: int
    ) -> Generator[Iteration, None, None]:
        """The generator behind `steps`."""
        rounds, team = self._in_rounds()
        self._refuse_in_batches("run.steps was called")
        self._evaluations.newest = {}
        if self._visiting is not None:
            phase, self._phases = self._phases, self._phases + 1
            yield from self._visiting.visit(phase, loop, self._tracked, self.device)
            seed_at(self.seed, "after loop", phase)
            return
        if self._loop is not None and self._loop.is_open:
            raise UsageError(
                "run.steps was called inside of another run.steps, which is not finished. For another pass over the "
                "same global batch: `for batch in step.again()`. For two data sets in one loop: one run.steps over a "
                "data set that gives a sample of each, e.g. torch.utils.data.StackDataset(a, b)"
            )
        if self._loop is not None and self._loop.step is not None:
            self._loop.leave()
            if self._joined:
                team.leaving(rounds.position.phase, rounds.position.number, goes_on=True)
        phase, self._phases = self._phases, self._phases + 1
        first = self._join(phase, loop, first_step)
        if first is not None:
            self._loop = loop
            try:
                yield from loop.run(phase, first, make_fetcher)
            except GeneratorExit:  # the script has left the loop by `break`
                if self._phases == phase + 1:
                    seed_at(self.seed, "after loop", phase)
                raise
        # A worker that skips this loop, now or when the run is resumed, draws what the others draw after it.
        seed_at(self.seed, "after loop", phase)

    def _steps(self) -> Steps[Any] | None:
        """Return the iterator of the newest training loop, if the script has not left it."""
        return self._training() if self._training is not None else None

    def _in_rounds(self) -> tuple[Rounds, Team]:
        assert self._rounds is not None
        assert self._team is not None
        return self._rounds, self._team

    def _load(self, phase: int, loop: TrainingLoop) -> Position | None:
        """Load what the run goes on from, on the one worker that begins it; returns its position."""
        if (position := self._keeper.begin(phase, loop.recipe)) is not None:
            self._asked.bookmarks.try_again()  # the script may have been corrected
        return position

    def _join(self, phase: int, loop: TrainingLoop, first_step: int) -> int | None:
        """Join the run; returns the step to begin with, None if the run is past this phase."""
        assert self._rounds is not None
        assert self._team is not None
        rounds, cursor = self._rounds, loop.cursor
        recipe = self._keeper.recipe(loop.recipe, loop.num_steps)
        if self._joined:
            rounds.enter_phase(recipe, msgspec.structs.replace(rounds.position, phase=phase, step=0))
            self._keeper.enter_phase(loop.recipe)
            return 0
        if not self._admission.join(phase, recipe, partial(self._load, phase, loop), first_step):
            return None
        self._joined = True
        self._num_steps = total = rounds.position.total
        self._beginning = Beginning(total, is_newcomer=rounds.number > 0) if total > 0 else None
        self._keeper.joined(loop.recipe, rounds, self._admission.lines)
        if self._audits is not None and rounds.number == 0:
            self._audits.record.begins = total
        # Every member that sees the directory: the first may be lost before, or have no such path on its machine.
        if self._keeper.reaches and self.directory is not None and (member := members.current()) is not None:
            policy = self._keeper.policy
            on_signal = policy.on_signal if policy is not None and policy.on_signal is not None else -1
            facts = json.dumps(read_facts(self.directory))
            member.send(RunDirectory(path=str(self.directory.resolve()), on_signal=on_signal, facts=facts))
        if self._team.size > cursor.microbatches and self.is_main:
            warnings.warn(
                f"{self._team.size} workers share {cursor.microbatches} micro-batches: "
                f"{self._team.size - cursor.microbatches} of them "
                "have nothing to compute; use more micro-batches or fewer workers",
                stacklevel=4,
            )
        if self._audits is not None and self.is_main and (words := too_few(self._team.size)):
            warnings.warn(f"audit: {words}", stacklevel=4)
        started = RunStarted(
            time=round(time.time(), 3),
            run_id=self._run_id,
            directory=str(self.directory or ""),
            step=rounds.position.total,
            recipe=recipe,
        )
        self._recorder.run_started(started, self._role(), is_newcomer=rounds.number > 0)
        return rounds.position.step

    def _begin_step(self, step: int, clock: Clock) -> None:
        spoil(self._tracked)
        if self._profiling is not None:
            self._profiling.step_begins(step, clock)

    def _before_end(self) -> None:
        self._refuse_in_batches("the end of the run was reached")
        if self._inspector is not None:
            self._inspector.at_end()
        if not self._joined:
            return
        self._evaluations.end(self._in_rounds()[0])
        if self._profiling is not None:
            self._profiling.run_ends(self._num_steps, self._in_rounds()[0], sees=self._keeper.reaches)

    def _about(self) -> About:
        loop = self._loop
        if loop is None or not loop.is_open or loop.step is None or not loop.step.is_complete:
            return About(num_steps=self._num_steps)
        step = loop.step
        return About(
            num_steps=self._num_steps, number_in_loop=step.number_in_loop, loss=step.loss, totals=to_bytes(step.totals)
        )

    def _record_evaluation(self, num_steps: int, totals: Totals) -> None:
        self._recorder.evaluation_finished(num_steps, plain(totals), self._role())

    def _finish(self, step: Iteration, seconds: dict[str, float], end: int, *, more: int | None) -> None:
        """Record a step that the script has left.

        Args:
            end: steps of the run at the end of the training loop.
            more: steps of the run after it; None: nobody knows.
        """
        self._refuse_in_batches("the step was ended")
        if step.has_result:
            self._record(step, seconds, end + more if more is not None else 0)
        if self._rounds is not None and self._loop is not None:
            self._troubles.tell_memory(self._rounds, self._loop)
            own_work = self._rounds.members.balancing.own_work
            if self.is_main and (words := own_work.advice(self._loop.cursor.microbatches, self.num_workers)):
                warnings.warn(words, stacklevel=6)
        if self._profiling is not None:
            self._profiling.step_ends(step.number, self._in_rounds()[0], sees=self._keeper.reaches)

    def _record(self, step: Iteration, seconds: dict[str, float], num_steps: int) -> None:
        rounds, team = self._in_rounds()
        self._num_steps += 1
        result = step.result()
        self._keeper.note({"loss": result.loss, **step.logs})
        if self._inspector is not None:
            self._inspector.after_step(result)
        self._recorder.step_finished(
            result,
            self._role(),
            num_steps=num_steps,
            seconds=seconds,
            telemetry=step.telemetry,
            logs=step.logs,
            checkpoint=self._keeper.news(),
            balance=step.news,
            audits=self._audits.take_digests() if self._audits is not None else {},
            warnings=team.take_warnings(),
            sent_bytes=step.sent_bytes + rounds.members.take_delivered_bytes(),
        )

    def _role(self) -> Role:
        team, is_alone = self._team, members.current() is None
        # In a team no worker has a rank before it has joined; the first writer writes the events until then.
        # A worker that was evicted is not the writer any more, whatever its rank was.
        if team is None or not (self._joined or is_alone):
            return OUTSIDE
        writes = self._keeper.writes(team) if self.directory is not None else team.rank == 0
        return Role(
            rank=team.rank,
            generation=team.generation,
            worker_ids=team.worker_ids,
            hosts=team.hosts,
            is_writer=writes and not team.is_evicted(),
            reason=team.reason,
        )


def _named(texts: Sequence[str]) -> list[Sink]:
    """Return the sinks of the command line."""
    return [sink for text in texts if (sink := named(text)) is not None]
