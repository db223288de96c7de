"""Tracked objects of a run: their parameters and buffers, and the state that a newcomer receives.

The state is the ``state_dict()`` of every tracked object, and what a ``state_dict()`` leaves out although the next step
depends on it: buffers that are not persistent, parameters that only an optimizer has, which parameters need a gradient,
which modules are in ``eval()``, and what the script has set on them.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from unisono.cluster.worker import member as members
from unisono.core.errors import StateLost, StepError, UsageError
from unisono.core.rehearsals import balance_of_copies
from unisono.engine.state.attributes import Attributes
from unisono.engine.state.buffers import Buffers
from unisono.engine.state.carried import Carried
from unisono.engine.state.packing import digest_of_state, is_same_state
from unisono.engine.state.spread import Spread, digests_of_units, held_digests, units_in
from unisono.engine.state.sums import Sums
from unisono.engine.state.walk import Walk, buffer_in, tensors_of_state
from unisono.system.stacks import level_outside

__all__ = ["Calls", "Tracked"]

MOST_HELD = 10_000
"""Of so many objects that a tracked one holds it is looked whether a scheduler is among them."""


class Apart(Spread, Protocol):
    """What stands for a tracked object of which each worker holds some units."""

    def outlined(self, state: Any) -> Any:
        """Return a state of the object with a meta tensor in the place of each tensor that not all workers hold."""


class OwnPart(Protocol):
    """A part of the run's state that is Unisono's own, and not an object of the script."""

    def state_dict(self) -> Any:
        """Return plain data and tensors."""

    def load_state_dict(self, state: Any) -> None: ...


@dataclass
class Calls:
    """Highest number of backward calls for one micro-batch. Part of the state, because a newcomer does not know it."""

    known: dict[int, int] = field(default_factory=dict)
    """By pass over the global batch."""
    has_looked: bool = False
    """This worker has compared the parameters before and after a micro-batch, bit by bit."""


class _Values:
    """Plain values of a script, in a dict or a ``types.SimpleNamespace``, as a tracked object."""

    def __init__(self, holder: dict[str, Any] | SimpleNamespace) -> None:
        self.holder = holder
        self._values: dict[str, Any] = holder if isinstance(holder, dict) else vars(holder)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values.clear()
        self._values.update(state)


class Tracked:
    """The tracked objects of a run, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._first: dict[tuple[int, str], Tensor] = {}
        """(id of a module, name of a buffer that is not persistent) -> the buffer when the module was tracked."""
        self.calls = Calls()
        self.sums = Sums()
        self._own: dict[str, OwnPart] = {"sums": self.sums}
        self._early: dict[str, Any] = {}  # states of own parts that this script has not come to
        self._apart: dict[str, Apart] = {}
        self._walk: Walk | None = None  # the last one
        self._reached: weakref.WeakSet[object] = weakref.WeakSet()  # schedulers, and optimizers that have one
        self._told: set[str] = set()
        self.attributes = Attributes(lambda: self.walk().attributed)
        """What the script sets on modules and optimizers between steps."""

    def own(self, name: str, part: OwnPart) -> None:
        """Add a part of Unisono's own to the state that newcomers and checkpoints get."""
        self._own[name] = part
        if name in self._early:
            part.load_state_dict(self._early.pop(name))

    def hold_apart(self, name: str, part: Apart) -> None:
        """Note that each worker holds some units of a tracked object from now on."""
        self._apart[name] = part

    @property
    def _with_state(self) -> dict[str, Any]:
        """By name of a tracked object, what has its state: itself, or what stands for it."""
        return {**self._objects, **self._apart}

    @property
    def spread_apart(self) -> Mapping[str, Apart]:
        """The objects of `hold_apart`, by name: newcomers get their units from members of the same part."""
        return self._apart

    def apart(self, without: str = "") -> Tracked:
        """Return the same objects, with sums of their own and no other part of the run's state.

        Args:
            without: the name of an object to leave out.
        """
        other = Tracked()
        other._objects = {name: value for name, value in self._objects.items() if name != without}
        other._first, other.calls, other.attributes = self._first, self.calls, self.attributes
        return other

    def add(self, objects: dict[str, Any]) -> None:
        for name, value in objects.items():
            if isinstance(value, (dict, SimpleNamespace)):
                before = self._objects.get(name)
                value = before if isinstance(before, _Values) and before.holder is value else _Values(value)
            if isinstance(value, type) or not all(
                callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
            ):
                raise UsageError(
                    f"run.track({name}=...) got a {type(value).__qualname__} without state_dict() and "
                    f"load_state_dict(); "
                    "track modules, optimizers, schedulers, a dict or a types.SimpleNamespace of values, or give the "
                    "object these two methods"
                )
            if name in self._objects and self._objects[name] is not value:
                raise UsageError(
                    f"run.track({name}=...) was called before with a different object; choose a different name"
                )
            self._objects[name] = value
            if isinstance(value, nn.Module):
                for module in value.modules():
                    for attribute in module._non_persistent_buffers_set:
                        if (buffer := buffer_in(module, attribute)) is not None:
                            self._first.setdefault((id(module), attribute), buffer)

    def __bool__(self) -> bool:
        return bool(self._objects)

    @property
    def objects(self) -> Mapping[str, Any]:
        """Everything that is tracked, by name."""
        return self._objects

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in self._objects.items() if isinstance(value, nn.Module)}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: value for name, value in self._objects.items() if isinstance(value, torch.optim.Optimizer)}

    @property
    def sharded(self) -> dict[str, Spread]:
        """The objects of which each worker holds some units."""
        found = {name: value for name, value in self.optimizers.items() if isinstance(value, Spread)}
        return {**found, **self._apart}

    @property
    def spread(self) -> dict[tuple[str, str], Spread]:
        """Everything of which each worker holds some units, by (part of the state, name): `sharded`, and own parts."""
        own = {("own", name): part for name, part in self._own.items() if isinstance(part, Spread)}
        return {**{("objects", name): value for name, value in self.sharded.items()}, **own}

    @property
    def carried(self) -> dict[str, Carried]:
        """The rows that micro-batches carry from step to step."""
        return {name: value for name, value in self._objects.items() if isinstance(value, Carried)}

    # -- parameters and buffers ----------------------------------------------------------------------

    def walk(self) -> Walk:
        """Return what there is in the tracked modules and optimizers now: the same object while that is the same."""
        modules, optimizers = self.modules, self.optimizers
        if self._walk is None or not self._walk.finds_the_same(modules, optimizers):
            self._walk = Walk(modules, optimizers)
        return self._walk

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters of tracked modules and optimizers, each once, whether they need a gradient or not."""
        return list(self.walk().parameters)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that need a gradient."""
        return [one for one in self.walk().parameters if one[1].requires_grad]

    def num_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(one.numel() * one.element_size() for one in {id(one): one for _, one in self.parameters()}.values())

    def gradient_bytes(self) -> int:
        """Return the bytes of the sums of a step, which have float32 at least."""
        return sum(one.numel() * max(4, one.element_size()) for _, one in self.trained())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters by their names in modules and in optimizers; a parameter in both has two names."""
        return iter(self.walk().named)

    def buffers(self) -> Buffers:
        """Return the buffers of the tracked modules; each once.

        A buffer that is not persistent and did not exist when its module was tracked is a cache: workers may have it in
        other shapes, or not at all.
        """
        named: list[tuple[str, nn.Module, str]] = []
        shapes: dict[int, torch.Size] = {}
        seen: set[int] = set()
        for name, path, owner in self.walk().owners:
            for attribute, buffer in owner._buffers.items():
                is_cache = attribute in owner._non_persistent_buffers_set
                first = self._first.get((id(owner), attribute))
                if buffer is None or id(buffer) in seen or (is_cache and first is None):
                    continue
                if is_cache and first is not None:
                    shapes[len(named)] = first.shape
                seen.add(id(buffer))
                named.append((".".join(filter(None, (name, path, attribute))), owner, attribute))
        return Buffers(named, shapes)

    def check(self, device: torch.device) -> None:
        """Raise UsageError if the tracked objects cannot be trained; warn of probable mistakes."""
        trained = self.trained()
        if not trained:
            raise UsageError("nothing to train: call run.track(model=model, optimizer=optimizer) before run.steps")
        for name, module in self.modules.items():
            for path, part in module.named_modules():
                if isinstance(part, nn.SyncBatchNorm):
                    raise UsageError(
                        f"{name}.{path} is a SyncBatchNorm, which needs the activations of all micro-batches of a step "
                        "at the same time, while Unisono keeps only those of one: with 16 micro-batches a worker "
                        "would need about ten times the memory. Use BatchNorm (normalizes each micro-batch by itself, "
                        "and averages the running statistics over them) with larger and fewer micro-batches, or "
                        "GroupNorm"
                    )
                if _is_cumulative(part):
                    raise UsageError(
                        f"{name}.{path} is a BatchNorm with momentum=None, whose running statistics are means over all "
                        "batches so far. Each step would count as M batches but weigh as one, so later steps would "
                        "hardly count; set a momentum, or call eval() on the layer"
                    )
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                if torch.nn.parameter.is_lazy(tensor):
                    raise UsageError(
                        f"{name}.{path} has no shape yet (a lazy module); pass one batch through the model before "
                        "run.steps"
                    )
                if tensor.is_inference():
                    raise UsageError(
                        f"{name}.{path} was created under torch.inference_mode(), so it can be neither trained nor "
                        "compared; create the model outside inference mode, or clone() the tensor"
                    )
                if tensor.layout is not torch.strided:
                    raise UsageError(
                        f"{name}.{path} is sparse ({tensor.layout}), and Unisono sums and stores dense tensors only: "
                        "make it dense, or, if it never changes, keep it in a plain attribute of the module or in the "
                        "dataset"
                    )
        for name, parameter in trained:
            if parameter.device.type != device.type and not (parameter.is_meta and self._apart):
                raise UsageError(
                    f"parameter {name} is on {parameter.device}, and this worker computes on {device}; call "
                    "model.to(run.device) before you make the optimizer"
                )
        for name, module in self.modules.items():
            if not isinstance(module, torch.optim.swa_utils.AveragedModel):  # it is averaged, never optimized
                self._warn_of_untracked(name, module)
        if not self.modules:
            warnings.warn(
                "an optimizer is tracked but no module: the buffers of a model (running statistics of BatchNorm) stay "
                "with the worker that changed them, and a worker that joins does not get them; track the model too: "
                "run.track(model=model)",
                stacklevel=3,
            )
        self._warn_of_inner_optimizers()
        for optimizer in self.optimizers.values():
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # torch's mark of an optimizer that has a scheduler
                self._check_reached(optimizer, optimizer)
        for value in self._objects.values():
            if isinstance(value, torch.amp.GradScaler):
                # A GradScaler makes its scale at the first loss, and a worker without a micro-batch has no loss.
                value.scale(torch.ones((), device=device))

    def _warn_of_untracked(self, name: str, module: nn.Module) -> None:
        owned = {
            id(parameter)
            for optimizer in self.optimizers.values()
            for options in optimizer.param_groups
            for parameter in options["params"]
        }
        lonely = owned and [
            path
            for path, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in owned
        ]
        if lonely and len(lonely) == sum(1 for _ in module.parameters()):
            warnings.warn(
                f"no tracked optimizer has a parameter of {name!r}; was the optimizer made before "
                f"model.to(run.device), "
                "or is requires_grad_(False) missing?",
                stacklevel=4,
            )

    def _warn_of_inner_optimizers(self) -> None:
        """Warn of optimizers that tracked ones hold in attributes, and whose state is in no ``state_dict``."""
        for name, optimizer in self.optimizers.items():
            if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
                continue  # its own one says what it holds
            for attribute, inner in vars(optimizer).items():
                is_tracked = any(inner is one for one in self._objects.values())
                if isinstance(inner, torch.optim.Optimizer) and not is_tracked and inner.state is not optimizer.state:
                    self._warn_once(
                        f"{name}.{attribute} is an optimizer ({type(inner).__name__}) whose state is not in that of "
                        f"{name!r}: a run that resumes, or a worker that joins, would begin without its momentum; "
                        f"track it as well: run.track({attribute.lstrip('_')}={name}.{attribute})"
                    )

    def check_scheduler(self, scheduler: object) -> None:
        """Warn of a scheduler of torch that is not tracked, by itself or within another object, if its optimizer is."""
        if not getattr(scheduler, "_is_initial", False):  # torch calls its step() once to make it
            self._check_reached(scheduler, getattr(scheduler, "optimizer", None))

    def _check_reached(self, wanted: object, optimizer: object) -> None:
        """Warn if nothing tracked besides modules and optimizers leads to a scheduler, or to an optimizer with one."""
        name = next((name for name, one in self.optimizers.items() if one is optimizer), None)
        if name is None or wanted in self._reached:
            return
        self._reached.add(wanted)
        kinds = (nn.Module, torch.optim.Optimizer, Carried, _Values)
        if not any(_leads_to(value, wanted) for value in self._objects.values() if not isinstance(value, kinds)):
            self._warn_once(
                f"a scheduler of {name!r} is not tracked: a run that resumes, or a worker that joins, would begin its "
                "schedule anew and train at another rate. Make the scheduler before the first run.steps, and track "
                "it: run.track(scheduler=scheduler)"
            )

    def _warn_once(self, words: str) -> None:
        member = members.current()
        if words not in self._told and (member is None or member.worker_id == "w0"):  # once for all workers
            self._told.add(words)
            warnings.warn(words, stacklevel=level_outside())

    def before_updates(self, call: Callable[[str], None]) -> list[RemovableHandle]:
        """Have ``call`` called with an optimizer's name whenever it makes a step, until the handles are removed."""
        return [
            optimizer.register_step_pre_hook(lambda *_, name=name: call(name))
            for name, optimizer in self.optimizers.items()
        ]

    def updated(self) -> set[int]:
        """Return the addresses of the tensors that only an update changes: parameters, and the states of optimizers."""
        found = {parameter.data_ptr() for _, parameter in self.parameters()}
        for optimizer in self.optimizers.values():
            found |= {tensor.data_ptr() for _, tensor in tensors_of_state(optimizer)}
        return found

    # -- state ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as a newcomer gets it, which holds no unit yet."""
        return {**self._state(_known_to_all), "sharded": sorted(self.sharded)}

    def whole_state(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as a checkpoint has it; what it looks like is the same with
        and without sharding. A meta tensor stands for each that this worker does not hold.
        """
        return self._state(lambda value: value.state_dict())

    def holders(self, paths: Sequence[str]) -> list[tuple[str, ...]]:
        """Return by path, as `pack` gives them for `whole_state`, the ids of the workers that hold the tensor.

        () where every worker holds it.
        """
        found: list[tuple[str, ...]] = [()] * len(paths)
        known = {key: part.holders for key, part in self.spread.items()}
        for number, key, unit in self.units_in(paths):
            found[number] = known[key][unit]
        return found

    def units_in(self, paths: Sequence[str]) -> Iterator[tuple[int, tuple[str, str], int]]:
        """Yield the tensors of a whole state that not all members hold: (number of the path, key in `spread`, unit).

        Args:
            paths: as `pack` gives them for `whole_state`.
        """
        for key, part in self.spread.items():
            for number, unit in units_in(part, paths, "tracked[{!r}][{!r}]".format(*key)):
                yield number, key, unit

    def apart_in(self, paths: Sequence[str]) -> list[int]:
        """Return the numbers of the tensors of a whole state that `rounds.loading` loads where they are to be."""
        return [number for number, _, _ in self.units_in(paths)]

    @property
    def is_spread(self) -> bool:
        """Whether no worker holds the whole state; the same on all members."""
        return any(part.is_spread for part in self.spread.values())

    def _state(self, state_of: Callable[[Any], Any]) -> dict[str, Any]:
        return {
            "objects": {name: state_of(value) for name, value in self._with_state.items()},
            "hidden": self._hidden(),
            "trained": [parameter.requires_grad for _, parameter in self.parameters()],
            "in_eval": self._in_eval(),
            "attributes": self.attributes.state(),
            "calls": dict(self.calls.known),
            "own": {**self._early, **{name: state_of(part) for name, part in self._own.items()}},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` or `whole_state` made in another process of the same script.

        Raises:
            UsageError: the state is of other objects. StepError: an object differs from the state that it has loaded.
        """
        theirs, ours = state["objects"].keys(), self._objects.keys()
        if theirs != ours:
            raise UsageError(
                f"this script tracks {sorted(ours)}, but the run tracks {sorted(theirs)}; give run.track the same names"
            )
        shards = state.get("sharded")  # None: this is the state of a checkpoint, and not that of a run under way
        if shards is not None and shards != sorted(self.sharded):
            raise UsageError(
                f"the script of this worker shards {sorted(self.sharded) or 'no optimizer'}, the run shards "
                f"{shards or 'none'}; all workers must call unisono.shard alike"
            )
        self._load_hidden(state)
        self.calls.known = dict(state["calls"])
        self.load_own(state)
        for (_, parameter), needed in zip(self.parameters(), state["trained"], strict=True):
            parameter.requires_grad_(needed)
        self._load_settings(state)
        pairs = itertools.permutations(self.optimizers.values(), 2)
        with_one_list = [(one, other) for one, other in pairs if one.param_groups is other.param_groups]
        for name, part in state["objects"].items():
            value = self._objects[name]
            if (apart := self._apart.get(name)) is not None:
                apart.load_state_dict(part)
                loaded, part = apart.outline(), apart.outlined(part)
            else:
                value.load_state_dict(part)
                loaded = value.state_dict() if shards is None else _known_to_all(value)
            if isinstance(value, LRScheduler):  # another version of torch may keep other notes beside these
                loaded = {key: loaded[key] for key in loaded if key in part}
            if not is_same_state(loaded, part):
                raise StepError(
                    f"{name} ({type(value).__qualname__}) is not the same after load_state_dict(), so a worker that "
                    "joins, or a run that resumes, would continue from a different state: its state_dict() must hold "
                    "everything that changes"
                )
        for one, other in with_one_list:  # an optimizer in another: a rate that is set for one is that of both
            other.param_groups = one.param_groups

    def load_own(self, state: dict[str, Any]) -> None:
        """Load the parts of a state that are Unisono's own."""
        for name, own in state["own"].items():
            if name in self._own:
                self._own[name].load_state_dict(own)
            else:
                self._early[name] = own

    def load_models(self, state: dict[str, Any]) -> None:
        """Load the modules of a state of a later phase, as far as this script has made them already.

        A script may compute the data of its second training with the model of the first. On a worker that joins in the
        second, that code finds the model as the run has it now. `load` follows when the script reaches the later phase.
        """
        self.load_own(state)  # what happened in the phases that this script skips
        for name, part in state["objects"].items():
            module = self._objects.get(name)
            if isinstance(module, nn.Module):
                ours = module.state_dict()
                same = part.keys() == ours.keys() and all(
                    not isinstance(value, Tensor) or value.shape == ours[key].shape for key, value in part.items()
                )
                if same:  # otherwise the script changes the module before the later phase
                    self._with_state[name].load_state_dict(part)
        hidden = self._hidden()
        for name, buffer in state["hidden"].items():
            if name in hidden and hidden[name].shape == buffer.shape:
                hidden[name].copy_(buffer)

    def seen(self) -> dict[str, Any]:
        """Return what an evaluation can depend on: all but the states of parameters in optimizers."""
        optimizers = self.optimizers
        return {
            "objects": {name: value.state_dict() for name, value in self._objects.items() if name not in optimizers},
            "options": {name: [_options(group) for group in one.param_groups] for name, one in optimizers.items()},
            "hidden": self._hidden(),
            "in_eval": self._in_eval(),
            "attributes": self.attributes.state(),
        }

    def load_seen(self, state: dict[str, Any]) -> None:
        """Load what `seen` has returned, perhaps in another process of the same script.

        Raises:
            UsageError: the state is of other objects.
        """
        theirs = state["objects"].keys() | state["options"].keys()
        if theirs != self._objects.keys():
            raise UsageError(f"this script tracks {sorted(self._objects)}, the run {sorted(theirs)}")
        self._load_hidden(state)
        self._load_settings(state)
        for name, part in state["objects"].items():
            self._objects[name].load_state_dict(part)
        for name, groups in state["options"].items():
            for group, options in zip(self.optimizers[name].param_groups, groups, strict=True):
                for option, value in options.items():
                    if isinstance(own := group.get(option), Tensor) and isinstance(value, Tensor):
                        own.copy_(value)
                    else:
                        group[option] = value

    @contextmanager
    def without_states(self) -> Iterator[None]:
        """Return a context in which the state of a tracked optimizer raises an error when it is read."""
        held = [vars(one) for one in self.optimizers.values() if "state" in vars(one)]
        before = [(attributes, attributes["state"]) for attributes in held]
        for attributes, _ in before:
            attributes["state"] = _NotHere()
        try:
            yield
        finally:
            for attributes, state in before:
                attributes["state"] = state

    def own_state(self, names: Collection[str]) -> dict[str, Any]:
        """Return these parts of the state that are Unisono's own."""
        return {"own": {name: self._own[name].state_dict() for name in names}}

    def compared(self) -> dict[str, Any]:
        """Return everything that must be equal on all workers, by name."""
        return {
            **{name: _known_to_all(value) for name, value in self._with_state.items()},
            "what no state_dict has": self._hidden(),
            "modes of modules": dict.fromkeys(self._in_eval(), "eval()"),
            "requires_grad": {name: parameter.requires_grad for name, parameter in self.parameters()},
        }

    def digests(self, held: Mapping[str, Mapping[int, int]]) -> dict[str, str]:
        """Return a 64-bit fingerprint of every tracked object, in hexadecimal; the same with and without sharding.

        Args:
            held: `held_digests` of all workers together.

        Raises:
            StateLost: no worker is left that holds some state.
        """
        found = {}
        for name, value in self._with_state.items():
            try:
                found[name] = f"{digest_of_state(value.state_dict(), held.get(name, {})):016x}"
            except KeyError:
                raise StateLost(
                    f"all workers that held some states of {name} were lost in the last moments of the run, so its "
                    "result is unknown; resume from the newest checkpoint, with more copies (unisono.shard)"
                ) from None
        return found

    def common_digests(self) -> dict[str, str]:
        """Return a fingerprint of every tracked object, as far as it is on every worker, in hexadecimal."""
        known = {name: _known_to_all(value) for name, value in self._with_state.items()}
        return {name: f"{digest_of_state(value, defaultdict(int)):016x}" for name, value in known.items()}

    def balance_of_copies(self, worker_id: str) -> int:
        """Return a worker's part of a sum that is 0, over all workers, where all copies of shared states are equal."""
        shared = self.sharded.values()
        return sum(balance_of_copies(digests_of_units(one), one.holders, worker_id) for one in shared) % (1 << 64)

    def held_digests(self) -> dict[str, dict[int, int]]:
        """Return by sharded optimizer the digests of the states that this worker holds, by the numbers of their tensors
        in the ``state_dict``.
        """
        return {name: held_digests(value) for name, value in self.sharded.items()}

    def _in_eval(self) -> list[str]:
        """Return the names of the modules that are in ``eval()``; all others are in ``train()``."""
        return [name for name, module in self.walk().with_modes if not module.training]

    def _load_settings(self, state: dict[str, Any]) -> None:
        """Load the modes and attributes of modules."""
        if "in_eval" not in state:  # a checkpoint of version 0.3.0 or older
            return
        in_eval = set(state["in_eval"])
        for name, module in self.walk().with_modes:
            if module.training is (name in in_eval):
                module.training = not module.training
        self.attributes.load(state["attributes"])

    def _load_hidden(self, state: dict[str, Any]) -> None:
        hidden = self._hidden()
        lacking = {name for name, _ in self.parameters()} & (hidden.keys() - state["hidden"].keys())
        if lacking:
            raise UsageError(
                f"the state lacks {', '.join(sorted(lacking))}: parameters that no tracked module has, and that "
                "checkpoints of version 0.3.0 and older did not keep. Track the modules that have them, and start over"
            )
        for name, buffer in state["hidden"].items():
            hidden[name].copy_(buffer)

    def _hidden(self) -> dict[str, Tensor]:
        """Return the tensors that no ``state_dict`` has, by name: buffers that are not persistent, and parameters that
        an optimizer has and no tracked module. A cache that has grown is given as it was when it was tracked, so that
        states have the same shapes on all workers.
        """
        found = {}
        for name, module in self.modules.items():
            for path, owner in module.named_modules():
                for attribute in owner._non_persistent_buffers_set:
                    first, buffer = self._first.get((id(owner), attribute)), buffer_in(owner, attribute)
                    if first is not None:
                        kept = first if buffer is None or buffer.shape != first.shape else buffer
                        found[".".join(filter(None, (name, path, attribute)))] = kept
        walk = self.walk()
        owned = {id(parameter) for _, parameter in walk.of_modules}
        found |= {name: one.detach() for name, one in walk.parameters if id(one) not in owned}
        return found


def _known_to_all(value: Any) -> Any:
    """Return the state of an object, as far as it is on every worker."""
    return value.outline() if isinstance(value, Spread) else value.state_dict()


def _leads_to(value: object, wanted: object) -> bool:
    """Return whether an object holds another in its attributes, or in those of what it holds."""
    seen, front = {id(value)}, [value]
    while front and len(seen) < MOST_HELD:
        if any(one is wanted for one in front):
            return True
        found: list[object] = []
        for one in front:
            if isinstance(one, dict):
                found += one.values()
            elif isinstance(one, (list, tuple)):
                found += one
            elif not isinstance(one, (Tensor, nn.Module, type)):
                found += getattr(one, "__dict__", {}).values()
        front = [one for one in found if id(one) not in seen]
        seen |= {id(one) for one in front}
    return False


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in group.items() if option != "params"}


class _NotHere(Mapping[Any, Any]):
    """Stands for the state of an optimizer where it is not that of the time that is asked for."""

    def __getitem__(self, key: object) -> Any:
        raise UsageError(
            "the function of run.evaluate(..., wait=False) has read the state of an optimizer, which a snapshot does "
            "not have: evaluate with wait=True, or track what the function needs in a dict"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter([self[None]])

    def __len__(self) -> int:
        return len([self[None]])


def _is_cumulative(module: nn.Module) -> bool:
    """Return whether a module has running statistics that are means over all batches so far."""
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batch_norm and module.training and module.momentum is None and module.running_mean is not None
