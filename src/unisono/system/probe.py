"""A probe that shows whether two processes get the same bits: digests of the results of some operations on the CPU.

Libraries choose a kernel by the processor, the type, the size and the direction. Two sets of instructions often give
the same bits at one size and other bits at the next (log_softmax of 127 numbers is equal with AVX2 and with AVX-512,
that of 15 is not), so most entries fold several types and sizes, forward and backward, into one digest.
`tests/operations.py` compares the probe with a thousand operations, for each variable by which libraries choose.

An entry keeps its name only as long as it computes the same: entries of other names are not compared with those of an
earlier version (`unisono.core.fingerprints.other_results`).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

    Function = Callable[[Tensor], Tensor]

__all__ = ["results", "take_results"]

WIDTHS: Final = (10, 33, 100, 1000)
"""Beside the multiples of the numbers of values that instructions compute at once, which are 4 to 32."""


_taken: list[str] = []


def take_results(found: str) -> None:
    """Have `results` return what a process with the same libraries and environment has computed."""
    _taken[:] = [found]


@functools.cache
def results() -> str:
    """Return digests of the results of some operations on the CPU, by name. Takes 0.1 s, once.

    One thread computes, in the modes that torch has by default. No random number is drawn.
    """
    if _taken:
        return _taken[0]
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            with torch.no_grad():
                found = {name: _digest([result]) for name, result in _operations().items()}
            with torch.enable_grad():
                found |= {name: _digest(given) for name, given in _families()}
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    return ", ".join(f"{name}={digest}" for name, digest in found.items())


def _operations() -> dict[str, Tensor]:
    """Return results of one type and size, forward."""
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


def _families() -> Iterator[tuple[str, list[Tensor]]]:
    """Yield by name the results of several types and sizes, and their gradients."""
    import torch
    import torch.nn.functional as F

    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    wide = [_values(3, width, scale=8.0) for width in WIDTHS]
    typed = [one.to(dtype) for dtype in types for one in (wide if dtype == torch.float32 else wide[1:3])]
    labels = torch.arange(3, dtype=torch.int64, device="cpu")
    yield "softmax of several widths", _each([lambda a: a.softmax(1), lambda a: a.softmax(0)], typed)
    yield "log_softmax of several widths", _each([lambda a: a.log_softmax(1)], typed)
    losses: list[Function] = [
        lambda a: F.cross_entropy(a, labels),
        lambda a: a.logsumexp(1),
        lambda a: F.binary_cross_entropy_with_logits(a, torch.ones_like(a)),
    ]
    yield "losses", _each(losses, [*wide, wide[2].bfloat16()])
    norms: list[Function] = [
        lambda a: F.layer_norm(a, a.shape[1:]),
        lambda a: F.rms_norm(a, a.shape[1:]),
        lambda a: F.batch_norm(a, None, None, training=True),
    ]
    pictures = _values(2, 8, 5, 7, scale=4.0)
    yield (
        "norms of several widths",
        _each(norms, [*wide[1:], wide[2].bfloat16()]) + _each([lambda a: F.group_norm(a, 4), norms[2]], [pictures]),
    )
    sums: list[Function] = [
        lambda a: a.sum(),
        lambda a: a.mean(0),
        lambda a: a.var(),
        lambda a: a.norm(),
        lambda a: a.cumsum(1),
        lambda a: a.flatten() @ a.flatten().flip(0),
    ]
    yield "reductions in several types", _each(sums, [wide[-1].to(dtype) for dtype in types])
    functions: list[Function] = [
        *(torch.exp, torch.expm1, torch.exp2, torch.tanh, torch.sigmoid, torch.sin, torch.tan, torch.erf, torch.atan),
        *(torch.sinh, F.gelu, F.silu, F.elu, F.mish, F.softplus, F.logsigmoid),
        lambda a: F.gelu(a, approximate="tanh"),
        lambda a: (a.abs() + 0.1).log(),
        lambda a: (a.abs() + 0.1).rsqrt(),
        lambda a: (a.abs() + 0.1).pow(1.7),
        lambda a: torch.addcdiv(a, a, a.abs() + 1, value=0.3),
        lambda a: torch.lerp(a, a.flip(0), 0.3),
    ]
    yield "functions in several types", _each(functions, [_values(201, scale=6.0).to(dtype) for dtype in types])
    yield "products of several sizes", _products()
    yield "convolutions", _convolutions()
    yield "attention of several sizes", _attentions()
    yield "recurrent layer", _recurrences()
    square = _values(12, 12) + 6 * torch.eye(12, dtype=torch.float32, device="cpu")
    algebra: list[Function] = [
        torch.linalg.inv,
        torch.linalg.svdvals,
        torch.linalg.eigvalsh,
        lambda a: torch.linalg.cholesky(a @ a.T),
        lambda a: torch.linalg.qr(a).Q,
        lambda a: torch.fft.rfft(a).abs(),
        lambda a: torch.cdist(a, a.detach().flip(0)),
    ]
    yield "linear algebra", _each(algebra, [square])
    pooling: list[Function] = [
        lambda a: F.adaptive_avg_pool2d(a, 3),
        lambda a: F.interpolate(a, scale_factor=1.7, mode="bilinear"),
    ]
    yield "pooling", _each(pooling, [pictures])


def _products() -> list[Tensor]:
    import torch
    import torch.nn.functional as F

    found = []
    for m, k, n in ((1, 300, 10), (3, 5, 7), (17, 33, 65), (64, 128, 64)):
        found += _with_gradients(F.linear, _values(m, k), _values(n, k), _values(n))
    for dtype in (torch.bfloat16, torch.float16):
        found += _with_gradients(torch.matmul, _values(63, 127).to(dtype), _values(127, 65).to(dtype))
    found.append(_values(200, 784).bfloat16() @ _values(784, 128).bfloat16())
    return found + _with_gradients(torch.bmm, _values(5, 33, 47), _values(5, 47, 31))


def _convolutions() -> list[Tensor]:
    import torch
    import torch.nn.functional as F

    found, lower = [], (torch.bfloat16, torch.float16)
    cases = [(3, 8, 3, 1, torch.float32), (5, 7, 5, 2, torch.float32), *((16, 16, 3, 1, dtype) for dtype in lower)]
    for inputs, outputs, size, stride, dtype in cases:
        given = (_values(1, inputs, 11, 13), _values(outputs, inputs, size, size), _values(outputs))
        convolve = functools.partial(F.conv2d, stride=stride, padding=size // 2)
        found += _with_gradients(convolve, *(one.to(dtype) for one in given))
    found += _with_gradients(functools.partial(F.conv2d, groups=8), _values(1, 8, 11, 13), _values(8, 1, 3, 3))
    found += _with_gradients(functools.partial(F.conv1d, padding=2), _values(3, 8, 50), _values(16, 8, 5))
    return found + _with_gradients(
        functools.partial(F.conv_transpose2d, stride=2), _values(1, 6, 9, 9), _values(6, 5, 3, 3)
    )


def _attentions() -> list[Tensor]:
    import torch
    import torch.nn.functional as F

    found = []
    for length, width in ((33, 16), (64, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            given = [_values(1, 1, length, width, scale=3.0, salt=salt).to(dtype) for salt in range(3)]
            attend = functools.partial(F.scaled_dot_product_attention, is_causal=width == 64)
            found += _with_gradients(attend, *given)
    return found


def _recurrences() -> list[Tensor]:
    import torch

    # An LSTM is no other case: its library is that of the convolutions, and its kernels take 35 ms to make.
    x, state = _values(3, 4, 13, scale=2.0), _values(1, 3, 21)
    weights = [_values(*shape, scale=0.3) for shape in ((63, 13), (63, 21), (63,), (63,))]
    how = (True, 1, 0.0, True, False, True)  # with biases, 1 layer, no dropout, training, 1 direction, the batch first
    return _with_gradients(lambda a, *given: torch.gru(a, state, given, *how)[0], x, *weights)


def _each(functions: Sequence[Function], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [one for function in functions for given in inputs for one in _with_gradients(function, given)]


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the result of a function, and the gradients of all inputs."""
    import torch

    given = [one.detach().requires_grad_() for one in inputs]
    result = function(*given)
    total = (result * _values(*result.shape, salt=5).to(result.dtype)).sum()  # a number: other gradients import sympy
    return [result.detach(), *torch.autograd.grad(total, given)]


def _values(*shape: int, scale: float = 1.0, salt: int = 0) -> Tensor:
    """Return numbers in (-scale, scale) with all bits of a float32, by operations that IEEE 754 leaves no choice."""
    import torch

    numbers = (torch.arange(math.prod(shape), dtype=torch.int64) + salt * 7919) * 2654435761 % 65537
    return ((numbers.to(torch.float64) / 32768.5 - 1) * scale).to(torch.float32).reshape(shape)


def _digest(values: Sequence[Tensor]) -> str:
    import ctypes  # and no numpy, which torch can do without

    digest = hashlib.blake2b(digest_size=4)
    for one in values:
        plain = one.double().contiguous()
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return digest.hexdigest()
