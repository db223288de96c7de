"""Fingerprint of a worker: everything but the script that its arithmetic depends on. Other fingerprint, other bits."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from unisono.system.controlgroups import text_of
from unisono.system.owned import read_regular

__all__ = [
    "FLOATING_POINT",
    "MOST_SCRIPT",
    "SWITCHES",
    "USUAL_FLOATING_POINT",
    "about_script",
    "chosen_by",
    "fingerprint",
    "floating_point",
    "foretold",
    "own_command",
    "package_checksum",
    "script_checksum",
    "script_file",
]

SWITCHES: Final = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "HIPBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables by which libraries choose their kernels."""
FLOATING_POINT: Final = "floating point"
USUAL_FLOATING_POINT: Final = "to nearest"
MOST_SCRIPT: Final = 1 << 30
"""Bytes of a script, or of a pickled function."""
_NUMBERS: Final = [1.0, 3.0, 10.0, sys.float_info.min, 5e-324, 1e300]
"""A list, so that Python computes with them when asked, and not when it compiles."""


def fingerprint(device: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the fingerprint of a worker that computes on ``device``: values by name, as text. Imports torch."""
    import torch

    from unisono.core.fingerprints import RESULTS
    from unisono.system.probe import results

    found = os.environ if environment is None else environment
    facts = {
        **foretold(found),
        "torch": str(torch.__version__),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": device.partition(":")[0],
        RESULTS: results(),
    }
    if (mode := floating_point()) != USUAL_FLOATING_POINT:
        facts[FLOATING_POINT] = mode
    if not device.startswith("cpu"):
        from unisono.system import accelerators

        facts |= accelerators.facts(torch.device(device))
    return facts


def foretold(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a fingerprint that are known before torch is imported."""
    return {
        "torch": _torch_version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "processor": _processor(),
        **{name: environment[name] for name in SWITCHES if name in environment},
    }


def chosen_by(environment: Mapping[bytes, bytes]) -> list[bytes | None]:
    """Return the values of `SWITCHES` in an environment."""
    return [environment.get(name.encode()) for name in SWITCHES]


def _torch_version() -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version("torch")
    return ""


def floating_point() -> str:
    """Return in words how this thread rounds, and whether it flushes denormal numbers to zero. Takes a microsecond."""
    one, three, ten, smallest, denormal, large = _NUMBERS
    third, tenth = (one / three).hex()[-4], (one / ten).hex()[-4]
    if (third, tenth) == ("5", "a"):
        words = USUAL_FLOATING_POINT
    elif tenth == "a":
        words = "rounds up"
    else:
        words = "rounds to zero" if (-one / three).hex()[-4] == "5" else "rounds down"
    if smallest / ten == 0.0:
        words += ", denormal results are flushed to 0"
    if denormal * large == 0.0:
        words += ", denormal inputs count as 0"
    return words


def script_checksum(arguments: Sequence[str]) -> str:
    """Return a checksum of the script's text: of this one file, not of the modules that it imports.

    Args:
        arguments: ``SCRIPT ...``, ``-m MODULE ...``, or ``--callable FILE ...`` with a pickled function.

    Returns:
        Eight hexadecimal digits; "" if there is no file that can be read.
    """
    path = script_file(arguments)
    with contextlib.suppress(OSError, ValueError):
        return f"{zlib.crc32(read_regular(path.resolve(), MOST_SCRIPT)):08x}" if path is not None else ""
    return ""


def script_file(arguments: Sequence[str], folder: str | None = None) -> Path | None:
    """Return the file of a script; None: there is none.

    Args:
        arguments: as `script_checksum` takes them.
        folder: in which the run began; None: the current one.
    """
    match arguments:
        case ["-m", module, *_]:
            path = _file_of(module, folder)
        case ["--callable", path, *_] | [path, *_]:
            pass
        case _:
            return None
    return Path(folder or "", path) if path else None


def own_command() -> dict[str, Any] | None:
    """Return the folder and the arguments of a script that runs alone, as `unisono.core.spec.RunSpec.command` says them
    of a worker; None where this process runs no script, e.g. at a prompt or in a notebook.
    """
    words = list(sys.orig_argv[1:])
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]
    if not words or words[0] in ("-c", "-") or (words[0] != "-m" and not os.path.isfile(words[0])):
        return None
    return {"folder": os.getcwd(), "arguments": words}


def about_script(command: Any) -> dict[str, str]:
    """Return what of a script and of this process says why the bits of two runs differ: checksum and hash seed.

    Args:
        command: of the run, as `own_command` returns it; anything else: the script is not known.
    """
    found = {"hash seed": os.environ.get("PYTHONHASHSEED", "")}
    if isinstance(command, dict) and (checksum := script_checksum(command.get("arguments", []))):
        found["script"] = checksum
    return found


def package_checksum() -> str:
    """Return a checksum of Unisono's own source, eight hexadecimal digits: checkouts may differ within a version."""
    own = Path(__file__).parents[1]
    total = 0
    for path in sorted(own.rglob("*.py")):
        total = zlib.crc32(path.relative_to(own).as_posix().encode() + b"\n" + path.read_bytes(), total)
    return f"{total:08x}"


def _file_of(module: str, folder: str | None = None) -> str:
    """Return the file that `runpy` would run for a module, without importing the packages around it; "" for none."""
    path: Sequence[str] | None = [folder or os.getcwd(), *sys.path]
    parts = module.split(".")
    spec = None
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), path)
        if spec is None:
            return ""
        path = spec.submodule_search_locations
    if path is not None:  # a package: its `__main__` is run
        spec = PathFinder.find_spec(f"{module}.__main__", path)
    return (spec.origin or "") if spec is not None else ""


@functools.cache
def _processor() -> str:
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("model name", "CPU part", "uarch")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
