"""How far a Trainer is, as a part of the run's state: workers that join and runs that go on find it there."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, ExportableState, ProgressCallback, TrainerCallback

from unisono.core.errors import UsageError
from unisono.engine.loop.step import Step
from unisono.script.run import Run

__all__ = ["Handler", "Handout", "RunFollower", "TrainerProgress"]

_STATE: Final = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
)
"""What changes in a ``TrainerState``, besides the history of the logs."""
_TIMES: Final = ("_runtime", "_per_second", "_preparation_time")
"""Logged numbers with these endings are of one worker."""
_MEMORY: Final = "_mem_"
_ADDED: Final = ("epoch", "step", "num_input_tokens_seen")
"""What the Trainer adds to each log."""


class TrainerProgress:
    """The Trainer's counters, its logs, its scheduler, and the callbacks that have a state; a tracked object."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._own: dict[int, set[str]] = {}

    def note_logged(self, names: Collection[str]) -> None:
        """Note which numbers of the newest log all workers have. A subclass may have added others to them."""
        history = self._trainer.state.log_history
        self._own[len(history) - 1] = {*history[-1]}.difference(names, _ADDED)

    def logs_from(self, first: int) -> list[tuple[dict[str, Any], list[str]]]:
        """Return the logs from this one on, each with the names of numbers that not all workers have."""
        history = self._trainer.state.log_history
        return [(history[index], sorted(self._own.get(index, ()))) for index in range(first, len(history))]

    def take_logs(self, first: int, logs: Iterable[tuple[dict[str, Any], list[str]]]) -> None:
        """Replace the logs from this one on by those of the main worker."""
        history = self._trainer.state.log_history
        del history[first:]
        for line, own in logs:
            self._own[len(history)] = set(own)
            history.append(line)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            **{name: getattr(trainer.state, name) for name in _STATE},
            "best_checkpoint": self._relative(trainer.state.best_model_checkpoint),
            "log_history": [self._common(*line) for line in enumerate(trainer.state.log_history)],
            "current_flos": trainer.current_flos,
            "loss_since_log": float(trainer._tr_loss),
            "loss_before": trainer._total_loss_scalar,
            "step_of_log": trainer._globalstep_last_logged,
            "schedule": trainer.lr_scheduler.state_dict(),
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for name in (*_STATE, "log_history"):
            setattr(trainer.state, name, state[name])
        best = state["best_checkpoint"]
        trainer.state.best_model_checkpoint = None if best is None else os.path.join(trainer.args.output_dir, best)
        trainer.current_flos = state["current_flos"]
        trainer._tr_loss.fill_(state["loss_since_log"])
        trainer._total_loss_scalar = state["loss_before"]
        trainer._globalstep_last_logged = state["step_of_log"]
        trainer.lr_scheduler.load_state_dict(state["schedule"])
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            vars(callback).update(attributes)

    def _common(self, index: int, line: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of a log that are the same on all workers."""
        own = self._own.get(index, ())
        return {
            name: value
            for name, value in line.items()
            if name not in own and not name.endswith(_TIMES) and _MEMORY not in name
        }

    def _relative(self, checkpoint: str | None) -> str | None:
        """Return where a checkpoint is, seen from the folder of this training, which may have been moved."""
        return None if checkpoint is None else os.path.relpath(checkpoint, self._trainer.args.output_dir)

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


class Handout:
    """The steps of one training, by epoch.

    Args:
        steps: what ``run.steps`` has returned for all epochs. It may begin in the middle: in a worker that has joined
            later, or in a run that goes on.
        per_epoch: steps of an epoch.
        num_steps: of all epochs.
        first: number of the step with which the training begins, on workers that are there from the start.
    """

    def __init__(self, steps: Any, *, per_epoch: int, num_steps: int, first: int = 0) -> None:
        self._steps = steps
        self._first = first
        self._per_epoch = per_epoch
        self._num_steps = num_steps
        self._next: Step | None = None
        self._num_over = 0

    def begins_at_first(self) -> bool:
        """Return whether the next step is the first one of the training. Collective: the first call gets into the run.

        A worker that comes later, and a run that is resumed, begin with another one.
        """
        following = self._look_ahead()
        return following is not None and following.number_in_loop == self._first

    def begins_in(self, epoch: int) -> bool:
        """Return whether the next step is one of an epoch. Collective: the first call gets into the run.

        Raises:
            UsageError: it is one of an epoch before.
        """
        following = self._look_ahead()
        if following is None:
            return False
        if following.number_in_loop // self._per_epoch < epoch:
            raise UsageError(
                f"the run continues with step {following.number_in_loop}, and the Trainer's checkpoint would have it "
                f"begin with step {epoch * self._per_epoch} or later: call train() without resume_from_checkpoint "
                "where a run is resumed (unisono run --resume), or use the Trainer's checkpoint in a new run"
            )
        return following.number_in_loop // self._per_epoch == epoch

    def _look_ahead(self) -> Step | None:
        if self._next is None:
            self._next = next(self._steps, None)
        return self._next

    @property
    def is_over(self) -> bool:
        """Whether no step is left; known after `begins_in`."""
        return self._next is None

    @property
    def has_taken_part(self) -> bool:
        """Whether this worker has been in the training loop, and not come after it."""
        return self._num_over > 0

    def of_epoch(self) -> Iterator[Step]:
        """Yield the rest of the epoch that the next step is in. A step is taken when the one before it is over."""
        while self._next is not None:
            step, self._next = self._next, None
            self._num_over = step.number_in_loop + 1
            yield step
            if self._num_over % self._per_epoch == 0:
                return
            self._next = next(self._steps, None)

    def end(self) -> None:
        """Leave the training loop. Collective."""
        if self._num_over == self._num_steps:
            next(self._steps, None)  # the loop's own end: the last checkpoint
        self._steps.close()


class Handler(CallbackHandler):  # type: ignore[misc]
    """Calls the callbacks, but not for epochs that were over when this worker came; with the main worker's metrics."""

    is_quiet = False
    tell: Callable[[Any], Any]
    """Returns the main worker's value. Collective."""

    @classmethod
    def instead_of(cls, other: CallbackHandler, tell: Callable[[Any], Any]) -> Handler:
        """Return a handler of the same callbacks."""
        handler = cls.__new__(cls)
        handler.__dict__.update(vars(other), tell=tell)
        return handler

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.is_quiet:
            return control
        if event == "on_evaluate":
            kwargs["metrics"] = self.tell(kwargs["metrics"])
        return super().call_event(event, args, state, control, **kwargs)


class RunFollower(TrainerCallback):  # type: ignore[misc]
    """Sets, before other callbacks look, what the Trainer sets once: who prints and writes, and how far the run is."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self._trainer = trainer
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        was_main, is_main = state.is_world_process_zero, self._run.is_main
        state.is_world_process_zero = state.is_local_process_zero = is_main
        if is_main and not was_main:
            for callback in self._trainer.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                    callback.on_train_begin(args, state, control)  # the worker with the bar was lost

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer counts within an epoch from where this worker has begun, which may be in the middle of one.
        epoch, index = divmod(state.global_step - 1, self._trainer.steps_per_epoch)
        state.epoch = epoch + (index + 1) / self._trainer.steps_per_epoch
