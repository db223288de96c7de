"""A long list of ordinary operations, forward and backward, with digests of what this process gets: what the probe
(`unisono.system.probe`) stands for.

``python -m tests.operations`` prints the probe and the digests; with ``--table`` it writes `TABLE`, with a process for
each of the `SETTINGS`: to be done on a processor with AVX-512 when the probe computes something else than before.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.system.arithmetic import variables
from unisono.system.probe import results

__all__ = ["SETTINGS", "TABLE", "digests", "in_process"]

TABLE: Final = Path(__file__).with_name("data") / "probe.json"
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "none": {},
    "set avx2": variables("avx2"),
    "set avx512": variables("avx512"),
    "set compatible": variables("compatible"),
    **{f"aten {one}": {"ATEN_CPU_CAPABILITY": one} for one in ("default", "avx2", "avx512")},
    **{
        f"onednn {one}": {"ONEDNN_MAX_CPU_ISA": one}
        for one in ("SSE41", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_FP16")
    },
    **{f"mkl {one}": {"MKL_CBWR": one} for one in ("COMPATIBLE", "SSE4_2", "AVX", "AVX2", "AVX512", "AVX512,STRICT")},
    **{f"mkl up to {one}": {"MKL_ENABLE_INSTRUCTIONS": one} for one in ("SSE4_2", "AVX2", "AVX512")},
}
"""Variables by which libraries choose their kernels, by a name."""
TYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDTHS: Final = (2, 3, 5, 8, 10, 15, 16, 17, 31, 33, 50, 63, 64, 65, 100, 127, 128, 129, 256, 1000)
POINTWISE: Final[tuple[Callable[[Tensor], Tensor], ...]] = (
    *(torch.exp, torch.expm1, torch.exp2, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.tan, torch.erf),
    *(torch.atan, torch.asinh, torch.sinh, torch.cosh, torch.square, torch.reciprocal),
    *(F.relu, F.gelu, F.silu, F.elu, F.selu, F.softplus, F.mish, F.hardswish, F.logsigmoid, F.softsign, F.celu),
    lambda a: F.gelu(a, approximate="tanh"),
    *(lambda a, f=f: f(a.abs() + 0.1) for f in (torch.log, torch.sqrt, torch.rsqrt, torch.log1p, torch.log2)),
    *(lambda a, f=f: f(a.abs() + 0.1) for f in (torch.log10, torch.lgamma)),
    lambda a: (a.abs() + 0.1).pow(1.7),
    lambda a: a / (a.abs() + 0.3),
    lambda a: torch.addcmul(a, a, a, value=0.3),
    lambda a: torch.addcdiv(a, a, a.abs() + 1, value=0.3),
    lambda a: torch.lerp(a, a.flip(0), 0.3),
)
REDUCTIONS: Final[tuple[Callable[[Tensor], Tensor], ...]] = (
    *(torch.sum, torch.mean, torch.var, torch.std, torch.prod, torch.linalg.vector_norm),
    *(lambda a, d=d: a.sum(d) for d in (0, 1)),
    *(lambda a, d=d: a.mean(d) for d in (0, 1)),
    lambda a: a.var(1),
    lambda a: a.cumsum(1),
)


def values(*shape: int, scale: float = 1.0, salt: int = 0) -> Tensor:
    numbers = (torch.arange(math.prod(shape), dtype=torch.int64) + salt * 7919) * 2654435761 % 65537
    return ((numbers.to(torch.float64) / 32768.5 - 1) * scale).to(torch.float32).reshape(shape)


def digests() -> dict[str, str]:
    """Return the digest of the result of each operation and of all its gradients, by a name."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}

    def add(name: str, function: Callable[..., Tensor], *inputs: Tensor, weights: Sequence[Tensor] = ()) -> None:
        given = [one.detach().clone().requires_grad_() for one in inputs]
        result = function(*given)
        gradients = torch.autograd.grad(result, [*given, *weights], values(*result.shape, salt=5).to(result.dtype))
        found[name], found[f"{name}, backward"] = digest([result]), digest(gradients)

    for dtype in TYPES:
        add_rows(dtype, add)
        add_products(dtype, add)
        add_attention(dtype, add)
        if dtype != torch.float16:
            add_layers(dtype, add)
    add_others(add)
    return found


Add = Callable[..., None]


def add_rows(dtype: torch.dtype, add: Add) -> None:
    for width in WIDTHS:
        x, labels = values(9, width, scale=8).to(dtype), torch.arange(9) % width
        add(f"softmax {width} {dtype}", lambda a: a.softmax(1), x)
        add(f"softmax over rows {width} {dtype}", lambda a: a.softmax(0), x)
        add(f"log_softmax {width} {dtype}", lambda a: a.log_softmax(1), x)
        add(f"logsumexp {width} {dtype}", lambda a: a.logsumexp(1), x)
        add(f"layer norm {width} {dtype}", lambda a: F.layer_norm(a, a.shape[1:]), x)
        if dtype != torch.float16:
            add(f"cross entropy {width} {dtype}", lambda a, labels=labels: F.cross_entropy(a, labels), x)
    for width in (5, 16, 33, 100, 1000):
        for number, function in enumerate(REDUCTIONS):
            add(f"reduction {number} {width} {dtype}", function, values(7, width, scale=4).to(dtype))
    for number, function in enumerate(POINTWISE):
        add(f"function {number} {dtype}", function, values(1001, scale=6).to(dtype))


def add_products(dtype: torch.dtype, add: Add) -> None:
    for m, k, n in ((3, 5, 7), (8, 8, 8), (17, 33, 65), (64, 128, 64), (1, 300, 10), (128, 257, 10), (200, 784, 128)):
        given = [values(*shape, salt=m).to(dtype) for shape in ((m, k), (n, k), (n,))]
        add(f"linear {m} {k} {n} {dtype}", F.linear, *given)
        add(f"product {m} {k} {n} {dtype}", torch.matmul, given[0], given[1].T.contiguous())
    add(f"batched product {dtype}", torch.bmm, values(5, 33, 47).to(dtype), values(5, 47, 31).to(dtype))
    add(f"dot {dtype}", torch.dot, values(777).to(dtype), values(777, salt=3).to(dtype))
    for inputs, outputs, size, stride, groups in (
        (3, 8, 3, 1, 1),
        (16, 16, 3, 2, 1),
        (5, 7, 5, 1, 1),
        (8, 8, 3, 1, 8),
        (16, 32, 1, 1, 1),
        (3, 64, 7, 2, 1),
    ):
        given = [values(2, inputs, 17, 19), values(outputs, inputs // groups, size, size), values(outputs)]
        add(
            f"convolution {inputs} {outputs} {size} {dtype}",
            lambda a, b, c, how=(stride, size // 2, 1, groups): F.conv2d(a, b, c, *how),
            *(one.to(dtype) for one in given),
        )
    for width in (7, 33, 65):
        x, scale, shift = (one.to(dtype) for one in (values(13, width, scale=4), values(width), values(width, salt=1)))
        add(f"batch norm {width} {dtype}", lambda a, b, c: F.batch_norm(a, None, None, b, c, True), x, scale, shift)
        add(f"rms norm {width} {dtype}", lambda a, b: F.rms_norm(a, b.shape, b), x, scale)
    pictures = values(4, 16, 5, 6, scale=4).to(dtype)
    add(f"group norm {dtype}", lambda a: F.group_norm(a, 4), pictures)
    add(f"average pooling {dtype}", lambda a: F.adaptive_avg_pool2d(a, 3), pictures)
    add(f"interpolation {dtype}", lambda a: F.interpolate(a, scale_factor=1.7, mode="bilinear"), pictures)


def add_attention(dtype: torch.dtype, add: Add) -> None:
    for length, width in ((5, 8), (16, 32), (33, 16), (64, 64), (100, 24)):
        given = [values(2, 3, length, width, scale=3, salt=salt).to(dtype) for salt in range(3)]
        for causal in (False, True):
            add(
                f"attention {length} {width} {causal} {dtype}",
                lambda a, b, c, causal=causal: F.scaled_dot_product_attention(a, b, c, is_causal=causal),
                *given,
            )


def add_layers(dtype: torch.dtype, add: Add) -> None:
    def filled(module: nn.Module) -> list[Tensor]:
        for salt, parameter in enumerate(module.parameters()):
            parameter.data.copy_(values(*parameter.shape, scale=0.3, salt=salt))
        return list(module.parameters())

    for kind in (nn.GRU, nn.LSTM, nn.RNN):
        for inputs, hidden in ((8, 16), (13, 21), (32, 64)):
            layer = kind(inputs, hidden, batch_first=True).to(dtype)
            x, weights = values(3, 7, inputs, scale=2).to(dtype), filled(layer)
            add(f"{kind.__name__} {inputs} {dtype}", lambda a, layer=layer: layer(a)[0], x, weights=weights)
    x = values(3, 9, 32, scale=2).to(dtype)
    many = nn.MultiheadAttention(32, 4, batch_first=True).to(dtype)
    add(f"multi-head attention {dtype}", lambda a: many(a, a, a)[0], x, weights=filled(many))
    encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(dtype)
    add(f"transformer layer {dtype}", encoder, x, weights=filled(encoder))


def add_others(add: Add) -> None:
    x, y, square = values(40, 33, scale=5), values(40, 33, salt=1), values(12, 12) + 6 * torch.eye(12)
    add("kl", lambda a: F.kl_div(a.log_softmax(1), y.softmax(1), reduction="batchmean"), x)
    add("smoothed labels", lambda a: F.cross_entropy(a, torch.arange(40) % 33, label_smoothing=0.1), x)
    add("logits", lambda a: F.binary_cross_entropy_with_logits(a, (y > 0).float()), x)
    add("cosine", F.cosine_similarity, x, y)
    add("distances", torch.cdist, x, y)
    add("spectrum", lambda a: torch.fft.rfft(a).abs(), x)
    add("convolution of signals", lambda a, b: F.conv1d(a, b, padding=2), values(3, 8, 50), values(16, 8, 5))
    add("convolution of volumes", F.conv3d, values(1, 3, 6, 7, 8), values(4, 3, 3, 3, 3))
    add("transposed", lambda a, b: F.conv_transpose2d(a, b, stride=2), values(2, 6, 9, 9), values(6, 5, 3, 3))
    add("inverse", torch.linalg.inv, square)
    add("singular values", torch.linalg.svdvals, square)
    add("eigenvalues", lambda a: torch.linalg.eigvalsh(a + a.T), square)
    add("cholesky", lambda a: torch.linalg.cholesky(a @ a.T), square)
    add("orthogonal", lambda a: torch.linalg.qr(a).Q, square)
    lengths = torch.tensor([20, 20]), torch.tensor([4, 4])
    add("ctc", lambda a: F.ctc_loss(a.log_softmax(2), torch.arange(1, 9).view(2, 4), *lengths), values(20, 2, 12))


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=4)
    for one in tensors:
        plain = one.detach().double().contiguous()
        found.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return found.hexdigest()


def in_process(setting: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the probe and the digests of a process with these variables."""
    environment = {one: value for one, value in os.environ.items() if not one.startswith(("ATEN_", "ONEDNN_", "MKL_"))}
    command = [sys.executable, "-W", "ignore", "-m", "tests.operations"]
    done = subprocess.run(command, env={**environment, **setting}, capture_output=True, text=True, check=True)
    probe, found = json.loads(done.stdout)
    return probe, found


if __name__ == "__main__":
    if "--table" in sys.argv:
        table = {}
        for name, setting in SETTINGS.items():
            probe, found = in_process(setting)
            table[name] = {
                "probe": probe,
                "operations": hashlib.blake2b(repr(found).encode(), digest_size=4).hexdigest(),
            }
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
    else:
        print(json.dumps([results(), digests()]))
