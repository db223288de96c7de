"""Values of a script as short texts that are equal in two processes if and only if the values have the same bits.

Objects whose content is not known are named by their type, so they never differ. Of a large tensor, and of the
parameters of a module, about 65,000 elements are looked at. The texts of sets and dicts do not depend on their order:
where that order matters, the statement that goes through one of them is the one that differs.
"""

from __future__ import annotations

import collections
import itertools
import random
import sys
import types
import zlib
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["resolve", "text_of"]

MAX_ITEMS: Final = 1000
MAX_DEPTH: Final = 4
MAX_ELEMENTS: Final = 1 << 16
SHORT: Final = 48
MISSING: Final = object()


def text_of(value: Any, depth: int = 0) -> str:
    """Return a value as a text."""
    try:
        return _text(value, depth)
    except Exception as error:  # whatever the script's objects do, the check goes on
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _text(value: Any, depth: int) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return _short(repr(value))
    if isinstance(value, random.Random):
        return f"Random {_crc(repr(value.getstate()).encode())}"
    if isinstance(value, itertools.count):
        return repr(value)
    if depth < MAX_DEPTH:
        if isinstance(value, (list, tuple, collections.deque)):
            items = [text_of(item, depth + 1) for item in itertools.islice(value, MAX_ITEMS)]
            return _short(f"{type(value).__name__} of {len(value)}: {', '.join(items)}")
        if isinstance(value, (set, frozenset)):
            items = sorted(text_of(item, depth + 1) for item in itertools.islice(value, MAX_ITEMS))
            return _short(f"{type(value).__name__} of {len(value)}: {', '.join(items)}")
        if isinstance(value, dict):
            pairs = itertools.islice(value.items(), MAX_ITEMS)
            items = sorted(f"{text_of(key, depth + 1)}: {text_of(item, depth + 1)}" for key, item in pairs)
            return _short(f"{type(value).__name__} of {len(value)}: {', '.join(items)}")
    return _of_libraries(value) or f"<{type(value).__name__}>"


def _of_libraries(value: Any) -> str:
    """Return a value of torch or numpy as a text; "" for any other. Imports neither."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        if isinstance(value, torch.Tensor):
            return _tensor(torch, value)
        if isinstance(value, torch.nn.Module):
            return _module(torch, value)
        if isinstance(value, torch.Generator):
            return f"Generator {_crc(bytes(value.get_state().numpy()))}"
        if isinstance(value, (torch.device, torch.dtype, torch.Size)):
            return repr(value)
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            flat = value.reshape(-1)[:: max(1, value.size // MAX_ELEMENTS)]
            if value.size == 1:
                return f"array {flat[0]!r}"
            return f"array {value.shape} {value.dtype} {_crc(flat.tobytes())}"
        if isinstance(value, numpy.generic):
            return repr(value)
        if isinstance(value, numpy.random.Generator):
            return f"Generator {_crc(repr(value.bit_generator.state).encode())}"
        if isinstance(value, numpy.random.RandomState):
            return f"RandomState {_crc(repr(value.get_state()).encode())}"
    return ""


def _module(torch: Any, value: Any) -> str:
    """Return a module as a text: of its parameters. Its buffers are put back by Unisono."""
    parameters = list(value.parameters())
    if not parameters:
        return f"<{type(value).__name__}>"
    stride = max(1, sum(each.numel() for each in parameters) // MAX_ELEMENTS)
    with torch.no_grad():
        whole = b"".join(_bytes(torch, each.detach().reshape(-1)[::stride]) for each in parameters)
    return f"{type(value).__name__} {_crc(whole)}"


def _bytes(torch: Any, flat: Any) -> bytes:
    raw: bytes = flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return raw


def _tensor(torch: Any, value: Any) -> str:
    with torch.no_grad():
        plain = value.detach()
        if plain.numel() == 1:
            return f"tensor {plain.item()!r}"
        flat = plain.reshape(-1)[:: max(1, plain.numel() // MAX_ELEMENTS)]
        return f"tensor {tuple(plain.shape)} {plain.dtype} {_crc(_bytes(torch, flat))}"


def _crc(data: bytes) -> str:
    return f"#{zlib.crc32(data):08x}"


def _short(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[: SHORT - 12]}... {_crc(text.encode())}"


def resolve(path: str, names: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Return what a path names, without running code of the script; `MISSING` where that cannot be known.

    Args:
        names: local variables. others: global ones.
    """
    first, *rest = path.split(".")
    value = names.get(first, MISSING)
    if value is MISSING:
        value = others.get(first, MISSING)
    for name in rest:
        if value is MISSING or isinstance(value, types.ModuleType):
            return MISSING
        value = _attribute(value, name)
    return value


def _attribute(value: Any, name: str) -> Any:
    try:
        own: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    if name in own:
        return own[name]
    for table in ("_parameters", "_buffers", "_modules"):
        held = own.get(table)
        if isinstance(held, dict) and name in held:
            return held[name]
    for kind in value.__mro__ if isinstance(value, type) else type(value).__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            if isinstance(found, types.MemberDescriptorType):  # __slots__
                return _in_slot(found, value)
            return MISSING if hasattr(found, "__get__") else found
    return MISSING


def _in_slot(slot: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # nothing was written into it yet
        return MISSING
