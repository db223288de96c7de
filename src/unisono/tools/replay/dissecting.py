"""Dissection: compute a run again up to a step, and note everything about that step, to compare it with another run's.

The result goes into a file (`unisono.record.explaining.Dissected` as JSON).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.core.errors import StopInspection, UsageError
from unisono.core.events import StepResult
from unisono.engine.rounds.taps import Computed, Loop, Place
from unisono.engine.state.packing import described, digest_of_tensor
from unisono.record.explaining import Dissected, Dissection, Leaf
from unisono.script.inspecting import Inspector
from unisono.system.fingerprint import fingerprint
from unisono.system.owned import write_whole
from unisono.tools.replay.replaying import Against

__all__ = ["Dissecting"]


class Dissecting(Inspector):
    """Notes everything about one step.

    Args:
        settings: a `Dissection` as JSON.
    """

    def __init__(self, settings: str) -> None:
        self._asked = asked = msgspec.json.decode(settings, type=Dissection)
        self._against = Against(Path(asked.run))
        self._found = Dissected(run=asked.name, step=asked.step)
        self._loop: Loop | None = None
        self._leaves: list[Leaf] = []
        self._batch: dict[str, str] = {}
        self._changed: dict[str, str] = {}
        self._modules: list[tuple[str, str]] = []
        self._hooks: list[RemovableHandle] = []

    def before_loop(self, loop: Loop) -> None:
        self._loop = loop
        self._note(fingerprint=fingerprint(str(loop.device)))

    def before_step(self, step: int) -> None:
        if step == self._asked.step and self._loop is not None:
            self._note(state=_state(self._loop))

    def looks_at(self, place: Place) -> bool:
        return not place.aside and place.step == self._asked.step

    def before_microbatch(self, place: Place, batch: Any) -> None:
        assert self._loop is not None
        self._batch, self._modules, self._changed = _values(batch, "batch"), [], {}
        for name, module in self._loop.tracked.modules.items():
            now, before = described(module.state_dict(), name), self._found.state
            self._changed |= {path: text for path, text in now.items() if before.get(path) != text}
            for path, part in module.named_modules(prefix=name):
                self._hooks.append(part.register_forward_hook(self._hook(path)))

    def _hook(self, path: str) -> Any:
        def note(module: nn.Module, given: Any, output: Any) -> None:
            values = _values(output, "")
            self._modules.append((path, " ".join(f"{name} {value}" for name, value in values.items())))

        return note

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        self._remove_hooks()
        leaf = Leaf(
            name=place.name,
            changed=self._changed,
            batch=self._batch,
            modules=self._modules,
            loss=repr(computed.loss),
            weight=repr(computed.weight),
            gradients=computed.fingerprint.parts,
        )
        self._leaves.append(leaf)

    def after_step(self, result: StepResult) -> None:
        _, difference = self._against.compare(result)
        if difference and not self._found.drift:
            self._note(drift=difference)
        if result.step >= self._asked.step:
            self._note(digest=result.digest)
            raise StopInspection("")

    def at_end(self) -> None:
        self._note(failure=f"the script ended without doing step {self._asked.step}")

    def close(self) -> None:
        self._remove_hooks()
        self._note(leaves=self._leaves)  # of a step that has failed, those that were done
        # Whole or not at all: the script may be killed at any moment.
        write_whole(Path(self._asked.result), msgspec.json.encode(self._found))

    def _note(self, **values: Any) -> None:
        self._found = msgspec.structs.replace(self._found, **values)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _state(loop: Loop) -> dict[str, str]:
    """Return the tracked state as text, by path; buffers that no state dict has are in it."""
    return {
        path: text for name, value in loop.tracked.compared().items() for path, text in described(value, name).items()
    }


def _values(value: Any, path: str) -> dict[str, str]:
    """Return the tensors and plain values within a batch, or an output of a module, as text, by path."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return {path: f"a tensor {tuple(value.shape)} of layout {value.layout}"}
        digest = digest_of_tensor(value.detach())
        return {path: f"a tensor {tuple(value.shape)} with digest {digest:016x}"}
    if isinstance(value, dict):
        return {key: text for name, one in value.items() for key, text in _values(one, f"{path}[{name!r}]").items()}
    if isinstance(value, (list, tuple)):
        return {key: text for at, one in enumerate(value) for key, text in _values(one, f"{path}[{at}]").items()}
    try:
        return described(value, path)
    except UsageError:
        if (inside := getattr(value, "__dict__", None)) and len(inside) < 100:
            return {key: text for name, one in inside.items() for key, text in _values(one, f"{path}.{name}").items()}
        return {path: f"an object of {type(value).__qualname__}"}
