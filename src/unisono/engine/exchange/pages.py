"""Shared memory of a worker that the other members of its host read: two pages, and its slots.

A worker has one `WorkerPage` for its whole life; the other members get its address once. For every generation that the
worker enters it makes a new `GenerationPage`, whose address it writes on the worker's page. Where it is in a group with
others, which carry one model together, it makes a `GroupPage` as well. Each page has one writer, the worker.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

from torch import Tensor

from unisono.core.telemetry import TELEMETRY_BYTES
from unisono.engine.exchange.flat import FlatLayout, Pool, Slot
from unisono.engine.exchange.shared_memory import Segment, fence, futex_wake

__all__ = [
    "MAX_MESSAGES",
    "MAX_NODES",
    "MAX_TEAM",
    "MAX_WORK",
    "GenerationPage",
    "GroupPage",
    "NodeFields",
    "OpenedWorkerPage",
    "Partner",
    "WorkerPage",
]

MAX_NODES = 256
MAX_WORK = 512
"""Leaves of one member that others may help with."""
MAX_TEAM = 4096
"""Members of one generation, on all hosts, whose telemetry fits on a page."""
MAX_MESSAGES = 256
"""Messages to one member of a group that this member has not read yet."""

COUNTERS = ("published", "shown", "reduced", "posted", "read", "staged", "copied")
"""Names of the counters; `unisono.engine.exchange.host` says what each of them counts."""

_Address = ctypes.c_char * 160
_Counter = ctypes.c_uint32 * 16  # a counter and the rest of its cache line


class _WorkerFields(ctypes.Structure):
    """``generation``: the worker's generation plus 1; 0: none yet. ``page``: address of its `GenerationPage`."""

    _fields_ = [("generation", _Counter), ("page", _Address)]


class NodeFields(ctypes.Structure):
    """A published node, and the address of its slot."""

    _fields_ = [("level", ctypes.c_uint64), ("index", ctypes.c_uint64), ("slot", _Address)]


class GenerationFields(ctypes.Structure):
    """Layout of a `GenerationPage`; `unisono.engine.exchange.host` says when each field may be written and read."""

    _fields_ = [
        *((name, _Counter) for name in COUNTERS),
        ("left", _Counter),
        ("work", _Counter),
        ("started", _Counter),
        ("num_taken", _Counter),
        ("num_todo", ctypes.c_uint64),
        ("todo", ctypes.c_uint32 * MAX_WORK),
        ("taken", ctypes.c_uint32 * MAX_WORK),
        ("num_nodes", ctypes.c_uint64),
        ("digest", ctypes.c_uint64),
        ("payload_bytes", ctypes.c_uint64),
        ("result", _Address),
        ("payload", _Address),
        ("stage", _Address),
        ("nodes", NodeFields * MAX_NODES),
        ("telemetry", ctypes.c_ubyte * TELEMETRY_BYTES),
        ("team_telemetry", ctypes.c_ubyte * (TELEMETRY_BYTES * MAX_TEAM)),
    ]


class GenerationPage:
    """Page of one member in a generation, as the members of its host see it.

    Args:
        segment: of `NUM_BYTES` bytes.
    """

    NUM_BYTES = ctypes.sizeof(GenerationFields)

    def __init__(self, segment: Segment) -> None:
        self.fields = GenerationFields.from_buffer(segment.map)
        self.left = _counter(self.fields, "left")
        self.started = _counter(self.fields, "started")
        self.work = _counter(self.fields, "work")
        self.counters = {name: _counter(self.fields, name) for name in COUNTERS}
        self.mapped: dict[str, Tensor] = {}

    @property
    def words(self) -> Collection[ctypes.c_uint32]:
        """Return the words that others may wait for until this member leaves."""
        return [*self.counters.values(), self.work]

    def map(self, address: bytes) -> Tensor:
        """Return other memory of the same member.

        Raises:
            FileNotFoundError: the member is gone, or has closed it.
        """
        key = address.decode()
        if key not in self.mapped:
            self.mapped[key] = Segment.open(key).tensor()
        return self.mapped[key]


class _PartnerFields(ctypes.Structure):
    """What a member of a group has for one other member; `unisono.engine.exchange.pairs` says what each field is."""

    _fields_ = [
        *((name, _Counter) for name in ("sent", "taken", "shown")),
        ("swap", _Address),
        ("slots", _Address * MAX_MESSAGES),
    ]


class Partner:
    """The part of a `GroupPage` that is for one other member."""

    def __init__(self, segment: Segment, start: int) -> None:
        self.fields = _PartnerFields.from_buffer(segment.map, start)
        self.sent, self.taken, self.shown = (_counter(self.fields, name) for name in ("sent", "taken", "shown"))


class GroupPage:
    """Page of one member of a group of ``size``, as the members on its host see it.

    Args:
        segment: of ``num_bytes(size)`` bytes.
    """

    def __init__(self, segment: Segment, size: int) -> None:
        self.left = ctypes.c_uint32.from_buffer(segment.map)
        first, each = ctypes.sizeof(_Counter), ctypes.sizeof(_PartnerFields)
        self.partners = [Partner(segment, first + index * each) for index in range(size)]
        """What it has for each member of the group."""

    @staticmethod
    def num_bytes(size: int) -> int:
        return ctypes.sizeof(_Counter) + size * ctypes.sizeof(_PartnerFields)

    @property
    def words(self) -> Collection[ctypes.c_uint32]:
        """Return the words that others may wait for until this member leaves."""
        return [word for each in self.partners for word in (each.sent, each.taken, each.shown)]


class WorkerPage:
    """This worker's own page, and its slots, which live as long as it does."""

    def __init__(self) -> None:
        self._segment = Segment.create(ctypes.sizeof(_WorkerFields))
        self._fields = _WorkerFields.from_buffer(self._segment.map)
        self._segments: dict[int, Segment] = {}  # by the address in memory where a slot begins
        self.slots = Pool(self._allocate)
        self.address = self._segment.address

    def enter(self, generation: int, page: str) -> None:
        """Publish that this worker is in ``generation`` now, and the address of its page of that generation."""
        counter = _counter(self._fields, "generation")
        if generation + 1 <= counter.value:
            raise ValueError(
                f"this worker has been in generation {counter.value - 1} and cannot enter {generation}: generation "
                "numbers only grow"
            )
        self._fields.page = page.encode()
        fence()
        counter.value = generation + 1
        futex_wake(counter)

    def keep(self, layout: FlatLayout, slots: Sequence[Slot]) -> list[Slot]:
        """Free all slots but these. Return for each of them a slot of this worker: itself or a copy."""
        self.slots.keep(layout, [slot for slot in slots if slot in self.slots])
        for address in self._segments.keys() - {slot.memory.data_ptr() for slot in self.slots}:
            self._segments.pop(address).close()
        return [slot if slot in self.slots else slot.copy_to(self.slots.slot()) for slot in slots]

    def find(self, slot: Slot) -> str:
        """Return the address by which others find a slot of this worker."""
        return self._segments[slot.memory.data_ptr()].address

    def _allocate(self, layout: FlatLayout) -> Tensor:
        segment = Segment.create(layout.slot_bytes)
        memory = segment.tensor()
        self._segments[memory.data_ptr()] = segment
        return memory

    def close(self) -> None:
        """Close everything: no other worker can open memory of this worker any more."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self.slots.clear()
        self._segment.close()


class OpenedWorkerPage:
    """Another worker's page, opened.

    Raises:
        FileNotFoundError: that worker is gone.
    """

    def __init__(self, address: str) -> None:
        self._fields = _WorkerFields.from_buffer(Segment.open(address).map)
        self.generation = _counter(self._fields, "generation")

    def open_page(self, generation: int) -> GenerationPage | None:
        """Return the worker's page of a generation that it has entered; None: it has left that generation.

        Raises:
            FileNotFoundError: the worker is gone.
        """
        fence()
        address = self._fields.page.decode()
        fence()
        # The worker may have entered another generation while the address was read.
        return GenerationPage(Segment.open(address)) if self.generation.value == generation + 1 else None


def _counter(fields: ctypes.Structure, name: str) -> ctypes.c_uint32:
    """Return the counter itself, to wait for or to wake."""
    return ctypes.c_uint32.from_buffer(fields, getattr(type(fields), name).offset)
