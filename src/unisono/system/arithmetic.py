"""The instructions that a run's workers compute with, and a probe that shows whether two processes get the same bits.

Libraries choose their kernels by the processor, so processors of several kinds give several results. The setting
``arithmetic`` holds all of them to what each has. Libraries read its variables when they are loaded.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unisono.core.errors import UsageError
from unisono.core.settings import Instructions
from unisono.core.words import listed
from unisono.system.controlgroups import text_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check", "name_of", "results", "variables"]

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
def results() -> str:
    """Return digests of the results of some operations on the CPU, by name. Takes some milliseconds, once.

    One thread computes, in the modes that torch has by default. No random number is drawn.
    """
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            found = {name: _digest(result) for name, result in _operations().items()}
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    return ", ".join(f"{name}={digest}" for name, digest in found.items())


def _operations() -> dict[str, Tensor]:
    import torch
    import torch.nn.functional as F
    from torch.nn.grad import conv2d_weight

    x, y, z = _values(63, 127), _values(127, 65), _values(1, 2, 16, 32)
    return {
        "product": x @ y,
        "product in float64": x.double() @ y.double(),
        "product in bfloat16": x.bfloat16() @ y.bfloat16(),
        "batched product": torch.bmm(_values(5, 33, 47), _values(5, 47, 31)),
        "matrix times vector": x @ y[:, 0],
        "linear layer": F.linear(x, y.T, _values(65)),
        "convolution": F.conv2d(_values(2, 3, 17, 19), _values(8, 3, 3, 3), padding=1),
        "gradient of a convolution": conv2d_weight(
            _values(2, 3, 17, 19), (8, 3, 3, 3), _values(2, 8, 17, 19), padding=1
        ),
        "sums": torch.cat([x.sum().view(1), x.sum(0), x.sum(1), x.var().view(1)]),
        "norm and dot product": torch.stack([torch.linalg.vector_norm(x), x.flatten() @ x.flatten()]),
        "exponentials": torch.cat([x.exp(), x.tanh(), x.sigmoid()]),
        "logarithms": torch.cat([x.abs().log(), x.abs().sqrt(), x.sin()]),
        "gelu": F.gelu(x),
        "softmax": x.log_softmax(1),
        "layer norm": F.layer_norm(x, (127,)),
        "attention": F.scaled_dot_product_attention(z, z, z),
    }


def _values(*shape: int) -> Tensor:
    """Return numbers in (-1, 1) with all bits of a float32, by operations that IEEE 754 leaves no choice."""
    import torch

    numbers = torch.arange(math.prod(shape), dtype=torch.int64) * 2654435761 % 65537
    return (numbers.to(torch.float64) / 32768.5 - 1).to(torch.float32).reshape(shape)


def _digest(result: Tensor) -> str:
    import ctypes  # and no numpy, which torch can do without

    values = result.double().contiguous()
    return hashlib.blake2b(ctypes.string_at(values.data_ptr(), values.nbytes), digest_size=4).hexdigest()


@functools.cache
def _of_processor(what: str) -> frozenset[str]:
    """Return the words after this name in what Linux says of the first processor; empty where there are none."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    found = next((line.partition(":")[2] for line in lines if line.split(":")[0].strip() == what), "")
    return frozenset(found.split())
