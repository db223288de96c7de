"""The instructions that a run's workers compute with.

Libraries choose their kernels by the processor, so processors of several kinds give several results
(`unisono.system.probe` shows it). The setting ``arithmetic`` holds all of them to what each has. Libraries read its
variables when they are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from unisono.core.errors import UsageError
from unisono.core.settings import Instructions
from unisono.core.words import listed
from unisono.system.controlgroups import text_of

__all__ = ["check", "name_of", "variables"]

_TORCH, _ONEDNN, _MKL = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"
_VARIABLES: Final[Mapping[Instructions, Mapping[str, str]]] = {
    "avx2": {_TORCH: "avx2", _ONEDNN: "AVX2", _MKL: "AVX2"},
    "avx512": {_TORCH: "avx512", _ONEDNN: "AVX512_CORE", _MKL: "AVX512"},
    "compatible": {_TORCH: "avx2", _ONEDNN: "AVX2", _MKL: "COMPATIBLE"},
}
_NEEDED: Final[Mapping[Instructions, frozenset[str]]] = {
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}),
    "compatible": frozenset({"avx2", "fma"}),
}


def variables(name: Instructions | None) -> dict[str, str]:
    """Return the environment variables that hold libraries to these instructions; None: none of them.

    MKL takes other kernels than its compatible ones on processors of Intel only.
    """
    if name is None:
        return {}
    found = dict(_VARIABLES[name])
    if "GenuineIntel" not in _of_processor("vendor_id"):
        found[_MKL] = "COMPATIBLE"
    return found


def name_of(environment: Mapping[str, str]) -> str:
    """Return the name of the instructions to which these variables hold libraries; "": they are left to them.

    Args:
        environment: of a process; or its fingerprint, which has them as well.
    """
    given = {name: environment.get(name) for name in (_TORCH, _ONEDNN, _MKL)}
    return next((name for name, wanted in _VARIABLES.items() if wanted == given), "")


def check(name: Instructions, environment: Mapping[str, str], *, is_alone: bool) -> None:
    """Check that this process computes with these instructions.

    Args:
        is_alone: it was not started by ``unisono run``.

    Raises:
        UsageError: it does not, or the processor lacks them; says what to do.
    """
    if name not in _VARIABLES:
        raise UsageError(f"arithmetic must be one of {', '.join(_VARIABLES)}; got {name!r}")
    if missing := sorted(_NEEDED[name] - flags) if (flags := _of_processor("flags")) else []:
        raise UsageError(f"arithmetic={name} needs {listed(missing)}, which the processor of this machine lacks")
    wanted = variables(name)
    if any(environment.get(variable) != value for variable, value in wanted.items()):
        words = " ".join(f"{variable}={value}" for variable, value in wanted.items())
        start = f"{words} python train.py" if is_alone else f"unisono run train.py --set arithmetic={name}"
        raise UsageError(
            f"the script wants arithmetic={name!r}, but this process computes differently: libraries choose their "
            f"kernels when they are loaded. Start it with: {start}"
        )
    import torch

    if (found := torch.backends.cpu.get_cpu_capability()) != wanted[_TORCH].upper():
        raise UsageError(f"arithmetic={name} was requested, but torch {torch.__version__} computes with {found} here")


@functools.cache
def _of_processor(what: str) -> frozenset[str]:
    """Return the words after this name in what Linux says of the first processor; empty where there are none."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    found = next((line.partition(":")[2] for line in lines if line.split(":")[0].strip() == what), "")
    return frozenset(found.split())
