"""The hunt for a NaN within one micro-batch: which module, which operation and which line of the script comes first.

The anomaly detection of autograd looks at the backward pass only, and a loss that is not finite ends a step before it.
So the forward pass is watched as well: the outputs of modules by hooks, and those of operations by a mode of torch's
dispatcher. Neither changes a bit.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.system.stacks import frame_outside, is_own

__all__ = ["Hunt", "script_stack"]

TORCH: Final = str(Path(torch.__file__).parent)
MOST_NAMED: Final = 8
UNWRITTEN: Final = ("empty", "new_empty", "resize")
"""Operations whose outputs are memory as it was found."""


class Hunt:
    """Watches from now on until `stop`, and tells what it finds.

    Args:
        modules: by name; they and what is in them are watched.
        tell: receives a sentence.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tell: Callable[[str], None]) -> None:
        self._has_module = False
        self._tell = tell
        _tell_broken(modules, tell)
        self._show = warnings.showwarning
        warnings.showwarning = self._showwarning
        self._detected = torch.is_anomaly_enabled()
        torch.autograd.set_detect_anomaly(True)
        self._hooks = [
            part.register_forward_hook(partial(self._look, path))
            for name, module in modules.items()
            for path, part in module.named_modules(prefix=name)
        ]
        self._mode = _Watch(tell)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Watch no more."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        torch.autograd.set_detect_anomaly(self._detected)
        for hook in self._hooks:
            hook.remove()
        warnings.showwarning = self._show

    def _showwarning(self, message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        """Show a warning. That of the anomaly detection has the stack of the forward pass, of which the frames of this
        library and of torch are left out.
        """
        text = str(message)
        if text.startswith("Error detected in"):
            message = category(script_stack(text))
        self._show(message, category, *rest, **more)

    def _look(self, path: str, module: nn.Module, given: Any, output: Any) -> None:
        if self._has_module or all(map(_is_finite, _floats(output))):
            return
        self._has_module = True
        inputs = "finite" if all(map(_is_finite, _floats(given))) else "not finite either"
        self._tell(
            f"unisono: the first module whose output is not finite is {path} ({type(module).__qualname__}); its inputs "
            f"are {inputs}"
        )


def _tell_broken(modules: Mapping[str, nn.Module], tell: Callable[[str], None]) -> None:
    """Say which parameters and buffers are not finite before the micro-batch, if any are."""
    states = ((f"{name}.{path}", one) for name, module in modules.items() for path, one in module.state_dict().items())
    broken = [path for path, value in states if not all(map(_is_finite, _floats(value)))]
    if broken:
        more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
        tell(f"unisono: not finite already before the micro-batch: {', '.join(broken[:MOST_NAMED])}{more}")


class _Watch(TorchDispatchMode):
    """Tells the first operation that gives a NaN. (An infinity is often meant: attention masks.)"""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell
        self._is_found = False
        self._infinity = ""  # where the first one came from

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._is_found or name.startswith(UNWRITTEN):
            return output
        found = [one for one in _floats(output) if not _is_finite(one)]
        if any(map(_has_nan, found)):
            self._is_found = True
            given = list(_floats([args, kwargs or {}]))
            self._tell(f"unisono: the first operation whose output has a NaN is {name}{_where()}; {self._why(given)}")
        elif found and not self._infinity:
            self._infinity = f"{name}{_where()}"
        return output

    def _why(self, given: list[Tensor]) -> str:
        """Return what the inputs of the first operation that gives a NaN have to do with it."""
        if any(map(_has_nan, given)):
            return "its inputs have some already"
        if all(map(_is_finite, given)):
            return "its inputs are finite"
        before = self._infinity or "what the micro-batch began with"
        return f"its inputs have an infinity. The first one came from {before}"


def script_stack(text: str) -> str:
    """Return a text without the frames of this library and of torch in it, unless there are no others.

    Args:
        text: words, and then a stack as Python prints it.
    """
    head, *frames = re.split(r'(?m)^(?=  File ")', text)
    files = [frame.split('"')[1] for frame in frames]
    kept = [frame for frame, file in zip(frames, files, strict=True) if not (is_own(file) or file.startswith(TORCH))]
    return "".join([head, *(kept or frames)])


def _where() -> str:
    """Return the line of the script that is running, in words; "" if there is none."""
    frame = frame_outside()
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return f", in line {frame.f_lineno} of {frame.f_code.co_filename}" if frame is not None else ""


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of floats in the inputs or outputs of a module or an operation."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout is torch.strided and not value.is_meta:
            yield value.detach()
    elif isinstance(value, dict):
        for one in value.values():
            yield from _floats(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _floats(one)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _has_nan(tensor: Tensor) -> bool:
    return bool(torch.isnan(tensor).any())
