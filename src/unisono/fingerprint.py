"""What a worker's arithmetic depends on, beside the recipe: the same on all workers, or the bits may differ."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["fingerprint"]

_SWITCHES: Final = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
"""Environment variables that choose kernels."""


def fingerprint(device: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What equal bits depend on, in words, for a worker that computes on ``device``. Imports torch."""
    import torch

    found = os.environ if environment is None else environment
    facts = {
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": device.partition(":")[0],
    }
    if device.startswith("cuda"):
        facts["device name"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
    facts.update({name: found[name] for name in _SWITCHES if name in found})
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part", "uarch")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
