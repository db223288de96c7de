"""`UnisonoStrategy`: a Trainer of Lightning as a script of Unisono.

Each worker looks to Lightning like a training on one device. What Lightning takes for a batch is a step of the run,
whose micro-batches the workers share. Lightning's closure calls ``training_step``, ``zero_grad`` and ``backward``, one
after the other, so the loop over the micro-batches, each with its ``training_step`` and its backward pass, is in
`UnisonoStrategy.backward`, and what Lightning calls for ``training_step`` only remembers its arguments.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning import pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from unisono.core.errors import UsageError
from unisono.engine.loop.step import Step
from unisono.interop.lightning.logs import BatchPlace, LogSums, Results, logged, replay
from unisono.interop.lightning.metrics import Metrics, Rows, metrics_of
from unisono.interop.lightning.refused_options import check
from unisono.interop.lightning.state import TrainerState, install_results
from unisono.interop.lightning.trainer_data import (
    EvaluationLoader,
    GlobalBatch,
    StepLoader,
    WholeSet,
    checked,
    in_global_batches,
    in_one_order,
    steps_of,
    stretches,
)
from unisono.script.run import Run

__all__ = ["UnisonoStrategy"]


class UnisonoStrategy(SingleDeviceStrategy):
    """Trains with ``lightning.pytorch.Trainer`` on any number of workers, with the same bits whatever their number::

        strategy = UnisonoStrategy(microbatches=8, directory="runs/digits", seed=7)
        trainer = Trainer(strategy=strategy, max_epochs=10)
        trainer.fit(LitDigits(), DataLoader(digits, batch_size=256, shuffle=True))

    Started by ``unisono run --workers 4 train.py``, or alone by ``python train.py``. Make it before the module, because
    it begins the run, which sets the seed. See docs/lightning.md.

    Args:
        run: the run; None: one is made, with the further arguments.
        microbatches: M, the equal cuts of the global batch of a step, which is a batch of the training ``DataLoader``,
            or with ``Trainer(accumulate_grad_batches=k)`` k of them.
        accelerator, checkpoint_io, precision_plugin: as of Lightning's strategies.
        options: arguments of `unisono.Run`; ``seed`` is that of ``lightning.seed_everything``, if that was called.

    Raises:
        UsageError: a run and arguments for one were given.
    """

    strategy_name = "unisono"

    def __init__(
        self,
        run: Run | None = None,
        *,
        microbatches: int,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **options: Any,
    ) -> None:
        if run is not None and options:
            raise UsageError(
                f"UnisonoStrategy got a run and {', '.join(f'{name}=' for name in options)}, which are arguments of "
                "unisono.Run: give them there"
            )
        if run is None:
            options.setdefault("seed", int(os.environ.get("PL_GLOBAL_SEED", "0")))
            run = Run(**options)
        self.run = run
        super().__init__(run.device, accelerator, checkpoint_io, precision_plugin)
        self._microbatches = microbatches
        self._metrics = Metrics()
        self._loader: StepLoader | None = None
        self._accumulates = 1
        self._batch: tuple[GlobalBatch, tuple[Any, ...]] | None = None
        self._loss = torch.zeros(())
        self._follow_rank()

    # -- this worker among the others ------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is the one that logs, prints and writes. It can change."""
        return self.run.is_main

    @property
    def global_rank(self) -> int:
        """Position of this worker: for printing, never for deciding."""
        return self.run.rank

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        pass  # of the class above, which has one process

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers. Collective."""
        # Lightning asks for its loaders where it first needs them, which a worker that joins later has not done yet.
        if not (name or "").endswith("_dataloader()"):
            self.run.barrier()
            self._follow_rank()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of the main worker on all. Collective."""
        return self.run.broadcast(obj)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return whether all workers say so, or any. Collective."""
        votes = set(self.run.all_gather(bool(decision)))
        return False not in votes if all else True in votes

    def _follow_rank(self) -> None:
        """Let Lightning's loggers and messages be those of the main worker, which another one may become."""
        wrote_not = getattr(rank_zero_only, "rank", 0) != 0
        rank_zero_only.rank = 0 if self.run.is_main else max(1, self.run.rank)
        if wrote_not and self.run.is_main and self.lightning_module is not None:
            for logger in self.trainer.loggers:
                if isinstance(logger, CSVLogger) and logger._experiment is None:
                    logger._experiment = _NextWriter(logger.log_dir)

    # -- set up ----------------------------------------------------------------------------------------

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that uses this strategy."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def connect(self, model: pl.LightningModule) -> None:
        """See ``Strategy.connect``.

        Raises:
            UsageError: the Trainer or the module asks for what this strategy does not do.
        """
        super().connect(model)
        if model._trainer is not None:
            check(model._trainer, model)
            install_results(model._trainer)

    def setup_environment(self) -> None:
        """Prepare what the workers must agree on before Lightning's hooks. Collective."""
        super().setup_environment()
        self._follow_rank()
        for logger in self.trainer.loggers:
            # Each finds the next free number of a directory by itself, which the first one has made by then.
            if getattr(logger, "_version", 0) is None:
                logger._version = self.run.broadcast(logger.version)
        connector = self.trainer._data_connector
        prepare = type(connector).prepare_data

        def prepare_data() -> None:
            with self.run.main_first():
                prepare(connector)

        connector.prepare_data = prepare_data

    def setup(self, trainer: pl.Trainer) -> None:
        """Place the model, make the optimizers, and let the run track them."""
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        object.__setattr__(module, "_on_before_batch_transfer", self._before_transfer)
        self._metrics = metrics_of(module)
        _track(self.run, "model", module)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for optimizer in self.optimizers:
            _track(self.run, "optimizer", optimizer)
        for config in self.lr_scheduler_configs:
            _track(self.run, "scheduler", config.scheduler)
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            _track(self.run, "scaler", scaler)
        states = (one for one in _tracked[self.run].values() if isinstance(one, TrainerState))
        state = next((one for one in states if one.trainer is trainer), None) or TrainerState(trainer)
        state.use(self._metrics)
        _track(self.run, "trainer", state)

    def teardown(self) -> None:
        """See ``Strategy.teardown``."""
        if (module := self.lightning_module) is not None:
            module.__dict__.pop("_on_before_batch_transfer", None)
        if self._loader is not None:
            self._loader.leave()  # after an error
        self._metrics.release()
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning; if the worker that writes is lost, the next one writes it. Collective."""
        with self.run.main_first() as is_first:
            if is_first:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    # -- data ------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> Any:
        """Return what Lightning's loop iterates over in the place of a loader."""
        trainer, stage = self.trainer, self.trainer.state.stage
        if stage == RunningStage.PREDICTING:
            return dataloader
        if stage != RunningStage.TRAINING:
            return EvaluationLoader(in_one_order(checked(dataloader, "an evaluation")), self._find_place)
        loader = checked(dataloader, "the training")
        batches = int(_parse_num_batches(RunningStage.TRAINING, len(loader), trainer.limit_train_batches))
        self._accumulates = trainer.accumulate_grad_batches

        def find_stretches() -> list[tuple[int, int]]:
            loop, max_epochs = trainer.fit_loop, trainer.fit_loop.max_epochs
            return stretches(
                steps=trainer.global_step,
                epochs=loop.epoch_progress.current.processed,
                done=steps_of(loop.epoch_loop.batch_progress.current.ready, batches, self._accumulates),
                per_epoch=steps_of(batches, batches, self._accumulates),
                max_epochs=-1 if max_epochs is None else max_epochs,
                max_steps=trainer.max_steps,
            )

        self._loader = StepLoader(
            self.run,
            loader,
            in_global_batches(loader, batches=batches, accumulates=self._accumulates),
            microbatches=self._microbatches,
            find_stretches=find_stretches,
            accumulates=trainer.fit_loop._should_accumulate,
            on_step=self._begin_step,
        )
        return self._loader

    def _find_place(self, loader: EvaluationLoader) -> tuple[int, float] | None:
        """Return the number of a loader in Lightning's loop, and how many batches are wanted; None: no evaluation."""
        if not (self.trainer.evaluating or self.trainer.sanity_checking):
            return None
        loop = self.trainer._evaluation_loop
        assert loop._combined_loader is not None
        numbers = (i for i, one in enumerate(loop._combined_loader.flattened) if one is loader)
        number = next(numbers, None)  # None: it is of another evaluation
        return None if number is None else (number, float(loop.max_batches[number]))

    def _begin_step(self, step: Step) -> None:
        if (now := self.trainer.accumulate_grad_batches) != self._accumulates:
            raise UsageError(
                f"UnisonoStrategy: accumulate_grad_batches was {self._accumulates} when the training began, and is "
                f"{now} at step {step.number}: all steps of a training have global batches of one size; for another "
                "size call trainer.fit again"
            )
        self._follow_rank()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """See ``Strategy.batch_to_device``; global batches and whole sets have their data moved part by part."""
        if isinstance(batch, (GlobalBatch, WholeSet)):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def _before_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, (GlobalBatch, WholeSet)):
            return batch
        module = self.lightning_module
        assert module is not None
        return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)

    def _placed(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return a micro-batch after all of Lightning's hooks."""
        batch = self.precision_plugin.convert_input(batch)
        return self.batch_to_device(self._before_transfer(batch, dataloader_idx), dataloader_idx=dataloader_idx)

    # -- a step ----------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Check what is known only now, and let the run, not Lightning, decide what follows at SIGTERM."""
        self.trainer._signal_connector.teardown()
        loader = self.trainer.fit_loop._combined_loader
        if loader is not None and loader.iterables is not loader.flattened[0]:
            raise UsageError(
                f"UnisonoStrategy: trainer.fit got a {type(loader.iterables).__name__} of {len(loader.flattened)} "
                "training loaders, and a step has one global batch: use one DataLoader of a "
                "torch.utils.data.StackDataset(a, b), or of a ConcatDataset([a, b])"
            )

    def on_train_end(self) -> None:
        """End the training loop of the run. Collective."""
        if self._loader is not None:
            self._loader.end()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Remember the arguments for `backward`; returns a stand-in for the loss."""
        batch, *rest = args
        self._batch = batch, tuple(rest)
        return torch.zeros((), device=self.root_device, requires_grad=True)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the micro-batches of a step: ``training_step`` and the backward pass of each. Collective.

        With ``accumulate_grad_batches`` this is done in the last batch of the step, and nothing in those before.
        """
        assert self._batch is not None
        batch, rest = self._batch
        module, step, loop = self.lightning_module, batch.step, self.trainer.fit_loop
        assert module is not None
        if loop._should_accumulate():
            return closure_loss
        first = loop.batch_idx // self._accumulates * self._accumulates
        self._metrics.begin()
        hook, module._current_fx_name = module._current_fx_name, "training_step"
        for data in step.again() if batch.is_computed else step:
            assert step.microbatch is not None
            count = self._microbatches
            place = BatchPlace(step.microbatch, count, len(step.sample_indices(step.microbatch)))
            with self._taking(place, self._placed(data), keeps_rows=False) as (taken, placed):
                batch_idx = first + step.microbatch * self._accumulates // count
                output = super().training_step(placed, *([batch_idx] if rest else []))
                self._backward_of(step, output, optimizer)
            for name, value in taken.sums.items():
                step.add(**{name: value})
        module._current_fx_name = hook
        batch.is_computed = True
        numbers = self._log(step.totals, {})
        step.log(**numbers)
        self._loss = torch.tensor(step.loss, device=self.root_device)
        return self.precision_plugin.post_backward(self._loss, module)

    def _backward_of(self, step: Step, output: Any, optimizer: Optimizer | None) -> None:
        """Run the backward pass of a micro-batch, of which ``training_step`` has returned the output."""
        loss = ClosureResult.from_training_step_output(output).closure_loss  # or raises, as ever
        weight = output.get("weight") if isinstance(output, Mapping) else None
        if loss is None:
            step.backward(None, weight=0)
            return
        module = self.lightning_module
        assert module is not None
        if weight is not None and is_overridden("backward", module, pl.LightningModule):
            raise UsageError(
                f"UnisonoStrategy: {type(module).__name__} has a backward() of its own, and its training_step returned "
                'a "weight", which makes step.backward the backward pass: drop one of them'
            )
        scaled = self.precision_plugin.pre_backward(loss, module)
        if weight is None:
            self.precision_plugin.backward(scaled, module, optimizer)
        else:
            step.backward(loss, weight, scaler=getattr(self.precision_plugin, "scaler", None))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Compute the step, then let the optimizer apply it."""

        def compute() -> Any:
            loss = closure()
            if not isinstance(closure, AbstractClosure):
                return loss
            result: Any = closure._result  # it has the stand-in
            result.loss = self._loss.clone()
            return result.loss

        # Before `optimizer.step`, which may be called when there is a gradient; LBFGS calls it again, for other passes.
        first = [compute()]
        return super().optimizer_step(optimizer, lambda: first.pop() if first else compute(), model, **kwargs)

    # -- an evaluation ---------------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> None:
        """Validate with all batches of a loader. Collective."""
        self._evaluate(super().validation_step, *args)

    def test_step(self, *args: Any, **kwargs: Any) -> None:
        """Test with all batches of a loader. Collective."""
        self._evaluate(super().test_step, *args)

    def _evaluate(self, compute: Callable[..., Any], whole: WholeSet, *rest: int) -> None:
        """
        Args:
            compute: calls ``validation_step`` or ``test_step`` with a batch, and with the other arguments.
            rest: the number of the batch and that of the loader, as far as the module asks for them.
        """

        def function(item: tuple[int, Any]) -> Mapping[str, Any]:
            index, data = item
            place = BatchPlace(index, len(whole), whole.samples_of(index))
            with self._taking(place, self._placed(data, whole.number), keeps_rows=True) as (taken, placed):
                compute(placed, *((index, *rest[1:]) if rest else ()))
            return taken.sums

        def evaluate(dataset: Any) -> Mapping[str, Any]:
            return self.run.evaluate(
                dataset, function, batch_size=1, collate=_only, loader_workers=whole.loader_workers
            )

        with torch.inference_mode(False), torch.no_grad():
            self._metrics.begin()
            totals = evaluate(whole)
            rows = self._gathered_rows(whole, evaluate) if self._metrics.has_rows else {}
            self._log(totals, rows)
        self.trainer._evaluation_loop.batch_progress.is_last_batch = True

    def _gathered_rows(self, whole: WholeSet, evaluate: Callable[[Any], Any]) -> Rows:
        """Return the rows of all batches. Collective."""
        have = dict(self._metrics.rows)
        while self.run.has_begun:  # before, each worker evaluates all batches
            for part in self.run.all_gather(have):
                have.update(part)
            missing = [index for index in range(len(whole)) if index not in have]
            if not missing:
                break
            evaluate(torch.utils.data.Subset(whole, missing))  # type: ignore[arg-type] # of a worker that was lost
            have.update(self._metrics.rows)
        return have

    # -- what is logged --------------------------------------------------------------------------------

    @contextmanager
    def _taking(self, place: BatchPlace, batch: Any, *, keeps_rows: bool) -> Iterator[tuple[LogSums, Any]]:
        """Return a context in which the module computes a micro-batch or batch, and what it logs is taken."""
        results, connector, taken = self._results(), self.trainer._logger_connector, LogSums(place)
        outside = results.batch, connector._current_fx, connector._first_loop_iter
        self._metrics.empty()
        results.taking, results.batch, results.batch_size = taken, batch, None
        connector._first_loop_iter = False  # `self.log` resets nothing, which would be done on this worker only
        try:
            yield taken, batch
        finally:
            results.taking, results.batch_size = None, None
            results.batch, connector._current_fx, connector._first_loop_iter = outside
        self._metrics.take(taken, keeps_rows=keeps_rows)

    def _log(self, totals: Mapping[str, Any], rows: Rows) -> dict[str, float]:
        """Log what all micro-batches or batches have logged; returns the numbers by name."""
        module = self.lightning_module
        assert module is not None
        on_step = {entry.metric for entry, _ in logged(totals) if "step" in entry.flags}
        self._metrics.finish(totals, rows, on_step)
        self._follow_rank()
        return replay(self._results(), self.trainer._logger_connector, module, totals)

    def _results(self) -> Results:
        results = self.trainer._results
        assert isinstance(results, Results)
        return results


class _NextWriter(ExperimentWriter):
    """Writes on in a file of another writer, with its columns; Lightning's own begins by removing it."""

    def _check_log_dir_exists(self) -> None:
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])


_tracked: WeakKeyDictionary[Run, dict[str, Any]] = WeakKeyDictionary()
"""By run: what strategies have tracked, by name."""


def _track(run: Run, kind: str, value: Any) -> None:
    """Let a run track an object, by the next free name of its kind, if it does not yet."""
    known = _tracked.setdefault(run, {})
    if any(one is value for one in known.values()):
        return
    count = sum(name.rstrip("0123456789") == kind for name in known)
    name = kind if count == 0 else f"{kind}{count + 1}"
    run.track(**{name: value})
    known[name] = value


def _only(items: list[Any]) -> Any:
    return items[0]
