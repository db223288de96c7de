"""Use of this machine's GPUs, by NVIDIA's management library (the optional package ``nvidia-ml-py``)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from unisono.core.events import GpuUse
from unisono.system.capacity import machine_gpus

__all__ = ["Gpus"]


class Gpus:
    """The GPUs that the workers of this machine may use. The library is loaded when the first of them is looked at.

    Args:
        names: of `machine_gpus`; default: those of this machine.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = list(machine_gpus() if names is None else names)
        self._library: Any = None
        self._handles: list[Any] = []

    def read(self) -> list[GpuUse]:
        """Return the use of each GPU; nothing where there is none, or it cannot be asked."""
        if not self._names:
            return []
        try:
            if self._library is None:
                self._library = importlib.import_module("pynvml")
                self._library.nvmlInit()
                self._handles = [_handle(self._library, name.removeprefix("gpu-")) for name in self._names]
            return [_use(self._library, handle) for handle in self._handles]
        except ImportError:  # the package is not installed
            self._names = []
        except Exception:  # the driver says no, or has other functions
            self._names = []
        return []


def _handle(library: Any, name: str) -> Any:
    """Return what the library calls a GPU, by its number or its UUID, as in CUDA_VISIBLE_DEVICES."""
    if name.isdecimal():
        return library.nvmlDeviceGetHandleByIndex(int(name))
    return library.nvmlDeviceGetHandleByUUID(name)


def _use(library: Any, handle: Any) -> GpuUse:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return GpuUse(
        utilization=library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        memory_bytes=int(memory.used),
        memory_total_bytes=int(memory.total),
    )
