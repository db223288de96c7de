"""End of a run: its last step, its last checkpoint, the last line of its journal; what was begun is taken back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec

from unisono.cluster.worker import member as members
from unisono.core.errors import DivergenceError, LossError, RunStopped, StepError, UnisonoError
from unisono.core.words import ALONE_ADVICE, progress
from unisono.engine.loop.step import Iteration, Steps
from unisono.engine.microbatch.data import culprits
from unisono.engine.rounds.agreement import Digests, check_digests, held_by_all, odd_in_objects
from unisono.engine.rounds.gathering import together
from unisono.engine.rounds.weights import WeightsRound
from unisono.engine.state.weights import sha256_of_weights
from unisono.script import open_runs
from unisono.script.course import Beginning, Course
from unisono.script.evaluating import Evaluations
from unisono.script.training import Training
from unisono.system.process import Process, tell

__all__ = ["Ending"]


class Ending:
    """Ends a run, once.

    Args:
        begun: what is taken back at the end.
        is_alone: there are no other workers, and no head that knows how the script ends.
    """

    def __init__(
        self,
        course: Course,
        training: Training,
        evaluations: Evaluations,
        process: Process,
        *,
        begun: ExitStack,
        is_alone: bool,
    ) -> None:
        self._sha256_apart: dict[str, str] = {}  # of modules that no worker has as a whole
        self._rounds = course.rounds
        self._keeper = course.keeper
        self._recorder = course.recorder
        self._process = process
        self._training = training
        self._course = course
        self._evaluations = evaluations
        self._begun: ExitStack | None = begun
        self._is_alone = is_alone

    @property
    def is_training(self) -> bool:
        """Whether the script is between the first step of a training loop and its end."""
        return self._training.is_open

    def end(
        self,
        error: BaseException | None,
        how: str = "the script, or another run in it, ended it",
        *,
        is_at_exit: bool = False,
    ) -> None:
        """End the run, as the script has been left by ``error``. Does nothing the second time, and in a fork.

        Args:
            error: None: all is well, and the end is collective.
            how: the reason, for errors of those who use the run later.
            is_at_exit: of the interpreter, which does not know whether ``sys.exit`` has brought it there.

        Raises:
            UnisonoError: the run could not be ended well; the journal has the reason.
        """
        if not self._process.is_this:
            self._process.keep(self)
            return
        begun, self._begun = self._begun, None
        if begun is None:
            return
        open_runs.ended(self)
        error = error or self._keeper.left_by
        try:
            with begun:
                if (steps := self._training.steps) is not None:
                    begun.callback(steps.close)
                if error is not None and self._has_exited_inside(error):
                    error, leaving = self._exit_inside(), error
                    self._end_badly(error)
                    raise error from leaving
                if error is None or self._is_good_exit(error):
                    self._end_well(steps, error, is_at_exit=is_at_exit)
                else:
                    self._end_badly(error)
        finally:
            self._process.end(how)

    def explain(self, error: BaseException) -> bool:
        """Add to an exception of the script where it was raised; returns whether that was in a micro-batch."""
        if (beginning := self._course.beginning) is not None:
            _note_beginning(error, beginning, self._course.num_steps - beginning.step)
        step = self._training.loop.step if self._training.loop is not None else None
        _note_idle(error, step)
        return _note_microbatch(error, step)

    # -- inside --------------------------------------------------------------------------------------

    def _end_well(self, steps: Steps[Any] | None, error: BaseException | None, *, is_at_exit: bool) -> None:
        course = self._course
        try:
            if steps is not None:
                steps.close()
            if self._training.loop is not None:
                self._training.loop.leave()
            own, held = self._own_digests(), {}
            course.check_not_in_batches("the end of the run was reached")
            if course.inspector is not None:
                course.inspector.at_end()
            if course.has_joined:
                self._evaluations.end(self._rounds)
                course.ends()
                held = self._end_together(own, exits=error is not None)
            digests = self._rounds.tracked.digests(held) if self._rounds.tracked.sharded else dict(own.objects)
        except UnisonoError as failure:
            self._append_failure(failure)
            raise
        if what := self._training.trained_alone():
            self._say_trained_alone(what)
        if course.beginning is not None and course.beginning.step == course.num_steps:
            self._say_nothing_left(course.num_steps)
        elif error is not None or is_at_exit:
            self._say_left(error)
        self._recorder.last_checkpoint(self._keeper.saver.news(), course.role())
        self._recorder.run_ended(course.role(), ok=True, digests=digests, sha256=self._sha256())

    def _sha256(self) -> dict[str, str]:
        """Return the SHA-256 of the weights of each tracked module, by name, where the run has a directory."""
        tracked = self._rounds.tracked
        modules = tracked.modules if self._keeper.directory is not None else {}
        found = {
            name: sha256_of_weights(module.state_dict())
            for name, module in modules.items()
            if name not in tracked.spread_apart
        }
        found |= self._sha256_apart
        return {name: value for name, value in found.items() if value}

    def _say_nothing_left(self, num_steps: int) -> None:
        if self._rounds.team.rank == 0:
            tell(f"unisono: nothing is left to do: {progress(num_steps, num_steps)} are done")

    def _say_trained_alone(self, what: str) -> None:
        """Say that the script has trained without the run; the head does so for all workers, and knows their number."""
        if (member := members.current()) is not None:
            member.trained_alone = what
        else:
            tell(f"unisono: {what}. {ALONE_ADVICE}")

    def _say_left(self, error: BaseException | None) -> None:
        """Say that the script has ended within a training loop, if it has. (By a ``break`` it says so itself.)"""
        loop, done = self._training.loop, self._course.num_steps
        total = loop.end + (self._course.num_more or 0) if loop is not None and loop.step is not None else 0
        if done < total and self._rounds.team.rank == 0:
            what = (
                "the script ended within a training loop (SystemExit: 0)"
                if error
                else "a training loop was left early,"
            )
            tell(f"unisono: {what} after {progress(done, total)}")

    def _end_badly(self, error: BaseException) -> None:
        loop = self._training.loop
        is_tried_again = self.explain(error) and self._rounds.team.size > 1
        if _code_of(error) == 0 and loop is not None and loop.has_gradient():  # asked to leave, after a whole step
            loop.leave()
        # Asked to leave, tried again by another worker, or sent away: the run does not end with this worker.
        goes_on = isinstance(error, RunStopped) or is_tried_again or self._says_nothing(error)
        goes_on = goes_on or (isinstance(error, DivergenceError) and error.goes_on)
        is_end = self._course.has_joined and not goes_on
        if isinstance(error, Exception) and not isinstance(error, RunStopped):
            step, cursor = (loop.step, loop.cursor) if loop is not None else (None, None)
            self._course.troubles.explain(error, self._rounds, step, cursor, is_end=is_end)
        if is_end:
            self._append_failure(error)

    def _own_digests(self) -> Digests:
        tracked = self._rounds.tracked
        return Digests(self._rounds.team.arithmetic, tracked.common_digests(), held=tracked.held_digests())

    def _end_together(self, digests: Digests, *, exits: bool) -> dict[str, dict[int, int]]:
        """Write the last checkpoint, and compare the final digests of the members. Collective.

        All members are at the end of the run, and have left the training loop at the same step.

        Args:
            digests: of this member.
            exits: the script has called ``sys.exit(0)``.

        Returns:
            The digests of the states that all members together hold.

        Raises:
            DivergenceError: the members do not end with the same bits.
        """
        rounds, team = self._rounds, self._rounds.team
        team.leaving(rounds.position.phase, rounds.position.number, exits=exits)
        self._keeper.wait_for_directory()
        own = msgspec.structs.replace(digests, objects=digests.objects if team.size > 1 else {})
        payloads = together(rounds, lambda: None, msgspec.msgpack.encode(own))
        by_worker = {worker: _decode(payload, worker) for worker, payload in payloads.items()}
        odd = odd_in_objects(rounds, by_worker, {})
        by_worker = {worker: each for worker, each in by_worker.items() if worker not in odd}
        check_digests(by_worker)  # before the last checkpoint is kept
        held = held_by_all(by_worker)
        self._keeper.save_together(rounds)
        if rounds.tracked.spread_apart:
            round_ = WeightsRound(rounds.members, rounds.tracked)
            for _ in rounds.play(round_):
                pass
            self._sha256_apart = round_.sha256
        self._recorder.tell_again(self._course.role())
        team.in_loop(None)
        return held

    def _append_failure(self, error: BaseException) -> None:
        self._recorder.run_ended(self._course.role(), ok=False, reason=f"{type(error).__name__}: {error}")

    def _is_good_exit(self, error: BaseException) -> bool:
        """Return whether this is ``sys.exit(0)`` of the script: nobody has asked this worker, or the run, to leave."""
        member = members.current()
        is_asked = self._keeper.is_leaving or (member is not None and member.has_left)
        return _code_of(error) == 0 and not is_asked

    def _has_exited_inside(self, error: BaseException) -> bool:
        """Return whether this is ``sys.exit(0)`` within the inner loop, whose step has no result."""
        loop = self._training.loop
        is_inside = loop is not None and loop.step is not None and loop.step.has_begun and not loop.has_gradient()
        return is_inside and self._is_good_exit(error)

    def _exit_inside(self) -> ExitInside:
        loop = self._training.loop
        assert loop is not None
        assert loop.step is not None
        return ExitInside(
            f"sys.exit(0) was called within the inner loop of {loop.step.name}, which has no gradient then: call it "
            "after `for batch in step`"
        )

    def _says_nothing(self, error: BaseException) -> bool:
        """Return whether this exception does not say how the run ends.

        A worker's SystemExit does not: the head has its exit code, or has asked for it. Alone it does, unless the run
        was asked to stop after the current step.
        """
        code = _code_of(error)
        return code is not None and (code == 0 or not self._is_alone or self._keeper.is_leaving)


class ExitInside(StepError):
    """A script has called ``sys.exit(0)`` within the inner loop. On workers, another one tries the micro-batch."""


def _decode(payload: bytes, worker_id: str) -> Digests:
    """Return the digests that a worker sends at the end of its script.

    Raises:
        StepError: the worker is elsewhere.
    """
    try:
        return msgspec.msgpack.decode(payload, type=Digests)
    except msgspec.MsgspecError:
        raise StepError(
            f"this worker is at the end of its script, and {worker_id} is still training. Do their scripts call "
            "run.steps a different number of times, e.g. because one found a file that the run itself wrote (a "
            "snapshot of the script's own)? Use run.broadcast to give such a value to all workers"
        ) from None


def _code_of(error: BaseException) -> object | None:
    """Return the exit code of a SystemExit, 0 where it has none; None for every other exception."""
    if not isinstance(error, SystemExit):
        return None
    return 0 if error.code is None else error.code


def _note_microbatch(error: BaseException, step: Iteration | None) -> bool:
    """Add to an error of the script the micro-batch that it comes from.

    Returns:
        Whether another worker tries that micro-batch: not if the error comes from none, nor if the loss is not finite,
        which it would be there as well.
    """
    is_loss = isinstance(error, LossError) and error.microbatch >= 0
    if step is None or not isinstance(error, Exception) or _is_final(error):
        return False
    index = step.microbatch
    if index is None:
        return False
    known = culprits(error)
    samples = known or step.sample_indices(index)
    if not is_loss:  # its message says so already
        shown = "" if known else f", samples {', '.join(map(str, samples))}"
        _add_note(error, f"(in {step.name}, micro-batch {index}{shown})")
    if len(samples) == 1 and "more than 1 value per channel" in str(error):
        _add_note(
            error,
            "(a BatchNorm in training needs two samples, and this micro-batch has one: add drop_last=True, or give "
            "another number of microbatches)",
        )
    if (member := members.current()) is not None:
        member.failures.raised_in(error, step.number, index, samples, retry=not is_loss)
    return not is_loss


def _is_final(error: BaseException) -> bool:
    """Return whether no other worker would fare better with the micro-batch, or the error comes from none."""
    is_loss = isinstance(error, LossError) and error.microbatch >= 0
    return isinstance(error, UnisonoError) and not is_loss and not isinstance(error, ExitInside)


def _note_beginning(error: BaseException, beginning: Beginning, num_done: int) -> None:
    """Add to an error of the script that this worker has not run the steps before.

    Args:
        num_done: steps that this worker has done itself. Later only a missing name is explained in this way.
    """
    if isinstance(error, UnisonoError) or not isinstance(error, Exception):
        return
    if num_done > 0 and not isinstance(error, NameError):
        return
    who = "this worker joined the run" if beginning.is_newcomer else "the run was resumed from a checkpoint"
    _add_note(
        error,
        f"({who} and began at step {beginning.step}: variables that the script sets in earlier steps do not exist "
        "here, and its own counters start again. step.index and step.number count from the beginning)",
    )


def _note_idle(error: BaseException, step: Iteration | None) -> None:
    """Add to a missing name that this worker had no micro-batch, in whose inner loop the script sets it."""
    if step is not None and isinstance(error, NameError) and step.has_no_microbatch:
        _add_note(
            error,
            f"(this worker had no micro-batch of {step.name}, so variables that the script sets within `for batch in "
            "step` do not exist here. Use step.loss, step.num_samples, step.index, and step.add with step.totals, "
            "which all workers have)",
        )


def _add_note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
