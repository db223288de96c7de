"""Settings that a script gives: threads, deterministic kernels, device, numbers; and what glibc does with memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.engine.exchange.flat import check_counting
from unisono.system import accelerators
from unisono.system.fingerprint import floating_point

__all__ = [
    "Arithmetic",
    "check_whole",
    "choose_device",
    "choose_threads",
    "give_back_freed_memory",
    "keep_freed_memory",
]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@dataclass
class Arithmetic:
    """Settings of torch that equal bits need, made by `enter` and taken back by `leave`."""

    threads: int
    deterministic: bool

    def enter(self) -> None:
        self._torchscript = ExitStack()
        self.floating_point = floating_point()
        self._before = (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark,
            os.environ.get(_CUBLAS),
        )
        check_counting()
        keep_freed_memory(os.environ)
        torch.set_num_threads(self.threads)
        if self.deterministic:
            # Read by cuBLAS when its first handle is made.
            os.environ.setdefault(_CUBLAS, ":4096:8")
            torch.use_deterministic_algorithms(True)
            # It costs 8 ms for 10 million floats, and is not needed: Unisono writes all memory that it allocates.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = False

    def keep_torchscript_alike(self, module: nn.Module) -> None:
        """Have a module of TorchScript computed in the same way each time, if ``module`` has one.

        Otherwise TorchScript compiles after some calls, for what it has seen in these, so the bits of a micro-batch
        would depend on what a worker has computed before.
        """
        if self.deterministic and any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):
            self._torchscript.enter_context(torch.jit.optimized_execution(False))

    def leave(self) -> None:
        self._torchscript.close()
        threads, deterministic, warn_only, fill, benchmark, cublas = self._before
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        if self.deterministic and cublas is None:
            os.environ.pop(_CUBLAS, None)


def keep_freed_memory(environment: Mapping[str, str]) -> None:
    """Let glibc keep freed memory for the next micro-batch, instead of giving it back to the system.

    By default tensors of some megabytes are mapped anew again and again, and every page of theirs costs a fault: up to
    a tenth of a step. If the user has set the allocator by its environment variables, this changes nothing.
    """
    if sys.platform != "linux" or any(
        name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in value)
        for name, value in environment.items()
    ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Let glibc give freed memory back to the system, once: where something large is not needed again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def choose_threads(argument: int | None, default: int) -> int:
    """Return the CPU threads of a worker: the script's argument, else the command's (--threads). The number of workers
    never counts: it would change the bits.
    """
    threads = argument if argument is not None else default
    if threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    return threads


def choose_device(argument: str | torch.device | None, number: int) -> torch.device:
    """Return the device of this worker: the argument, else its own accelerator if there is one, else the CPU. An
    accelerator becomes the current one: random numbers are set for that one.

    Args:
        number: of the worker's accelerator, as `WorkerSpec.gpu_number`.

    Raises:
        UsageError: this process has no such device.
    """
    if argument is None:
        return accelerators.choose(number)
    device = torch.device(argument)
    if device.type == "cpu":
        return device
    if device.type == accelerators.APPLE and torch.backends.mps.is_available():
        return accelerators.use(device)
    if device.type != (found := accelerators.kind()):
        has = f'the CPU and "{found}"' if found else "the CPU only"
        raise UsageError(f"device={str(argument)!r}: torch has no such device on this machine, which has {has}")
    if (device.index or 0) >= (number_of := torch.get_device_module(device).device_count()):
        raise UsageError(f"device={str(argument)!r}: this process sees {count(number_of, 'device')} of this kind")
    return accelerators.use(device)


def check_whole(name: str, value: object) -> None:
    """Check an argument that is a number of things.

    Raises:
        UsageError: it is no whole number; names it.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{name} must be a whole number, got {value!r}")
