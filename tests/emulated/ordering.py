"""What of the emulated device's memory is used on two streams without an event in between.

The reasoning is that of torch's own sanitizer for CUDA (``torch.cuda._sanitizer``): each launch is ordered after what
its stream has waited for. Beside that, memory that is given back is looked at: torch may give it at once to whatever
the stream that has asked for it launches next, so all other streams' uses must be ordered before that.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import _sanitizer

__all__ = ["Order"]


class _Arguments(_sanitizer.ArgumentHandler):
    """Which storages a launch reads and writes."""

    def __init__(self, inner_of: Callable[[Any], torch.Tensor | None]) -> None:
        super().__init__()
        self._inner_of = inner_of

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if (inner := self._inner_of(value)) is None or not inner.numel():
            return
        address = inner.untyped_storage().data_ptr()
        if is_write:
            self.dataptrs_written.add(address)
        elif not metadata_only:
            self.dataptrs_read.add(address)
        self.tensor_aliases.setdefault(address, []).append(name or "result")
        if is_output:
            self.outputs.add(address)


class Order:
    """Writes down what was launched where, in all threads of this process, and what was not in order.

    Args:
        inner_of: returns the hidden tensor of a tensor of the device; None: it is another value.
    """

    def __init__(self, inner_of: Callable[[Any], torch.Tensor | None]) -> None:
        self.found: list[str] = []
        """A sentence for each use that is not ordered after one before it."""
        self.streams: set[int] = set()
        """On which something was launched."""
        self._inner_of = inner_of
        self._lock = threading.RLock()  # memory is given back at any time
        self._events = _sanitizer.EventHandler()
        self._tensors: Counter[int] = Counter()  # by storage
        self._home: dict[int, int] = {}  # by storage, the stream that has asked for it

    def hold(self, inner: torch.Tensor, stream: int) -> None:
        """Note a tensor, which a stream has asked for if its memory is new."""
        address = inner.untyped_storage().data_ptr()
        with self._lock:
            self._home.setdefault(address, stream)
            self._tensors[address] += 1
        weakref.finalize(inner, self._release, address)

    def launch(self, stream: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation, whose arguments are as torch has given them."""
        is_factory = bool(_sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        used = _Arguments(self._inner_of)
        used.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        used.parse_outputs(func._schema, result, is_factory=is_factory)
        with self._lock:
            self.streams.add(stream)
            read, written = used.dataptrs_read - used.dataptrs_written, used.dataptrs_written
            self._note(stream, read, written, used.outputs, func._schema.name, used.tensor_aliases)

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self._events._handle_event_record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        with self._lock:
            self._events._handle_event_wait(event, stream)

    def synchronize(self, stream: int | None = None) -> None:
        """The host has waited for a stream; None: for all."""
        with self._lock:
            if stream is None:
                self._events._handle_device_synchronization()
            else:
                self._events._handle_stream_synchronization(stream)

    def _note(
        self,
        stream: int,
        read: set[int],
        written: set[int],
        outputs: set[int],
        name: str,
        aliases: dict[int, list[str]],
    ) -> None:
        found = self._events._handle_kernel_launch(stream, read, written, outputs, name, aliases)
        self.found += map(str, found)

    def _release(self, address: int) -> None:
        with self._lock:
            self._tensors[address] -= 1
            if not self._tensors[address]:
                self._note(self._home.pop(address), set(), {address}, set(), "give back", {address: ["memory"]})
                self._events._handle_memory_deallocation(address)
