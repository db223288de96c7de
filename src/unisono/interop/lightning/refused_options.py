"""What a Trainer may ask for that has no meaning, or another one, on workers that share a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from lightning import pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from unisono.core.errors import UsageError

__all__ = ["check"]

_ON_ERRORS: Final = (
    "an error on one worker is unknown to the others, but a checkpoint is written together; give "
    "UnisonoStrategy(checkpoint=unisono.Checkpoints(every_steps=...)), from which the run can resume"
)
_CALLBACKS: Final[dict[type[pl.Callback], str]] = {
    callbacks.GradientAccumulationScheduler: "all steps of a training have a global batch of one size; give "
    "Trainer(accumulate_grad_batches=...), and call trainer.fit again for each phase",
    callbacks.Timer: "the workers' clocks differ, so they would end at different steps; use max_steps=",
    callbacks.StochasticWeightAveraging: "a worker that joins does not get its averages; average in the module, in a "
    "torch.optim.swa_utils.AveragedModel that is one of its submodules",
    callbacks.WeightAveraging: "a worker that joins does not get its averages; average in the module, in a "
    "torch.optim.swa_utils.AveragedModel that is one of its submodules",
    callbacks.BaseFinetuning: "it adds groups to the optimizer while it trains, which a worker that joins does not "
    "know of; give the optimizer all groups from the start, and call trainer.fit again for each phase",
    callbacks.OnExceptionCheckpoint: _ON_ERRORS,
    callbacks.LearningRateFinder: "it trains and then rewinds; find the rate without this strategy, then set it",
    callbacks.BatchSizeFinder: "it trains and then rewinds; `unisono plan --find batch` finds what fits",
}


def check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise UsageError if the Trainer or the module asks for something that UnisonoStrategy does not do."""
    for words in _refusals(trainer, module):
        raise UsageError(f"UnisonoStrategy: {words}")


def _refusals(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    devices: Any = trainer._accelerator_connector._devices_flag
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    if trainer.num_nodes > 1 or (str(devices).isdecimal() and int(devices) > 1):
        yield (
            f"Trainer(devices={devices}, num_nodes={trainer.num_nodes}): each worker is one process with one device. "
            "Leave out devices= and num_nodes=, and use `unisono run --workers N train.py`"
        )
    for hook in ("training_step", "validation_step", "test_step"):
        function = getattr(module, hook)
        if callable(function) and is_param_in_hook_signature(function, "dataloader_iter", explicit=True):
            yield f"{hook}(self, dataloader_iter) fetches batches itself; write {hook}(self, batch, batch_idx)"
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if not module.automatic_optimization:
        yield (
            f"{type(module).__name__} has automatic_optimization=False: its training_step would update the model "
            "within a micro-batch. Use automatic optimization, or write the loop with unisono.Run (step.again() is "
            "another pass, for a second optimizer)"
        )
    if epochs := _given(trainer, "reload_dataloaders_every_n_epochs"):
        yield (
            f"reload_dataloaders_every_n_epochs={epochs}: the order of the data is "
            "fixed for the whole training; call trainer.fit once for each set of data"
        )
    if isinstance(seconds := _given(trainer, "_val_check_time_interval"), (int, float)):
        yield (
            f"val_check_interval of {seconds:g} seconds: the workers' clocks differ, so they would validate at "
            "different steps; give a number of steps, or a share of an epoch"
        )
    for callback in _given(trainer, "callbacks"):
        why = next((words for kind, words in _CALLBACKS.items() if isinstance(callback, kind)), None)
        if isinstance(callback, callbacks.ModelCheckpoint) and callback.save_on_exception:
            why = f"save_on_exception=True: {_ON_ERRORS}"
        if why is not None:
            yield f"the callback {type(callback).__name__}: {why}"


def _given(trainer: pl.Trainer, name: str) -> Any:
    """Return what a Trainer was made with, as its connectors keep it, undeclared."""
    return getattr(trainer, name, None)
