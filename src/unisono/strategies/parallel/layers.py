"""Layers that are cut into shards, in the place of layers of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.core.errors import UsageError
from unisono.strategies.parallel.place import Place, assembled, cut, join, part_of, spread
from unisono.strategies.parallel.value import Sharded, check_recorded, refused

__all__ = ["Columns", "CutLayer", "Cuts", "Pieces", "Rows", "Vocabulary", "layers_in"]

_PIECES = "_unisono_pieces"
"""Attribute of a parameter that was cut (`Cuts.note`)."""


class Cuts:
    """The pieces of the parameters that were cut: weights that are tied are cut once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, tuple[int, int, int], list[nn.Parameter]]] = {}
        """By id of the parameter: itself, how it was cut, and its pieces."""

    def of(self, parameter: Tensor, num_shards: int, dim: int, blocks: int) -> list[nn.Parameter]:
        """Return the pieces of a parameter.

        Raises:
            UsageError: it was cut otherwise, or was changed since.
        """
        how = (num_shards, dim, blocks)
        if id(parameter) not in self.known and (before := getattr(parameter, _PIECES, None)) is not None:
            version, known_how, known = before
            if version != parameter._version:
                raise UsageError(
                    f"a weight of shape {tuple(parameter.shape)} is tied to that of a layer that was cut before, and "
                    "has new values since: load weights before unisono.parallelize"
                )
            self.known[id(parameter)] = parameter, known_how, known
        if id(parameter) not in self.known:
            whole = parameter.detach()
            parts = [part_of(whole, shard, num_shards, dim, blocks) for shard in range(num_shards)]
            self.known[id(parameter)] = parameter, how, [nn.Parameter(one, parameter.requires_grad) for one in parts]
        _, known_how, known = self.known[id(parameter)]
        if known_how != how:
            raise UsageError(
                f"a weight of shape {tuple(parameter.shape)} is tied to that of another layer and would be cut in two "
                "ways: cut both layers alike, an embedding by 'vocabulary' and the layer at the end by 'columns'"
            )
        return known

    def note(self) -> None:
        """Note the pieces at the parameters, for layers of other modules that are tied to these."""
        for parameter, how, pieces in self.known.values():
            setattr(parameter, _PIECES, (parameter._version, how, pieces))


class Pieces(nn.ParameterList):
    """The pieces of a parameter that is cut, by shard; those on other workers are meta tensors.

    Args:
        dim, blocks: as of `unisono.strategies.parallel.place.part_of`.
    """

    def __init__(self, parameter: Tensor, cuts: Cuts, num_shards: int, dim: int, blocks: int = 1) -> None:
        self.dim, self.blocks = dim, blocks
        super().__init__(cuts.of(parameter, num_shards, dim, blocks))

    def assembled(self, known: dict[int, nn.Parameter]) -> nn.Parameter:
        """Return the parameter that has these pieces.

        Args:
            known: by id of the first piece, parameters that were made before: weights that are tied stay so.
        """
        first = self[0]
        if id(first) not in known:
            value = assembled(torch.stack([one.detach() for one in self]), self.dim, self.blocks)
            known[id(first)] = nn.Parameter(value, first.requires_grad)
        return known[id(first)]

    def own(self, place: Place) -> list[nn.Parameter]:
        """Return the pieces of the shards here."""
        return [self[shard] for shard in place.own]


class CutLayer(nn.Module, ABC):
    """A layer that is cut into shards.

    Attributes:
        place: which of them are here.
    """

    place: Place

    @abstractmethod
    def assembled(self, known: dict[int, nn.Parameter]) -> nn.Module:
        """Return the layer of torch that it stands for.

        Args:
            known: as of `Pieces.assembled`.
        """

    def pieces(self) -> list[Pieces]:
        return [one for one in self.children() if isinstance(one, Pieces)]


class Columns(CutLayer):
    """``nn.Linear``, of whose output each shard has a part.

    Args:
        blocks: of the output, each of which is cut: 3 for queries, keys and values of one layer.
    """

    def __init__(self, layer: nn.Linear, place: Place, cuts: Cuts, blocks: int = 1) -> None:
        super().__init__()
        self.place, self.blocks = place, blocks
        num = place.num_shards
        _check_size(layer.out_features, num * blocks, f"the output of {layer}")
        self.weight = Pieces(layer.weight, cuts, num, 0, blocks)
        self.bias = Pieces(layer.bias, cuts, num, 0, blocks) if layer.bias is not None else None

    def forward(self, given: Tensor) -> Tensor:
        if isinstance(given, Sharded):
            raise refused("a layer that is cut by columns", "needs all of its input, which is cut already")
        values, weights = spread(self.place, given), self.weight.own(self.place)
        biases = self.bias.own(self.place) if self.bias is not None else [None] * len(weights)
        parts = [F.linear(*each) for each in zip(values, weights, biases, strict=True)]
        return Sharded.of(parts, self.place, -1, self.blocks)

    def assembled(self, known: dict[int, nn.Parameter]) -> nn.Module:
        return _linear(self.weight.assembled(known), self.bias.assembled(known) if self.bias is not None else None)

    def extra_repr(self) -> str:
        return f"shards={self.place.num_shards}, blocks={self.blocks}"


class Rows(CutLayer):
    """``nn.Linear``, whose input each shard has a part of: the output is the sum over all shards, and the bias."""

    def __init__(self, layer: nn.Linear, place: Place, cuts: Cuts) -> None:
        super().__init__()
        self.place = place
        _check_size(layer.in_features, place.num_shards, f"the input of {layer}")
        self.weight = Pieces(layer.weight, cuts, place.num_shards, 1)
        self.bias = layer.bias

    def forward(self, given: Tensor) -> Tensor:
        parts: Sequence[Tensor]
        check_recorded([given])
        if not isinstance(given, Sharded):
            parts = cut(self.place, given, given.dim() - 1)
        elif given.from_right != 1 or given.blocks != 1:
            raise refused(
                "a layer that is cut by rows",
                f"needs a cut of the last dimension of {tuple(given.shape)}, and dimension {given.cut_dim} is cut into "
                f"{given.blocks} x {self.place.num_shards} parts",
            )
        else:
            parts = given.parts
        weights = self.weight.own(self.place)
        total = join(self.place, [F.linear(*each) for each in zip(parts, weights, strict=True)])
        return total if self.bias is None else total + self.bias.to(total.dtype)

    def assembled(self, known: dict[int, nn.Parameter]) -> nn.Module:
        return _linear(self.weight.assembled(known), self.bias)

    def extra_repr(self) -> str:
        return f"shards={self.place.num_shards}"


class Vocabulary(CutLayer):
    """``nn.Embedding``, of whose entries each shard has a part: the output is the sum over all shards."""

    def __init__(self, layer: nn.Embedding, place: Place, cuts: Cuts) -> None:
        super().__init__()
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise UsageError(f"{layer} has max_norm, scale_grad_by_freq or sparse, and cannot be cut into shards")
        _check_size(layer.num_embeddings, place.num_shards, f"the vocabulary of {layer}")
        self.place = place
        self.padding_idx = layer.padding_idx
        self.weight = Pieces(layer.weight, cuts, place.num_shards, 0)

    def forward(self, given: Tensor) -> Tensor:
        number = sum(len(one) for one in self.weight)
        torch._assert_async(((given >= 0) & (given < number)).all(), f"an index is not from 0 to {number - 1}")
        parts = []
        for shard, weight in zip(self.place.own, self.weight.own(self.place), strict=True):
            index = given - shard * len(weight)
            is_elsewhere = (index < 0) | (index >= len(weight))
            padding = None if self.padding_idx is None else self.padding_idx - shard * len(weight)
            is_here = padding is not None and 0 <= padding < len(weight)
            found = F.embedding(index.masked_fill(is_elsewhere, 0), weight, padding if is_here else None)
            parts.append(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))
        return join(self.place, parts)

    def assembled(self, known: dict[int, nn.Parameter]) -> nn.Module:
        weight = self.weight.assembled(known)
        layer = nn.Embedding(weight.shape[0], weight.shape[1], self.padding_idx, device="meta")
        layer.weight = weight
        return layer

    def extra_repr(self) -> str:
        return f"shards={self.place.num_shards}"


def layers_in(module: nn.Module) -> list[CutLayer]:
    """Return the layers of a module that are cut."""
    return [each for each in module.modules() if isinstance(each, CutLayer)]


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


def _check_size(size: int, num: int, what: str) -> None:
    if size % num:
        raise UsageError(f"{what} has {size} values, which cannot be cut into {num} equal parts: take a multiple")
