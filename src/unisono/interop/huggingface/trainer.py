"""`UnisonoTrainer`: Hugging Face's ``Trainer``, whose steps the workers of a run compute together.

The Trainer's own loop runs. What it takes for a batch is a `unisono.Step`, and these are its seams:

=========================  =========================================================================================
``_prepare_for_training``  tracks the model, the optimizer and the Trainer's counters; makes the steps of ``run.steps``
``_run_epoch``             gives the loop the steps of an epoch; a worker that has joined later leaves epochs out
``training_step``          computes the micro-batches of this worker
``evaluate``               takes the metrics and the logs of the main worker: a script may have them there only
``evaluation_loop``        shares the batches among the workers (`unisono.interop.huggingface.eval_batches`)
``_save_checkpoint``       the main worker writes, and another one does if that worker is lost on the way
``_finalize_training``     leaves the loop of ``run.steps``
=========================  =========================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, has_length, seed_worker

from unisono.core.errors import UsageError
from unisono.engine.loop.step import Step
from unisono.interop.huggingface.arguments import adapted, check_dataset
from unisono.interop.huggingface.eval_batches import batches_of, is_of_its_own, shared
from unisono.interop.huggingface.trainer_progress import Handler, Handout, RunFollower, TrainerProgress
from unisono.script.run import Run

__all__ = ["UnisonoTrainer"]


class UnisonoTrainer(Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` that trains on any number of workers, with the same bits.

    Takes the arguments of ``Trainer``, and two more. For a subclass of ``Trainer``, inherit from both, this one first:
    ``class UnisonoSeq2SeqTrainer(UnisonoTrainer, Seq2SeqTrainer)``.

    Args:
        run: made before the model.
        microbatches: M, the equal cuts of a global batch. Default: ``gradient_accumulation_steps``, so that a
            micro-batch has ``per_device_train_batch_size`` samples. In both cases the global batch has
            ``per_device_train_batch_size * gradient_accumulation_steps`` samples, at any number of workers.

    Raises:
        UsageError: an argument, or the dataset, has no meaning here; says what to use instead.
    """

    def __init__(self, *given: Any, run: Run, microbatches: int | None = None, **named: Any) -> None:
        named = _by_name(super().__init__, given, named)
        args = named.get("args") or TrainingArguments("tmp_trainer")
        check_dataset(named.get("train_dataset"))
        self.run = run
        self.microbatches = args.gradient_accumulation_steps if microbatches is None else microbatches
        self.steps_per_epoch = 0
        self._handout: Handout | None = None
        self.__dict__["log"] = self._log_and_note  # so that it is the outermost one, also of a class derived from this
        self.__dict__["evaluate"] = self._evaluate_and_tell
        super().__init__(**{**named, "args": adapted(args, run)})
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = 0
        self._progress = TrainerProgress(self)
        self.callback_handler: Handler = Handler.instead_of(self.callback_handler, run.broadcast)
        self.callback_handler.callbacks.insert(0, RunFollower(self, run))
        if self.args.push_to_hub:  # another worker goes on pushing if the one that does is lost
            self.hub_model_id: str | None = run.broadcast(self.hub_model_id)
            self.push_in_progress = None

    # -- who prints and writes -----------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Return whether this worker prints and writes now. Another one does if it is lost."""
        return self.run.is_main

    def is_local_process_zero(self) -> bool:
        """Return whether this worker prints and writes now."""
        return self.run.is_main

    # -- the training --------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train, as ``Trainer.train`` does. Collective.

        Args:
            resume_from_checkpoint: a checkpoint of the Trainer, which all workers can read; True: the newest one in
                ``output_dir``. A run that Unisono resumes (``unisono run --resume``) needs none.

        Raises:
            UsageError: a ``trial`` was given.
        """
        if trial is not None:
            raise UsageError(
                "each trial of a hyperparameter search starts with a new model, but a run of Unisono has only one: "
                "start a run for each trial"
            )
        if self.model_init is not None and self._handout is not None:
            raise UsageError(
                "a Trainer with model_init makes a new model at each call of train, but a run of Unisono trains one: "
                "give model= to train it further, or start a run for each model"
            )
        # The newest one is another when a worker joins later, also where the script has looked for it.
        newest = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else None
        resume_from_checkpoint = self.run.broadcast(newest or resume_from_checkpoint)
        return super().train(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)

    def _log_and_note(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        """Log numbers, which are the same on all workers; those that a subclass adds to them may be of this worker."""
        names, count = set(logs), len(self.state.log_history)
        type(self).log(self, logs, *given, **named)
        if len(self.state.log_history) > count:
            self._progress.note_logged(names)

    def loss_weight(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return what the loss of a micro-batch is a mean over: its labels that are not -100; None: its samples.

        Override it where your loss is a mean over something else.

        Returns:
            () int64
        """
        labels = inputs.get("shift_labels")
        if labels is None and isinstance(labels := inputs.get("labels"), Tensor) and self._loss_shifts_labels:
            labels = labels[..., 1:]
        return labels.ne(-100).sum() if isinstance(labels, Tensor) else None

    def training_step(self, model: nn.Module, inputs: Step, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Compute this worker's micro-batches of a step, and get the gradient of its global batch. Collective.

        Outside of `train` it takes a batch, and does what the Trainer does with it.

        Returns:
            () float32: the mean loss of the global batch.
        """
        if not isinstance(inputs, Step):
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        for batch in inputs:
            self._compute_microbatch(model, inputs, batch)
        return torch.tensor(inputs.loss, device=self.args.device)

    def _compute_microbatch(self, model: nn.Module, step: Step, batch: Any) -> None:
        batch = self._prepare_inputs(batch)
        weight = self.loss_weight(batch)
        step.add(flos=float(super().floating_point_ops(batch)))
        if self.args.include_num_input_tokens_seen != "no":
            step.add(input_tokens=self._count_input_tokens(batch))
        with self.compute_loss_context_manager():
            # A mean over the labels of this micro-batch. At least 1: without labels the loss is 0, and not 0 / 0.
            items = weight.clamp(min=1) if weight is not None else None
            loss = self.compute_loss(model, batch, num_items_in_batch=items)
        if loss.dtype in (torch.bfloat16, torch.float16):
            loss = loss.float()  # these cannot express a weight
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        step.backward(loss, weight=weight, scaler=self.accelerator.scaler)

    def _count_input_tokens(self, batch: Any) -> int:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(batch)
        count, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen - before, before
        return int(count)

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of a step (or of a batch)."""
        if isinstance(inputs, Step):
            return float(inputs.totals["flos"])
        return float(super().floating_point_ops(inputs))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs.totals["input_tokens"]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], None]:
        """Return the next step."""
        return list(islice(epoch_iterator, num_batches)), None

    # -- the loop ------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        optimizer, scaler = self.optimizer.optimizer, self.accelerator.scaler
        self.run.track(model=self.model, optimizer=optimizer, trainer=self._progress)
        if scaler is not None:
            self.run.track(scaler=scaler)
        is_stream = not has_length(train_dataloader)
        per_epoch = max_steps if is_stream else len(train_dataloader)
        steps = self.run.steps(
            _plain(train_dataloader),
            microbatches=self.microbatches,
            epochs=1 if is_stream else self.state.num_train_epochs,
            max_steps=max_steps,
            first_step=self.state.global_step,
        )
        self.steps_per_epoch = per_epoch
        self._handout = Handout(steps, per_epoch=per_epoch, num_steps=max_steps, first=self.state.global_step)
        return prepared

    def _run_epoch(self, *, epoch: int, **others: Any) -> None:
        assert self._handout is not None
        if not self._handout.begins_in(epoch):
            self.callback_handler.is_quiet = True  # this worker came when the epoch was over
            self.control.should_training_stop |= self._handout.is_over
            return
        self.callback_handler.is_quiet = False
        others |= {"train_dataloader": self._handout.of_epoch(), "resume_from_checkpoint": None}
        super()._run_epoch(epoch=epoch, **others)
        is_left = self.state.global_step % self.steps_per_epoch != 0 and not self.control.should_training_stop
        if self.control.should_epoch_stop and is_left:
            raise UsageError(
                "a callback has set control.should_epoch_stop, but a run of Unisono does not skip samples of an epoch: "
                "set control.should_training_stop, or give the Trainer fewer samples"
            )

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        assert self._handout is not None
        best = self.state.best_model_checkpoint
        if not self._handout.has_taken_part:
            if self._handout.is_over:
                self._handout.begins_in(self.state.num_train_epochs)  # raises where the run has steps left
        elif (
            self.args.load_best_model_at_end and best is not None and not all(self.run.all_gather(Path(best).is_dir()))
        ):
            raise UsageError(
                f"load_best_model_at_end reads {best}, which not all workers see: choose an output_dir that all "
                "machines of the run share"
            )
        self._handout.end()
        self.callback_handler.is_quiet = False
        return super()._finalize_training(trial, num_train_samples, start_time)

    # -- evaluation and checkpoints ------------------------------------------------------------------

    def _evaluate_and_tell(self, *given: Any, **named: Any) -> dict[str, float]:
        """Evaluate, and take the metrics and the logs of the main worker. Collective.

        A class of the script's own may compute metrics under ``if args.should_save``, and log under ``if
        args.should_log``: what comes of the training must not depend on who has them.
        """
        first = len(self.state.log_history)
        metrics = type(self).evaluate(self, *given, **named)
        metrics, logs = self.run.broadcast((metrics, self._progress.logs_from(first)))
        self._progress.take_logs(first, logs)
        found: dict[str, float] = metrics
        return found

    def evaluation_loop(self, dataloader: DataLoader[Any], *given: Any, **named: Any) -> Any:
        """Evaluate or predict: each batch once, by one of the workers; the results are equal on all. Collective.

        Where the loader cuts its batches in a way of its own, each worker evaluates all of them.
        """
        batches = batches_of(dataloader, self.run)
        if batches is None:
            return super().evaluation_loop(dataloader, *given, **named)
        with shared(self, self.run, batches) as sizes:
            return super().evaluation_loop(sizes, *given, **named)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        # With eval_on_start: within the first step, where all workers are, and not by one that comes later.
        if skip_scheduler and self._handout is not None and not self._handout.begins_at_first():
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.store_flos()
        is_written, best = False, None
        while not is_written:  # the worker that writes may be lost, and another one takes its place
            with self.run.main_first() as is_main:  # a large model takes long to write, and that is no hang
                if is_main:
                    super()._save_checkpoint(model, trial)
            is_written, best = self.run.broadcast((is_main, self.state.best_model_checkpoint))
        self.state.best_model_checkpoint = best


def _by_name(init: Callable[..., None], given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer by name. Its ``__init__`` may hand on some of them as ``*args, **kwargs``."""
    call = inspect.signature(init).bind(*given, **named)
    found = dict(call.arguments)
    for parameter in call.signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = found.pop(parameter.name, ())
            names = [name for name in inspect.signature(Trainer).parameters if name not in found]
            found |= zip(names, rest, strict=False)
        elif parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name, {})
    return found


def _plain(loader: Any) -> DataLoader[Any]:
    """Return a loader as it was before Accelerate prepared it: what Unisono reads of a loader.

    Raises:
        UsageError: it is none of torch, or makes its batches in a way of its own.
    """
    if is_of_its_own(loader):
        raise UsageError(
            f"get_train_dataloader returned a {type(loader).__qualname__}, and each worker reads the samples that it "
            "computes from the dataset of a torch DataLoader, whose __iter__ is not overridden: return one (several "
            "datasets in a row are a torch.utils.data.ConcatDataset)"
        )
    cuts, init = loader.batch_sampler, loader.worker_init_fn
    options: dict[str, Any] = {"batch_sampler": cuts}
    if isinstance(loader.dataset, IterableDataset):
        options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif type(cuts) is BatchSampler:
        options = {"batch_size": cuts.batch_size, "sampler": cuts.sampler, "drop_last": cuts.drop_last}
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout,
        worker_init_fn=None if getattr(init, "func", None) is seed_worker else init,  # Unisono sets the generators
        multiprocessing_context=loader.multiprocessing_context,
        **options,
    )
