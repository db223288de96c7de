"""An emulated accelerator, "emu": importing this module makes it known to torch, as a package of a vendor would.

A tensor on it is a wrapper whose bytes lie in a hidden tensor of the CPU: the CPU's kernels, so the CPU's bits. What a
GPU forbids raises here: ``numpy()``, an operation on tensors of two devices, a read of an address. What a GPU waits for
is recorded in `reads`: each read by the host, with its place, its thread and its bytes. A copy with
``non_blocking=True`` into the host's memory arrives only with a synchronize: until then the target is full of a
pattern that is wrong. Kernels are synchronous, so a place where two streams race is not found by its bits: `order`
finds it. ``module.to("emu")`` makes new parameters, so weights that were tied are not tied there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

from tests.emulated.ordering import Order

__all__ = ["CARD", "NAME", "Emulated", "Held", "Read", "calls", "control_reads", "reads", "staged_bytes", "synchronize"]

NAME = "emu"
CARD = "EMULATED_CARD"
"""Name of the environment variable with the id of the card, as "ID@DOMAIN:BUS:DEVICE", or without the address; else all
processes of a machine are on one card."""
WITHOUT_FLOAT64 = "EMULATED_WITHOUT_FLOAT64"
"""Name of the environment variable that makes the device one as Apple's, which has no such numbers."""
UNREADABLE = 1 << 62
"""Is set in each address that a tensor tells: whoever reads it ends with a signal."""
WRONG = 0x7F
"""Fills what has not arrived yet."""
STAGING = ("exchange/wire.py", "exchange/delivering.py", "checkpoint/snapshot.py")
"""Where what is read travels on as it is, by way of the host's memory: copies, at which Python does not look."""
READER = "unisono/system/reading.py"
"""Reads for others: the place is the one that calls it."""
RANDOM = ("native_dropout", "dropout", "bernoulli", "rand", "multinomial", "rrelu", "normal", "poisson", "attention")
"""Words in the names of operations that draw random numbers."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Read:
    """The host has waited for the device, and has read from it."""

    file: str
    """The last folder and the name."""
    line: int
    thread: str
    nbytes: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


reads: list[Read] = []
"""All since the import, or since somebody has cleared it."""
calls: Counter[str] = Counter()
"""How often each operation was launched."""
_generator = torch.Generator()
_pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # the host's memory, and what it will hold


def control_reads(found: Sequence[Read] | None = None) -> list[Read]:
    """Return the reads of values at which Python looks: all but the copies of `STAGING`."""
    return [read for read in (reads if found is None else found) if read.file not in STAGING]


def staged_bytes(found: Sequence[Read] | None = None) -> int:
    """Return how many bytes were copied from the device by `STAGING`."""
    return sum(read.nbytes for read in (reads if found is None else found) if read.file in STAGING)


def synchronize(device: object = None) -> None:
    """Wait for all streams, and until all copies into the host's memory have arrived."""
    if order is not None:
        order.synchronize()
    _arrive()


def _arrive() -> None:
    while _pending:
        target, source = _pending.pop(0)
        target.copy_(source)


def _wait() -> None:
    """Wait for what was launched on the current stream, and for what is launched now."""
    _here.waits = True
    _arrive()


def _note(nbytes: int) -> None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name and "<" not in name and not name.endswith(READER):
            path = Path(name)
            thread = threading.current_thread().name
            reads.append(Read(f"{path.parent.name}/{path.name}", frame.f_lineno, thread, nbytes))
            return
        frame = frame.f_back
    reads.append(Read("?", 0, threading.current_thread().name, nbytes))


class Held:
    """The bytes of the device that are in use: those of all tensors that came after it, each storage once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._tensors: Counter[int] = Counter()  # by storage

    def hold(self, inner: torch.Tensor) -> None:
        storage = inner.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not self._tensors[address]:
            self.now += nbytes
            self.peak = max(self.peak, self.now)
        self._tensors[address] += 1
        weakref.finalize(inner, self._release, address, nbytes)

    def _release(self, address: int, nbytes: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            self.now -= nbytes


held: Held | None = None
"""Set it to count bytes: it costs time."""
order: Order | None = None
"""Set it to look at the order of uses on several streams: it costs more."""
_streams = itertools.count(1)
_events = itertools.count(1)
_here = threading.local()


class Stream:
    """A stream of the device; number 0 is the one on which every thread begins."""

    def __init__(self, device: object = None, *, number: int | None = None) -> None:
        self.number = next(_streams) if number is None else number
        self.device = torch.device(NAME, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def wait_event(self, event: Event) -> None:
        if order is not None:
            order.wait(event.number, self.number)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self) -> None:
        self.number = next(_events)

    def record(self, stream: Stream | None = None) -> None:
        if order is not None:
            order.record(self.number, (stream or current_stream()).number)


_current: dict[int, Stream] = {}  # by thread


def current_stream(device: object = None) -> Stream:
    """Return this thread's stream. A backward pass, which torch computes in a thread of its own, is on that of the main
    thread: a GPU's is on that of the forward pass.
    """
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        thread = threading.main_thread()
    return _current.get(thread.ident or 0) or Stream(number=0)


def set_stream(stream: Stream) -> None:
    _current[threading.get_ident()] = stream


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before = current_stream()
    set_stream(stream)
    yield
    set_stream(before)


class Emulated(torch.Tensor):
    """A tensor on the device."""

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Emulated:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        if inner.dtype == torch.float64 and WITHOUT_FLOAT64 in os.environ:
            raise TypeError(f"a tensor of float64 on {self.device}, which has none")
        self._inner = inner
        if held is not None:
            held.hold(inner)
        if order is not None:
            order.hold(inner, current_stream().number)

    def __repr__(self, **_: Any) -> str:
        return f"{self._inner!r} on {self.device}"

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """An address that is unique, and that nobody may read."""
        return self._inner.data_ptr() | UNREADABLE if self.numel() else 0

    def untyped_storage(self) -> Any:
        inner = self._inner.untyped_storage()  # its size and its use are asked for; its bytes must not be read
        return types.SimpleNamespace(
            data_ptr=lambda: inner.data_ptr() | UNREADABLE,
            nbytes=inner.nbytes,
            size=inner.size,
            resizable=inner.resizable,
            resize_=inner.resize_,
            _cdata=inner._cdata,
            device=self.device,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def _get_data(self) -> torch.Tensor:
        return self.detach()

    def _set_data(self, other: torch.Tensor) -> None:
        other = other.detach()
        if not isinstance(other, Emulated):
            raise RuntimeError(f"set .data on {self.device} to a tensor on {other.device}")
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._inner = other._inner

    data = property(_get_data, _set_data)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, dict(kwargs or {}))


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, _here.waits = dict(kwargs), False
    result = _launch(func, args, kwargs)
    if order is not None:
        number = current_stream().number
        order.launch(number, func, args, given, result)
        if _here.waits:
            order.synchronize(number)
    return result


def _launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    calls[str(func)] += 1
    if func is aten._local_scalar_dense.default:
        _wait()
        _note(args[0].element_size())
        return args[0]._inner.item()
    if func is aten.is_pinned.default:
        return False
    if func in (aten._to_copy.default, aten.copy_.default):
        return _copy(func, args, kwargs)
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    is_here = any(isinstance(each, Emulated) for each in tensors)
    if is_here and any(not isinstance(each, Emulated) and each.dim() for each in tensors):
        found = [str(each.device) for each in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} ({func})")
    if (target := kwargs.get("device")) is not None:
        if torch.device(target).type != NAME:
            return func(*tree_map(_unwrap, args), **kwargs)  # empty_like(x, device="cpu"): nothing is read
        kwargs["device"] = torch.device("cpu")
    if kwargs.get("generator") is None and any(each.name == "generator" for each in func._schema.arguments):
        kwargs["generator"] = _generator
    with _draws(func):
        result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    return _wrapped(func, args, kwargs, result)


@contextlib.contextmanager
def _draws(func: Any) -> Iterator[None]:
    """Draw from the device's generator where an operation takes none (native_dropout)."""
    if not any(word in str(func) for word in RANDOM):
        yield
        return
    default = torch.default_generator
    saved = default.get_state()
    default.set_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(default.get_state())
        default.set_state(saved)


def new_order() -> Order:
    """Return what becomes `order`."""
    return Order(lambda value: value._inner if isinstance(value, Emulated) else None)


def _unwrap(value: Any) -> Any:
    return value._inner if isinstance(value, Emulated) else value


def _wrapped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Wrap the results; what an operation in place returns is the argument itself."""
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Emulated)]
    by_inner = {id(each._inner): each for each in given}
    changes = func._schema.is_mutable
    if changes and any(
        each.size() != each._inner.size() or each.stride() != each._inner.stride() for each in given
    ):  # resize_, set_, t_ ...
        raise RuntimeError(f"{func} changes a shape in place")

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Emulated):
            return value
        if changes and id(value) in by_inner:
            return by_inner[id(value)]
        return Emulated(value)

    return tree_map(one, result)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default:
        source, device = args[0], kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        kwargs.pop("pin_memory", None)
        if torch.device(source.device if device is None else device).type == NAME:
            moved = aten._to_copy.default(_unwrap(source), **kwargs)
            return Emulated(moved.clone() if moved is _unwrap(source) else moved)
        if torch.device(device).type == "meta":
            return aten._to_copy.default(source._inner, device=device, **kwargs)  # nothing is read
        _wait()
        _note(source.nbytes)  # new memory of the host is not pinned: it waits
        return aten._to_copy.default(source._inner, **kwargs).clone()
    target, source = args[0], args[1]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if isinstance(target, Emulated) or not isinstance(source, Emulated):
        _unwrap(target).copy_(_unwrap(source))
    elif non_blocking:
        whole = target.untyped_storage()
        if target.is_contiguous() and target.nbytes == whole.nbytes():
            whole.fill_(WRONG)
        else:
            target.fill_(WRONG)
        _pending.append((target, source._inner.clone()))
    else:
        _wait()
        _note(source.nbytes)
        target.copy_(source._inner)
    return target


def _properties(device: object = None) -> types.SimpleNamespace:
    own, _, address = os.environ.get(CARD, "").partition("@")
    parts = [int(part) for part in address.split(":")] if address else [None] * 3
    return types.SimpleNamespace(
        uuid=own or None, pci_domain_id=parts[0], pci_bus_id=parts[1], pci_device_id=parts[2], driver_version="1"
    )


class _Module:
    """``torch.emu``."""

    is_available = staticmethod(lambda: True)
    _initialized = True  # what torch.utils.checkpoint asks for
    is_initialized = staticmethod(lambda: True)
    is_built = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    synchronize = staticmethod(synchronize)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_device_name = staticmethod(lambda device=None: "emulated")
    get_device_properties = staticmethod(_properties)
    set_device = staticmethod(lambda device: None)
    device = staticmethod(lambda device: contextlib.nullcontext())
    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)
    set_stream = staticmethod(set_stream)
    stream = staticmethod(on_stream)
    manual_seed = staticmethod(_generator.manual_seed)
    manual_seed_all = staticmethod(_generator.manual_seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return _generator.get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        _generator.set_state(state)


def _install() -> tuple[Any, ...]:
    """Make the device known to torch; returns what must live as long as the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Any:
        return Emulated(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
        return Emulated(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        return _copy(aten.copy_.default, (target, source, non_blocking), {})

    def arange(*ends: Any, dtype: Any = None, **_: Any) -> Any:
        return Emulated(torch.arange(*ends, dtype=dtype))

    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange)
    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    library.impl("_copy_from", copy_from)
    return library, *_autocast()


LOWER = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "conv1d", "conv2d", "scaled_dot_product_attention")
UPPER = ("softmax.int", "log_softmax.int", "nll_loss", "cross_entropy_loss", "layer_norm")


def _autocast() -> tuple[Any, Any]:
    """Let ``torch.autocast("emu")`` do what it does on CUDA, for the most usual operations."""
    key = "AutocastPrivateUse1"
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, key)
    library = torch.library.Library("aten", "IMPL", key)

    def casts(name: str, dtype: torch.dtype | None) -> None:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(aten, packet), overload or "default")

        def call(*args: Any, **kwargs: Any) -> Any:
            wanted = dtype or torch.get_autocast_dtype(NAME)

            def cast(value: Any) -> Any:
                return value.to(wanted) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
                return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

        library.impl(name, call)

    for name in LOWER:
        casts(name, None)
    for name in UPPER:
        casts(name, torch.float32)
    return rest, library


_libraries = _install()
