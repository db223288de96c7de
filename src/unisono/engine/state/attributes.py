"""Attributes of tracked modules and optimizers that a script sets between steps: a rate of dropout, a temperature.

No ``state_dict`` has them, and the next step may depend on them. Other attributes change as well and must not travel:
caches, counters and the last activation, which forward passes leave there. The two are told apart by when they change.
What changes between `Attributes.enter` and `Attributes.leave`, around the micro-batches of a step or the batches of an
evaluation, is of one worker and is left alone from then on. What changes elsewhere is the script's, equal on all
workers, and travels with the state if it is plain: numbers, strings, small tensors, and containers of these.

Looking costs two comparisons of object identities per step, and a record only where something has changed.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from unisono.cluster.worker import member as members
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.engine.state.walk import same_objects
from unisono.system.stacks import level_outside

__all__ = ["Attributes"]

MOST_BYTES: Final = 1 << 14
"""Of a plain value; what is larger does not travel."""
DEEPEST: Final = 6
"""Containers in containers."""

_TORCHS: Final = {
    *vars(nn.Module()),
    *("defaults", "state", "param_groups", "step"),
    *("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called"),
    *(
        f"_optimizer_{kind}_{when}_hooks"
        for kind in ("step", "state_dict", "load_state_dict")
        for when in ("pre", "post")
    ),
}
"""Attributes of torch's own: of modules, and of optimizers."""
_ABSENT: Final = object()
Owners = Mapping[str, nn.Module | torch.optim.Optimizer]
_NUMBERS: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_CONTAINERS: Final = (list, tuple, dict, collections.OrderedDict, set, frozenset)


class _Watched:
    """The attributes of one module or optimizer, as they were when this object was made.

    Args:
        but: names that are left alone.
    """

    def __init__(self, owner: Any, but: Iterable[str]) -> None:
        self.owner = owner
        self.values: dict[str, Any] = vars(owner)
        self.but = {*_TORCHS, *but}
        self._num = len(self.values)
        self.known = {name: value for name, value in self.values.items() if name not in self.but}
        names = [*self.known]
        self.get = operator.itemgetter(*names, names[0]) if names else None
        """Returns the values of these names, of `values`."""
        self.contents = {
            name: (value, to_bytes(value))
            for name, value in self.known.items()
            if isinstance(value, (list, tuple, dict, set, Tensor)) and _size(value) <= MOST_BYTES
        }
        """What may be changed in place."""
        self.buffers: Mapping[str, Any] = owner._buffers if getattr(owner, "_non_persistent_buffers_set", ()) else {}
        self._caches = list(self.buffers.values())

    @property
    def has_new_caches(self) -> bool:
        """Whether a buffer that is not persistent is another: what belongs to it has no meaning without it."""
        return not same_objects(list(self.buffers.values()), self._caches)

    def changes(self) -> dict[str, Any]:
        """Return the attributes that have changed, with the values that they had; `_ABSENT`: none."""
        found: dict[str, Any] = {}
        if len(self.values) != self._num:
            found = {name: _ABSENT for name in self.values if name not in self.known and name not in self.but}
        for name, before in self.known.items():
            now = self.values.get(name, _ABSENT)
            if name in self.contents:
                if _size(now) > MOST_BYTES or to_bytes(now) != self.contents[name][1]:
                    found[name] = from_bytes(self.contents[name][1])
            elif now is not before and not (type(now) is type(before) and type(now) in _NUMBERS and now == before):
                found[name] = before
        return found


class Attributes:
    """Attributes of tracked modules and optimizers that a script sets between steps.

    Args:
        owners: returns the modules and optimizers by name; the same object while they are the same.
    """

    def __init__(self, owners: Callable[[], Owners]) -> None:
        self._owners = owners
        self._seen: Owners | None = None
        self._watched: dict[str, _Watched] = {}
        self._before: list[object] = []
        self._changed: dict[tuple[str, str], Any] = {}
        """(name of the owner, attribute) -> its value before the script has changed it."""
        self._left_alone: dict[str, set[str]] = collections.defaultdict(set)
        self._inside: str | None = None
        self._to_tell: dict[tuple[str, str], str] = {}  # what has been set and cannot travel

    def begin(self) -> None:
        """Note the attributes as they are, before the first step."""
        if self._seen is None:
            self._watch(self._owners())

    def enter(self, what: str, owners: Owners) -> None:
        """Begin a part in which each worker does another part of the work; parts within it do not count.

        Args:
            what: says which of nested parts this is.
            owners: the modules and optimizers now.
        """
        if self._inside in (None, what):  # within one of its kind: it is begun once more, after a loss
            self._note(owners)
            self._inside = what

    def leave(self, what: str, owners: Owners) -> None:
        """End such a part."""
        if self._inside == what:
            self._note(owners)
            self._inside = None

    def state(self, *, warns: bool = True) -> dict[str, dict[str, bytes]]:
        """Return what the script has set, by owner and attribute.

        Args:
            warns: of what cannot travel, once.
        """
        owners, found = self._owners(), dict[str, dict[str, bytes]]()
        self._note(owners)
        for owner, name in self._changed:
            value = vars(owners[owner]).get(name, _ABSENT) if owner in owners else _ABSENT
            if _size(value) <= MOST_BYTES:
                device = value.device.type if isinstance(value, Tensor) else "cpu"
                found.setdefault(owner, {})[name] = to_bytes([value, device])
        while warns and self._to_tell:
            self._warn(*self._to_tell.popitem())
        return found

    def load(self, state: Mapping[str, Mapping[str, bytes]]) -> None:
        """Set what `state` has returned, perhaps in another process; what was set since then is as it was before."""
        owners = self._owners()
        self._note(owners)
        wanted = dict(self._changed)
        for owner, values in state.items():
            for name, data in values.items():
                value, device = from_bytes(data)
                wanted[owner, name] = value if device == "cpu" else value.to(device)
        for (owner, name), value in wanted.items():
            if owner not in owners:
                continue
            attributes = vars(owners[owner])
            self._changed.setdefault((owner, name), attributes.get(name, _ABSENT))
            if value is not _ABSENT:
                attributes[name] = value
            else:
                attributes.pop(name, None)
        self._renew({owner for owner, _ in wanted})

    # -- inside --------------------------------------------------------------------------------------

    def _note(self, owners: Owners) -> None:
        """Note what has changed since the last look, and whose it is."""
        if self._seen is None:
            return
        if owners is not self._seen:
            self._watch(owners)
        before, self._before = self._before, self._look()
        if same_objects(self._before, before):
            return
        renewed = set()
        for owner, watched in self._watched.items():
            if not (changes := watched.changes()):
                continue
            renewed.add(owner)
            if self._inside is not None:
                self._left_alone[owner] |= changes.keys()
                for name in changes:
                    self._changed.pop((owner, name), None)
            elif not watched.has_new_caches:
                for name, before in changes.items():
                    self._add(watched, owner, name, before)
        self._renew(renewed)

    def _add(self, watched: _Watched, owner: str, name: str, before: object) -> None:
        """Note that the script has set an attribute."""
        value = watched.values.get(name, _ABSENT)
        if value is _ABSENT or _size(value) <= MOST_BYTES:
            self._changed.setdefault((owner, name), before)
            return
        self._changed.pop((owner, name), None)
        self._left_alone[owner].add(name)  # and do not hold it: it may be as large as a model
        if not name.startswith("_"):
            what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__qualname__}"
            self._to_tell[owner, name] = f"{owner}.{name} was set between two steps and is {what}"

    def _look(self) -> list[object]:
        """Return objects that are others if something has changed."""
        found: list[object] = []
        try:
            for get, values in self._gets:
                found += get(values)
        except KeyError:  # one is gone
            return [object()]
        found += map(len, self._dicts)
        for buffers in self._caches:
            found += buffers.values()
        for value in self._contents:
            _flatten(value, found)
        return found

    def _watch(self, owners: Owners) -> None:
        """Watch what is tracked now; what is watched already is compared with what is known of it."""
        self._seen = owners
        before, self._watched = self._watched, {}
        for name, owner in owners.items():
            known = before.get(name)
            if known is None or known.owner is not owner:
                known = _Watched(owner, self._left_alone[name])
            self._watched[name] = known
        self._prepare()
        if before:
            self._before = []  # look closely

    def _renew(self, names: Iterable[str]) -> None:
        """Take what some have now for what is known of them."""
        if self._seen is not None:
            for name in self._watched.keys() & set(names):
                self._watched[name] = _Watched(self._watched[name].owner, self._left_alone[name])
            self._prepare()

    def _prepare(self) -> None:
        """Prepare to look, and look."""
        watched = self._watched.values()
        self._gets = [(one.get, one.values) for one in watched if one.get is not None]
        self._dicts = [one.values for one in watched]
        self._caches = [one.buffers for one in watched if one.buffers]
        self._contents = [value for one in watched for value, _ in one.contents.values()]
        self._before = self._look()

    def _warn(self, key: tuple[str, str], words: str) -> None:
        member = members.current()
        if member is None or member.worker_id == "w0":  # once for all workers
            warnings.warn(
                f"{words}, which is in no state: a run that resumes, or a worker that joins, has what the script sets "
                f"at its beginning. If steps depend on it, make it a buffer (register_buffer({key[1]!r}, ...)) or a "
                "plain value (numbers, strings, small tensors and containers of these, which travel with the state), "
                "or set it before each step by step.number",
                stacklevel=level_outside(),
            )


def _flatten(value: object, found: list[object]) -> None:
    """Add what is in a plain value that can be changed in place."""
    if isinstance(value, Tensor):
        found.append(value._version)
        return
    items: Iterable[object] = ()
    if isinstance(value, dict):
        found += value
        items = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    for item in items:
        found.append(item)
        if isinstance(item, (list, tuple, dict, Tensor)):
            _flatten(item, found)


def _size(value: Any, depth: int = 0) -> float:
    """Return about how many bytes a plain value takes; infinity: it is not plain, or too large."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind in _NUMBERS:
        return 9 + (len(value) if isinstance(value, (str, bytes)) else 0)
    if kind is Tensor:
        is_plain = value.layout is torch.strided and not (value.requires_grad or value.is_meta or value.is_inference())
        return value.nbytes if is_plain and (depth == 0 or value.device.type == "cpu") else math.inf
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return 16
    if numpy is not None and kind is numpy.ndarray:
        return value.nbytes if value.dtype.kind in "biufc" else math.inf
    if kind not in _CONTAINERS or depth == DEEPEST:
        return math.inf
    found = 9.0
    for item in itertools.chain(value, value.values() if isinstance(value, dict) else ()):
        found += _size(item, depth + 1)
        if found > MOST_BYTES:
            return math.inf
    return found
