"""Guards: checks that a micro-batch changes nothing but gradients and buffers.

A micro-batch is computed by one worker. Any other change would be on that worker only, and from then on the workers
would train different models. So the guards check after every micro-batch, and at the end of the inner loop. They
**refuse** a change with an error or, where the meaning is plain, **put it back**:

==========================================  ==================================================
change within a micro-batch                 what happens
==========================================  ==================================================
a trained parameter appears, goes, changes  `StepError` (values: see `unisono.engine.state.buffers`)
``module.train()``, ``module.eval()``       put back before and after each micro-batch
``parameter.grad = ...``                    `StepError`, unless it was there before the backward
options of an optimizer, its state          `StepError` at the end of the inner loop
``scheduler.step()``                        `StepError`, also where the scheduler is not tracked
``clip_grad_norm_``                         a warning: there are no gradients yet
==========================================  ==================================================

Guards look at objects and version counters, and at values in a few steps only (`ParameterCheck`), so they cost
microseconds. What they cannot see (a counter in a closure, a generator of the script's own) is found by a rehearsal
(`unisono.core.rehearsals`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler

from unisono.cluster.worker import member as members
from unisono.core.errors import StepError, UsageError
from unisono.engine.state.elsewhere import Elsewhere
from unisono.engine.state.packing import digest_of_each, quick_digest
from unisono.engine.state.tracked import Tracked
from unisono.engine.state.walk import Walk, same_objects, tensors_of_state
from unisono.system.stacks import level_outside

__all__ = [
    "Guards",
    "ParameterCheck",
    "Structure",
    "UnusedGradients",
    "watched_clipping",
    "watched_schedulers",
    "watched_zero_grad",
]

Settings = dict[tuple[str, int | str, str], Any]
"""(optimizer, group, option) -> its value; (module, path, buffer) -> whether it is there; (scheduler, "", counter)."""


class Structure:
    """Modules, parameters and modes of the tracked objects, as they were when this object was made."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._found: Walk | None = None
        self.renew()

    def renew(self) -> None:
        """Remember the current modules, parameters and modes."""
        if self._found is not (found := self._tracked.walk()):
            self._found = found
            self.owners = found.owners
            """(name of what is tracked, path in it, module)."""
            self.attributed = found.attributed
            self._modules = [module for _, module in found.with_modes]
            self._named = dict(found.of_modules)
        self._modes = [module.training for module in self._modules]

    def restore_modes(self) -> None:
        """Put every module back into train() or eval(), as it was."""
        if [module.training for module in self._modules] != self._modes:
            for module, training in zip(self._modules, self._modes, strict=True):
                module.training = training

    def enter(self, what: str) -> None:
        """Begin a part in which attributes of modules may differ between workers; see `Attributes.enter`."""
        self._tracked.attributes.enter(what, self.attributed)

    def leave(self, what: str) -> None:
        """End such a part."""
        self._tracked.attributes.leave(what, self.attributed)

    def check(self, where: str) -> None:
        """Compare the parameters with the remembered ones.

        Raises:
            StepError: a parameter has come, gone or been replaced; names it.
        """
        if (found := self._tracked.walk()) is self._found:
            return
        before, now = self._named, dict(found.of_modules)
        changes = {
            "was replaced": [name for name in now if name in before and now[name] is not before[name]],
            "appeared": [name for name in now if name not in before],
            "disappeared": [name for name in before if name not in now],
        }
        what = next((words for words, names in changes.items() if names), "")
        if what:
            name = changes[what][0]
            raise StepError(
                f"parameter {name!r} {what} within {where}, on this worker only. Create all layers and parameters "
                "before run.steps (if the first batch decides on a shape, pass one batch through the model before "
                "that), and change the model only between two calls of run.steps. To change it by the samples of a "
                "batch (a codebook, centres of classes), sum what you need with step.add, and after the inner loop "
                "write the parameter in place from step.totals"
            )
        self.renew()  # modules without parameters came or went: an activation that forward makes anew each time


class ParameterCheck:
    """Compares the parameters before and after a micro-batch: the worker that computes it would drift away from all
    others. Local.

    Args:
        trained: (name, parameter), those that need a gradient.
        frozen: (name, parameter), those that need none.
    """

    def __init__(self, trained: Sequence[tuple[str, nn.Parameter]], frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = [*trained, *frozen]
        self._frozen = list(frozen)
        self._needs_gradient = [True] * len(trained) + [False] * len(frozen)
        self._versions: list[int] = []
        self._gradients: list[Tensor | None] = []
        self._digests: list[int] | None = None

    def start(self, *, compare_bits: bool) -> None:
        """Remember the parameters before a micro-batch.

        Args:
            compare_bits: also take digests, which see what is written through ``.data`` and not counted.
        """
        self._versions = [parameter._version for _, parameter in self._named]
        self._gradients = [parameter.grad for _, parameter in self._frozen]
        if compare_bits:
            self._digests = digest_of_each([parameter for _, parameter in self._named])

    def check(self) -> None:
        """Compare the parameters after the micro-batch.

        Raises:
            StepError: one was written, frozen, thawed, or has got a gradient though it is frozen.
        """
        changed = _first_difference(self._versions, [parameter._version for _, parameter in self._named])
        digests, self._digests = self._digests, None
        if changed is None and digests:
            changed = _first_difference(digests, digest_of_each([parameter for _, parameter in self._named]))
        if changed is not None:
            raise StepError(
                f"parameter {self._named[changed][0]!r} was changed within a micro-batch, only on the worker that "
                "computed the micro-batch. Update parameters after the inner loop (by statistics of the batch: from "
                "step.totals, summed with step.add); use nn.Embedding without max_norm (or renormalise after "
                "optimizer.step()); if the first batch initialises parameters, pass one batch through the model before "
                "run.steps. `unisono check SCRIPT` names the line"
            )
        other = _first_difference(self._needs_gradient, [parameter.requires_grad for _, parameter in self._named])
        if other is None:
            pairs = zip(self._frozen, self._gradients, strict=True)
            learned = (index for index, ((_, one), before) in enumerate(pairs) if one.grad is not before)
            first = len(self._named) - len(self._frozen)
            other = next((first + index for index in learned), None)
        if other is not None:
            was_trained = self._needs_gradient[other]
            raise StepError(
                f"parameter {self._named[other][0]!r} was {'frozen' if was_trained else 'unfrozen'} within a "
                f"micro-batch (requires_grad was {was_trained} when the step began), so its gradient differs between "
                "the workers. Freeze and unfreeze parameters before the inner loop, or set requires_grad back before "
                "the micro-batch ends, and make sure that a frozen parameter gets no gradient in between"
            )


class Guards:
    """Guards of one ``run.steps``. Local."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        tracked.attributes.begin()
        self._structure = Structure(tracked)
        self._settings: Settings = {}
        self._states: list[Tensor] = []
        self._versions: list[int] = []
        self._rows: dict[str, tuple[int, ...]] = {}

    def start_step(self) -> None:
        """Remember the settings and states before the micro-batches of a step."""
        self._structure.renew()
        self._settings = self._current_settings()
        self._states = _optimizer_states(self._tracked)
        self._versions = [tensor._version for tensor in self._states]
        self._rows = self._versions_of_rows()
        self._structure.enter("step")

    def finish_microbatch(self, where: str, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Check that a micro-batch has left no gradients for the next one, and put modes back.

        Args:
            where: ``step 3, micro-batch 2``.
            trained: (name, parameter), whose gradients were taken.

        Raises:
            StepError: the micro-batch has left gradients.
        """
        self._structure.restore_modes()
        left = [name for name, parameter in trained if parameter.grad is not None]
        if left:
            raise StepError(
                f"parameter {left[0]!r} has a gradient at the end of {where} that step.backward did not compute "
                "(parameter.grad = ...), on this worker only. Add a term to the loss instead, or change gradients "
                "after the inner loop, where .grad is the mean over the global batch"
            )

    def finish_step(self, step: str) -> None:
        """Check that the inner loop has changed no parameter, setting or optimizer state.

        Raises:
            StepError: a parameter, an option, a scheduler or an optimizer's state has changed; names it.
        """
        self._structure.check(f"the inner loop of {step}")
        self._structure.leave("step")
        _check_settings(self._settings, self._current_settings())
        states = _optimizer_states(self._tracked)
        if not same_objects(states, self._states) or [tensor._version for tensor in states] != self._versions:
            raise StepError(
                "the state of an optimizer was changed within `for batch in step`, where each worker computes "
                "different micro-batches. Change it after this loop"
            )

        if (rows := self._versions_of_rows()) != self._rows:
            changed = next(name for name in rows if rows[name] != self._rows.get(name))
            raise StepError(
                f"{changed}.rows was written within `for batch in step`, on this worker only. Write with "
                f"{changed}[keys] = rows there, which counts on all workers after this pass"
            )

    def _versions_of_rows(self) -> dict[str, tuple[int, ...]]:
        return {name: carried.versions for name, carried in self._tracked.carried.items()}

    def _current_settings(self) -> Settings:
        """Return the settings that the next step depends on: everything that is no tensor."""
        found: Settings = {
            (name, path, attribute): "a buffer" if buffer is not None else None
            for name, path, owner in self._structure.owners
            if owner._buffers
            for attribute, buffer in owner._buffers.items()
            if attribute not in owner._non_persistent_buffers_set
        }
        for name, value in self._tracked.objects.items():
            if isinstance(value, torch.optim.Optimizer):
                for group, options in enumerate(value.param_groups):
                    for key, option in options.items():
                        found[name, group, key] = len(option) if key == "params" else _shown(option)
            elif isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
                for key, item in vars(value).items():
                    if isinstance(item, (int, float, Tensor)):
                        found[name, "", key] = _shown(item)
        return found


class UnusedGradients:
    """Finds a script that accumulates gradients over several steps by itself, or applies none.

    A step begins with empty gradients, so gradients that the script has not used by then would be lost silently.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._used: set[str] = set()
        self._unused: dict[str, str] = {}
        self._shown = ""
        self._left_out: set[str] = set()
        self._is_updated = False  # since the gradients of the newest step were complete
        self._versions: list[tuple[int, int]] = []  # of the parameters then
        self._digest: int | None = None  # of their values then; None: they had changed in the step before

    def leave_out(self, name: str) -> None:
        """Leave out an optimizer whose step() the script does not call."""
        self._left_out.add(name)

    def start_step(self) -> None:
        """Note the gradients of the step before that were not used. Called before they are dropped."""
        for name, optimizer in self._tracked.optimizers.items():
            if name in self._used or name in self._left_out or not self._shown:
                self._unused.pop(name, None)
            elif _has_finite_gradients(optimizer):  # others are left out on purpose
                self._unused.setdefault(name, self._shown)
        self._used.clear()

    def finish_step(self, step: str) -> None:
        """Note that the gradients of a step are complete. Warns if no parameter has changed in two steps."""
        self._shown = step
        is_updated, self._is_updated = self._is_updated, False
        before, self._versions = self._versions, [(id(p), p._version) for _, p in self._tracked.trained()]
        if is_updated or before != self._versions or not self._expects_updates():
            self._digest = None
            return
        # What writes through `.data` does not count in a version, so the values are compared as well, one step later.
        known, self._digest = self._digest, quick_digest([p.detach() for _, p in self._tracked.trained()])
        member = members.current()
        if known == self._digest and (member is None or member.worker_id == "w0"):  # once for all workers
            warnings.warn(
                "no tracked parameter has changed in the last two steps, and step() was called on no tracked "
                "optimizer: is `optimizer.step()` missing after `for batch in step`, or does it belong to an "
                "optimizer that is not tracked and has other parameters?",
                stacklevel=level_outside(),
            )

    def _expects_updates(self) -> bool:
        """Return whether there are optimizers, and no scaler that leaves updates out when gradients overflow."""
        scalers = [one for one in self._tracked.objects.values() if isinstance(one, torch.amp.GradScaler)]
        return bool(self._tracked.optimizers) and not any(one.is_enabled() for one in scalers)

    def dropped(self, cleared: object) -> None:
        """Note that the script has called zero_grad() of an optimizer or a module: it drops gradients on purpose."""
        for name, optimizer in self._tracked.optimizers.items():
            if optimizer is cleared or isinstance(cleared, nn.Module):
                self._unused.pop(name, None)
                self._used.add(name)  # also where it leaves zeros, which look like gradients

    def before_update(self, name: str) -> None:
        """Note that the script calls step() of an optimizer.

        Raises:
            StepError: the script has accumulated gradients.
        """
        self._used.add(name)
        self._is_updated = True
        if (step := self._unused.pop(name, None)) is not None:
            raise StepError(
                f"{name}.step() is being called now, but was not called after {step}: the gradients of that step are "
                "lost, because each step begins with empty gradients. To accumulate gradients, use a larger "
                "batch_size (and more microbatches) rather than several steps per update. To skip the update of a "
                f"step on purpose, call {name}.zero_grad() in that step"
            )


class _Wrapped:
    """Functions of torch that are wrapped as long as there is a listener. Runs may end in any order.

    Args:
        answer: returns what is returned instead of calling a function; None: it is called.
    """

    def __init__(self, *functions: tuple[Any, str], answer: Callable[..., Any] = lambda *_, **__: None) -> None:
        self._answer = answer
        self._functions = [(owner, name) for owner, name in functions if hasattr(owner, name)]
        self._originals: list[Any] = []
        self._listeners: list[Callable[..., None]] = []

    @contextmanager
    def calling(self, listener: Callable[..., None]) -> Iterator[None]:
        """Return a context in which ``listener`` is called before each call, with its arguments."""
        if not self._listeners:
            self._originals = [getattr(owner, name) for owner, name in self._functions]
            for (owner, name), original in zip(self._functions, self._originals, strict=True):
                setattr(owner, name, self._wrap(original))
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            if not self._listeners:
                for (owner, name), original in zip(self._functions, self._originals, strict=True):
                    setattr(owner, name, original)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            for listener in list(self._listeners):
                listener(*arguments, **options)
            answer = self._answer(*arguments, **options)
            return original(*arguments, **options) if answer is None else answer

        return wrapped


_zero_grad = _Wrapped((torch.optim.Optimizer, "zero_grad"), (nn.Module, "zero_grad"))
_total_norm = _Wrapped((clip_grad, "_get_total_norm"))
"""``clip_grad_norm_`` calls this function, under whichever name the script has imported ``clip_grad_norm_``."""


_grouped = _Wrapped(
    (clip_grad, "_group_tensors_by_device_and_dtype"), answer=lambda groups, *_, **__: None if any(groups) else {}
)
"""``clip_grad_value_`` calls this function."""


_scheduler_step = _Wrapped(
    *((kind, "step") for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind))
)


def watched_schedulers(call: Callable[[object], None]) -> AbstractContextManager[None]:
    """Return a context in which ``call`` gets every scheduler whose step() is called."""
    return _scheduler_step.calling(lambda scheduler, *_, **__: call(scheduler))


def watched_zero_grad(call: Callable[[object], None]) -> AbstractContextManager[None]:
    """Return a context in which ``call`` gets every optimizer or module whose zero_grad() is called."""
    return _zero_grad.calling(lambda cleared, *_, **__: call(cleared))


@contextmanager
def watched_clipping(is_inside: Callable[[], bool]) -> Iterator[None]:
    """Return a context in which clipping does nothing where there are no gradients, and warns of it in a micro-batch.

    So ``clip_grad_norm_`` is by itself; ``clip_grad_value_`` would raise an error of torch's.
    """

    def warn(name: str) -> None:
        if is_inside():
            warnings.warn(
                f"torch.nn.utils.{name} was called inside `for batch in step`, where parameters have no gradient yet: "
                "it did nothing. Call it after that loop, where .grad is the mean over the global batch",
                stacklevel=6,
            )

    def look(tensors: Any, *_: Any, **__: Any) -> None:
        if isinstance(tensors, Sequence) and not tensors:
            warn("clip_grad_norm_")
        if isinstance(tensors, Sequence) and any(isinstance(one, Tensor) and one.is_meta for one in tensors):
            raise UsageError(
                "torch.nn.utils.clip_grad_norm_ got gradients that are on other workers, because the model is cut into "
                "stages (unisono.Stages): call unisono.clip_grad_norm_ instead"
            )

    def look_at_groups(groups: Sequence[Any], *_: Any, **__: Any) -> None:
        if not any(groups):
            warn("clip_grad_value_")

    with _total_norm.calling(look), _grouped.calling(look_at_groups):
        yield


def _shown(option: Any) -> Any:
    if not isinstance(option, Tensor):
        return option
    return (
        id(option),
        option._version,
        option.tolist() if option.numel() == 1 and option.device.type == "cpu" else None,
    )


def _check_settings(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    if before == after:
        return
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    if changed:
        name, part, last = key = min(changed, key=str)
        said = f"{name}.param_groups[{part}][{last!r}]" if isinstance(part, int) else f"{name}.{part}.{last}"
        raise StepError(
            f"{said.replace('..', '.')} was changed within `for batch in step`, where each worker computes different "
            f"micro-batches: it was {before.get(key)} and is {after.get(key)}. Change it after this loop (as "
            "scheduler.step() does), or before run.steps (if it is a buffer that the first batch makes)"
        )


def _first_difference(before: Sequence[int], now: Sequence[int]) -> int | None:
    if before == now:
        return None
    return next(index for index, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)


def _optimizer_states(tracked: Tracked) -> list[Tensor]:
    return [tensor for optimizer in tracked.optimizers.values() for _, tensor in tensors_of_state(optimizer)]


def _has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    found = [p.grad for options in optimizer.param_groups for p in options["params"] if p.grad is not None]
    gradients = [one for one in found if not isinstance(one, Elsewhere)]
    return bool(gradients) and all(bool(gradient.isfinite().all()) for gradient in gradients)
