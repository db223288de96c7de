"""The models that are measured, with data in memory.

=============  ==========  ======================================================================
case           parameters  what it stands for
=============  ==========  ======================================================================
`cnn`          94,000      much to compute, little to exchange, short steps
`mlp`          25 million  much to exchange, little to compute
`mlp_small`    1 million   the same with 4 MB of gradients: an exchange between hosts in little time
`transformer`  5.7 million many parameter tensors, dropout, an embedding
=============  ==========  ======================================================================

`large` is an MLP of any size, for what depends on the memory; it is none of the cases that are measured by default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

__all__ = ["CASES", "Case", "large"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data and its loss."""

    model: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    """Number of samples -> the data set; the same whenever it is called."""
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    microbatch_size: int


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


def _mlp() -> nn.Module:
    return _perceptron([1024, 2048, 2048, 2048, 2048, 2048, 2048, 1000])


def _small_mlp() -> nn.Module:
    return _perceptron([1024, 336, 336, 336, 336, 1000])


def _perceptron(widths: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Transformer(nn.Module):
    """A small language model: causal attention over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1900, 256)
        self.places = nn.Parameter(torch.randn(64, 256) * 0.02)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.out = nn.Linear(256, 1900)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.tokens(tokens) + self.places[: tokens.shape[1]], mask, is_causal=True)
        logits: Tensor = self.out(hidden)
        return logits


def _pictures(num_samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, 1, 28, 28, generator=draw), torch.randint(10, (num_samples,), generator=draw)
    )


def _vectors(num_samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, 1024, generator=draw), torch.randint(1000, (num_samples,), generator=draw)
    )


def _sentences(num_samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(1900, (num_samples, 65), generator=draw)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _class_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def _token_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


CASES = {
    "cnn": Case(model=_cnn, data=_pictures, loss=_class_loss, microbatch_size=16),
    "mlp": Case(model=_mlp, data=_vectors, loss=_class_loss, microbatch_size=32),
    "mlp_small": Case(model=_small_mlp, data=_vectors, loss=_class_loss, microbatch_size=32),
    "transformer": Case(model=_Transformer, data=_sentences, loss=_token_loss, microbatch_size=4),
}


def large(megabytes: int) -> Case:
    """Return an MLP with about so many MB of float32 parameters, and so few samples that they take little time.

    Seven of its layers are equally large, and two are smaller; 500 MB: layers of 4096, and 125.7 million parameters.
    """
    squares, others = 7, 1024 + 1000 + 8  # of the width that is looked for: hidden layers; first, last and biases
    exact = (math.sqrt(others**2 + 4 * squares * megabytes * 1e6 / 4) - others) / (2 * squares)
    width = max(64, 64 * round(exact / 64))
    return Case(
        model=lambda: _perceptron([1024, *[width] * (squares + 1), 1000]),
        data=_vectors,
        loss=_class_loss,
        microbatch_size=4,
    )
