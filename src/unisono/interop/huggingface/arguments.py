"""``TrainingArguments`` for one process that sees the global batch, and the arguments that have no meaning here."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Final

from accelerate import PartialState
from accelerate.utils import patch_environment
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from unisono.core.errors import UsageError
from unisono.script.run import Run

__all__ = ["adapted", "check_dataset"]

_REFUSED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "deepspeed": (bool, "leave it out; unisono.shard distributes an optimizer's states"),
    "fsdp": (bool, "leave it out; each worker holds the whole model"),
    "parallelism_config": (bool, "leave it out; each worker holds the whole model"),
    "auto_find_batch_size": (bool, "choose the batch size: it is part of what the bits depend on"),
    "train_sampling_strategy": (
        lambda value: value == "batch_rebalance",
        'choose "group_by_length" (Unisono balances the workers itself, by what they take for a micro-batch)',
    ),
    "ignore_data_skip": (bool, "leave it out: a resumed training computes the samples that are left"),
    "save_on_each_node": (bool, "leave it out: one worker writes; unisono run --copies-to keeps copies elsewhere"),
    "enable_jit_checkpoint": (bool, "use unisono.Checkpoints(exit_code_on_sigterm=...) in unisono.Run(checkpoint=...)"),
    "fp16_full_eval": (bool, "cast the model before the trainer is made"),
    "bf16_full_eval": (bool, "cast the model before the trainer is made"),
    "optim": (
        lambda value: any(kind in str(value).lower() for kind in ("layerwise", "lomo")),
        "choose an optimizer that updates after backward, when the gradient of the global batch is known",
    ),
}
"""By argument: which values are refused, and what to do."""


class _Process:
    """Accelerate's state of this process, in which the worker that prints and writes has the index 0.

    That worker can change in the course of a run.
    """

    def __init__(self, state: PartialState, run: Run) -> None:
        self._state = state
        self._run = run

    @property
    def process_index(self) -> int:
        return 0 if self._run.is_main else 1

    @property
    def local_process_index(self) -> int:
        return self.process_index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_state":  # while it is copied or pickled
            raise AttributeError(name)
        return getattr(self._state, name)

    def __reduce__(self) -> tuple[type[PartialState], tuple[()]]:
        return PartialState, ()  # the arguments are saved beside a model, without the run


def adapted(given: TrainingArguments, run: Run) -> TrainingArguments:
    """Return a copy of the arguments whose batch is the global batch, computed by the device of this worker.

    Raises:
        UsageError: an argument has no meaning here, or the process was started by a launcher of its own.
    """
    for name, (is_refused, instead) in _REFUSED.items():
        value = getattr(given, name, None)
        if is_refused(value):
            raise UsageError(f"TrainingArguments({name}={value!r}) has no meaning with UnisonoTrainer: {instead}")
    if given.world_size > 1:
        raise UsageError(
            f"the process is one of {given.world_size} of a torch.distributed launcher (torchrun, accelerate launch), "
            "but Unisono starts the workers itself: unisono run train.py --workers 4"
        )
    args = copy.copy(given)
    args.per_device_train_batch_size *= args.gradient_accumulation_steps
    args.gradient_accumulation_steps = 1
    args.dataloader_persistent_workers = False  # a loader that is kept cuts each evaluation in another way
    args.accelerator_config = copy.copy(args.accelerator_config)
    args.accelerator_config.use_seedable_sampler = False  # Unisono reads the sampler, and draws by itself
    _use_device(args, run)
    return args


def _use_device(args: TrainingArguments, run: Run) -> None:
    """Let the arguments, and the Accelerator that is made of them, have the device of this worker, and no other."""
    if args.use_cpu and run.device.type != "cpu":
        raise UsageError(
            f'TrainingArguments(use_cpu=True) does not fit a run on {run.device}: unisono.Run(device="cpu")'
        )
    args.use_cpu = run.device.type == "cpu"
    if args.use_cpu and args.fp16 and run.is_main:
        warnings.warn(
            "TrainingArguments(fp16=True) on the CPU: the Trainer computes in float32 there; bf16=True is computed in "
            "bfloat16",
            stacklevel=4,
        )
    vars(args).pop("_setup_devices", None)  # it may be known already, of process 0
    with patch_environment(**({} if args.use_cpu else {"ACCELERATE_TORCH_DEVICE": run.device})):
        device = args.device
    if device != run.device:
        raise UsageError(
            f"the worker's device is {run.device}, but TrainingArguments chose {device}; give the device to "
            "unisono.Run(device=...), and leave ACCELERATE_USE_CPU unset"
        )
    args._n_gpu = int(run.device.type != "cpu")  # never DataParallel
    args.distributed_state = _Process(args.distributed_state, run)


def check_dataset(dataset: Any) -> None:
    """Check a training dataset.

    Raises:
        UsageError: its samples cannot be read a second time, by another worker.
    """
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return
    if dataset is not None:
        raise UsageError(
            f"train_dataset is a {type(dataset).__qualname__}: each worker reads the samples that it computes, so give "
            "a dataset with len and [i], or an IterableDataset of torch or datasets; a list of the samples will do"
        )
