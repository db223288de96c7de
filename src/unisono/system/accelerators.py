"""The accelerator of this process: CUDA, ROCm, XPU, or what else has made itself known to torch. Imports torch.

What all of them have is asked of ``torch.accelerator`` and of the device's own module (``torch.cuda``, ``torch.xpu``).
What only CUDA has stands here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist

from unisono.system.controlgroups import machine_name

__all__ = [
    "adds_on",
    "built_for",
    "capacity",
    "cards",
    "choose",
    "facts",
    "follow",
    "generators",
    "has_streams",
    "kind",
    "library",
    "mark",
    "memory",
    "on_stream",
    "open_library",
    "peak_bytes",
    "pins",
    "reset_peak",
    "stream",
    "synchronize",
    "use",
    "use_own_stream",
    "used",
]

HOST_LIBRARIES: Final = ("gloo", "mpi", "ucc", "fake")
"""Backends of ``torch.distributed`` that are no library of an accelerator: they are not handed its tensors."""
LOST_PEERS: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What NCCL's group must do when a member is gone: nothing, for the others continue. By default its watchdog, or its
monitor, ends the process."""
KERNELS: Final = ("nvidia-cublas-cu12", "nvidia-cublas", "triton")
"""Packages with kernels that torch has no version of its own for."""
NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")
"""Names the driver's version in its first line. Torch does not say it."""
APPLE: Final = "mps"
"""Is used where a script names it: it has no float64, a worker has no other one, and no test has met one."""
_named: set[str] = set()  # kinds of devices that this process was told to use


def built_for() -> str:
    """Return the type of accelerator that torch was built for, or that was made known to it, or "". Asks no driver."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return ""
    return found.type if found is not None and (found.type != APPLE or APPLE in _named) else ""


def kind() -> str:
    """Return the type of the accelerator that this process can use, e.g. "cuda"; "" where there is none."""
    name = built_for()
    return name if name and torch.get_device_module(name).is_available() else ""


def used() -> ModuleType | None:
    """Return the module of the accelerator that this process has begun to use, e.g. ``torch.cuda``. Starts nothing."""
    if not (name := built_for()):
        return None
    module = torch.get_device_module(name)
    return module if getattr(module, "is_initialized", module.is_available)() else None


def generators() -> dict[str, torch.Tensor]:
    """Return the state of the accelerator's generator by the kind of device, if there is one in use."""
    return {built_for(): module.get_rng_state()} if (module := used()) is not None else {}


def choose(number: int) -> torch.device:
    """Return the device of this process, the CPU if there is no other; a number beyond the last begins anew."""
    if not (name := kind()):
        return torch.device("cpu")
    return use(torch.device(name, number % torch.get_device_module(name).device_count()))


def use(device: torch.device) -> torch.device:
    """Make a device the current one of this thread: random numbers are set for that one. Returns it with its index."""
    _named.add(device.type)
    if device.type == APPLE:
        return torch.device(APPLE, 0)
    module = torch.get_device_module(device)
    if device.index is None:
        device = torch.device(device.type, module.current_device())
    module.set_device(device.index)
    return device


@functools.cache
def _has_float64(kind: str) -> bool:
    try:
        torch.empty(0, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return False
    return True


def adds_on(device: torch.device) -> torch.device:
    """Return where the sums of a device's tensors are made: there, or on the CPU where the device has no float64."""
    return device if _has_float64(device.type) else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    torch.get_device_module(device).synchronize()


@functools.cache
def pins(kind: str) -> bool:
    """Return whether this kind of device copies from pinned memory of the host."""
    if kind in ("cpu", APPLE):
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


# -- streams ------------------------------------------------------------------------------------------------------


def has_streams(device: torch.device) -> bool:
    """Return whether a device has several streams, which do not wait for each other."""
    return device.type not in ("cpu", APPLE) and hasattr(torch.get_device_module(device), "Stream")


def use_own_stream(device: torch.device) -> None:
    """Make a device the current one of this thread, and let the thread launch on a stream of its own from now on."""
    if device.type != "cpu":
        use(device)
    if has_streams(device):
        module = torch.get_device_module(device)
        module.set_stream(module.Stream(device))


def stream(device: torch.device) -> Any:
    """Return the stream on which this thread launches; None where there are no streams."""
    return torch.get_device_module(device).current_stream(device) if has_streams(device) else None


@contextlib.contextmanager
def on_stream(given: Any) -> Iterator[None]:
    """Launch on a stream that `stream` has returned. What this thread's own is given afterwards begins after that."""
    if given is None or given == (own := stream(given.device)):
        yield
        return
    device = given.device
    module = torch.get_device_module(device)
    module.set_stream(given)
    try:
        yield
    finally:
        done = mark(device)
        module.set_stream(own)
        follow(device, done)


def mark(device: torch.device) -> Any:
    """Return an event after all that was launched on this thread's stream; None where there are no streams."""
    if (own := stream(device)) is None:
        return None
    event = torch.get_device_module(device).Event()
    event.record(own)
    return event


def follow(device: torch.device, event: Any) -> None:
    """Let what is launched on this thread's stream from now on begin after an event of `mark`."""
    if event is not None:
        stream(device).wait_event(event)


# -- memory -------------------------------------------------------------------------------------------------------


def memory(device: torch.device) -> tuple[int, int]:
    """Return the most bytes that this process has had on a device, and how many it could have; 0: it is not known."""
    limit = 0
    with contextlib.suppress(RuntimeError, AttributeError):
        module = torch.get_device_module(device)
        limit = module.mem_get_info(device)[0] + module.memory_reserved(device)
    return peak_bytes(device), limit


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has had on a device since `reset_peak`; 0: it is not known."""
    ask = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return int(ask(device)) if ask is not None else 0


def reset_peak() -> None:
    """Begin to count the most bytes anew."""
    if (module := used()) is not None and hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()


def capacity(device: torch.device) -> int | None:
    """Return the memory of a whole device; None: it is not known."""
    return getattr(_properties(device), "total_memory", None)


# -- what it is ---------------------------------------------------------------------------------------------------


def _properties(device: torch.device) -> Any:
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return ask(device) if ask is not None else None


def facts(device: torch.device) -> dict[str, str]:
    """Return what the results of an accelerator depend on, for a fingerprint."""
    module = torch.get_device_module(device)
    found = {"device name": module.get_device_name(device)} if hasattr(module, "get_device_name") else {}
    if (driver := getattr(_properties(device), "driver_version", None)) is not None:
        found["driver"] = str(driver)
    for name in KERNELS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        with contextlib.suppress(OSError):  # another maker's driver, or a container that hides it
            found["driver"] = " ".join(re.findall(r"\d+\.[\d.]*\d", NVIDIA_DRIVER.read_text())[:1])
        found["blas"] = str(torch.backends.cuda.preferred_blas_library())
        found["linalg"] = str(torch.backends.cuda.preferred_linalg_library())
        if torch.version.hip is not None:
            found["rocm"] = str(torch.version.hip)
    return found


def cards(device: torch.device) -> list[str]:
    """Return the names by which the card of a device is known: those of two devices on one card have one in common.

    Its number is none of them: that depends on what the process may see. A slice of a card has an id of its own, and
    the card's address on the bus, by which libraries connect.
    """
    here = machine_name()
    properties = _properties(device)
    found = []
    if (own := getattr(properties, "uuid", None)) is not None:
        found.append(str(own))
    address = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None not in address:
        found.append(f"{here}/{':'.join(f'{part:04x}' for part in address)}")
    return found or [f"{here}/{device}"]


# -- the library of collectives -----------------------------------------------------------------------------------


def library(device: torch.device) -> str:
    """Return the name of the backend of ``torch.distributed`` that connects devices of this kind; "": none does."""
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    if name in HOST_LIBRARIES or not dist.is_backend_available(name or "gloo"):
        return ""
    return name


def open_library(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[Any, list[str]]:
    """Return a group of the devices' own library, and what of this process' environment was overruled for it.

    The members are not connected yet: the first collective does that.
    """
    if name == "nccl":
        overruled = [
            f"{key}={os.environ[key]}" for key, value in LOST_PEERS.items() if os.environ.get(key, value) != value
        ]
        os.environ.update(LOST_PEERS)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options), overruled
    if name == "xccl":
        given = dist.ProcessGroupXCCL.Options()
        given._timeout = timeout
        return dist.ProcessGroupXCCL(store, rank, size, given), []
    plugin: Any = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout), []
    asked: Any = dist.distributed_c10d._DistributedBackendOptions()
    asked.store, asked.group_rank, asked.group_size, asked.timeout = store, rank, size, timeout
    asked.group_id, asked.global_ranks_in_group = "unisono", list(range(size))
    return plugin.creator_fn(asked, None), []
