"""Modes of this process and of the thread that trains, on which the bits of a step depend: rounding, precision, dtype.

A mode of a thread (whether the processor flushes denormal numbers to zero, how it rounds) is inherited when a thread
starts, so threads that were started before a change go on without it: those that add sums from other hosts, and torch's
own. Such a mode may change until the run begins, also by an import: libraries that were linked with ``-ffast-math`` set
it. A mode of the process may change between two training loops. Within one, a worker that joins later would not get
there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import torch

from unisono.core.errors import StepError, UsageError
from unisono.system import accelerators
from unisono.system.fingerprint import FLOATING_POINT, USUAL_FLOATING_POINT, floating_point

__all__ = ["MEASURING", "check_begun", "check_unchanged", "modes", "unusual"]

MEASURING: Final = "kernels chosen by measuring"
_USUAL: Final = {
    FLOATING_POINT: (USUAL_FLOATING_POINT,),
    MEASURING: ("none",),
    "default dtype": ("float32",),
    "autocast on the CPU": ("off",),
    "autocast on GPUs": ("off",),
    "mkldnn.matmul.fp32_precision": ("none", "ieee", ""),
    "mkldnn.conv.fp32_precision": ("none", "ieee", ""),
    "cuda.matmul.fp32_precision": ("none", "ieee", ""),
    "cudnn.conv.fp32_precision": ("none", "tf32", ""),
    "cudnn.enabled": ("True",),
    "mkldnn.enabled": ("True",),
}
"""What torch and the processor do unless somebody asks for something else; "": this torch has no such switch."""
_CHOOSING: Final = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
)
"""Options of torch.compile with which it tries kernels, and takes the one that was the fastest here and now."""
POOL_GRAIN: Final = 1 << 15
"""Elements of a tensor for which torch takes one more thread."""


def modes() -> dict[str, str]:
    """Return the modes by name. Takes some microseconds."""
    found = {
        FLOATING_POINT: floating_point(),
        MEASURING: _measuring(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.get_deterministic_debug_mode()),
        "autocast on the CPU": _autocast("cpu"),
        "autocast on GPUs": _autocast(accelerators.built_for() or "cuda"),
    }
    return found | {name: _switch(name) for name in _USUAL if "." in name}


def unusual(found: Mapping[str, str], *, threads: int) -> str:
    """Return the modes that are not as torch has them by default, in words, for the recipe; "": there are none.

    Args:
        threads: of the run.
    """
    usual = {**_USUAL, "threads": (str(threads),)}
    return "; ".join(f"{name}: {value}" for name, value in found.items() if value not in usual.get(name, (value,)))


def check_begun(before: str, *, threads: int, num_workers: int, deterministic: bool) -> None:
    """Check, when a training loop begins, that all threads of this worker compute in the same mode, and that all
    workers take the same kernels.

    Args:
        before: what `floating_point` returned when the run began.
        deterministic: as `Run(deterministic=)`.

    Raises:
        UsageError: they do not; says what to do.
    """
    if deterministic and num_workers > 1 and (found := _measuring()) != "none":
        raise UsageError(
            f"torch.compile chooses kernels by measuring ({found}), so each of the {num_workers} workers may choose "
            'different ones, and get different bits. Compile without mode="max-autotune" and without these options, or '
            "use a version of torch whose compiler has a deterministic mode (torch._inductor.config.deterministic)"
        )
    if (now := floating_point()) != before:
        raise UsageError(
            f"the floating-point mode of this thread has changed since the run began, from {before!r} to {now!r}, but "
            f"other threads of this worker keep the old one. {_ADVICE}"
        )
    if threads > 1:
        tiny = torch.full((threads * POOL_GRAIN,), torch.finfo(torch.float32).tiny, dtype=torch.float32)
        for values in (tiny / 10, torch.ones_like(tiny) / 3):
            if len(values.view(torch.int32).unique()) > 1:
                raise UsageError(
                    f"torch computes with {threads} threads, and some of them were started before the floating-point "
                    f"mode was set ({now!r}): parts of one tensor would be computed in different modes. {_ADVICE}"
                )


_ADVICE: Final = (
    "Call torch.set_flush_denormal, or import the library that sets the mode (those that were linked with -ffast-math "
    "do), in the first lines of the script: before torch computes anything, and before unisono.Run(...)"
)


def check_unchanged(before: Mapping[str, str], where: str) -> None:
    """Check that the modes are those of the beginning of the training loop.

    Args:
        where: ``step 3``.

    Raises:
        StepError: they are not; names what has changed.
    """
    if (now := modes()) == before:
        return
    name = next(one for one in before if now[one] != before[one])
    what = f"{name}: from {before[name]!r} to {now[name]!r}"
    if name == FLOATING_POINT:
        raise StepError(f"the mode of this thread has changed in {where} ({what}). {_ADVICE}")
    raise StepError(
        f"a mode on which all bits depend has changed in {where} ({what}), and workers that join later would not have "
        "it. Set it before the training loop, or restore it before the step ends"
    )


def _autocast(device: str) -> str:
    if not torch.is_autocast_enabled(device):
        return "off"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _measuring() -> str:
    """Return the options by which compiled functions of this process have their kernels chosen by measuring; "none".

    Where torch's compiler has a deterministic mode, `torch.use_deterministic_algorithms` sets it, and then it measures
    nothing that bits depend on, whatever else is asked for (pytorch/pytorch#163589, #165950).
    """
    options = sys.modules.get("torch._inductor.config")
    if options is None or getattr(options, "deterministic", False):
        return "none"
    # torch has no public word for what was compiled with which options.
    compiled = list(getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {}).values())
    given = [config for each in compiled if isinstance(config := getattr(each, "config", None), dict)]
    found = [name for name in _CHOOSING if getattr(options, name, False) or any(each.get(name) for each in given)]
    return ", ".join(found) or "none"


def _switch(name: str) -> str:
    found: Any = torch.backends
    for part in name.split("."):
        found = getattr(found, part, "")
    return str(found)
