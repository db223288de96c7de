"""Layers in shards: the values of the layers that were cut, and the same bits on any number of workers."""

from __future__ import annotations

import copy
import math
import operator
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from tests.waiting import WAIT_S
from unisono import UsageError, assemble, parallelize, whole
from unisono.strategies.parallel.layers import layers_in
from unisono.strategies.parallel.place import Place, assembled, cut, join, part_of
from unisono.strategies.parallel.value import Sharded

SHARDS = 4
BATCH, LENGTH, WIDTH, HEADS, WORDS = 3, 5, 16, 4, 32
PLAN = {"*.qkv": "columns:3", "*.out": "rows", "*.up": "columns", "*.down": "rows", "words": "vocabulary"}


class Written(nn.Module):
    """Attention written out, as in many scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        heads = [
            one.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for one in self.qkv(x).split(width, dim=2)
        ]
        queries, keys, values = heads
        scores = (queries @ keys.transpose(-2, -1)) * (1.0 / math.sqrt(keys.size(-1)))
        assert isinstance(self.mask, Tensor)
        weights = F.softmax(scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")), dim=-1)
        found: Tensor = self.out((weights @ values).transpose(1, 2).contiguous().view(batch, length, width))
        return found


class Fused(nn.Module):
    """Attention by one function, with a norm of the queries of a head and rotated keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, HEADS).view(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        first, second = keys.chunk(2, dim=-1)
        keys = torch.cat((-second, first), dim=-1) * torch.arange(LENGTH).view(LENGTH, 1)
        distance = torch.arange(LENGTH).view(1, LENGTH) * self.slopes
        found = F.scaled_dot_product_attention(self.norm(queries), keys, values * self.slopes, attn_mask=distance)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.attention, self.norm = attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        found: Tensor = x + self.down(F.gelu(self.up(x)))
        return found


class Language(nn.Module):
    def __init__(self, attention: type[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(attention), Block(attention))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.words(words)))
        return found


def made(attention: type[nn.Module] = Fused, *, tied: bool = False, cut_head: bool = True) -> tuple[Language, Language]:
    """Return a model as it is, and with layers that are cut."""
    torch.manual_seed(3)
    before = Language(attention, tied=tied).double()
    plan = {**PLAN, "head": "vocabulary"} if cut_head else PLAN
    return before, parallelize(copy.deepcopy(before), plan, shards=SHARDS)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    words, nexts = (torch.randint(0, WORDS, (BATCH, LENGTH), generator=draw) for _ in range(2))
    nexts[0, 2] = -100
    return words, nexts


def gradients(model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by the names of the model that is not cut."""
    found = {}
    for name, parameter in plain.named_parameters():
        owner, _, attribute = name.rpartition(".")
        one = getattr(model.get_submodule(owner), attribute)
        if isinstance(one, nn.ParameterList):
            pieces: Any = one
            parts = torch.stack([each.grad for each in one if each.grad is not None])
            found[name] = assembled(parts, pieces.dim, pieces.blocks)
        else:
            found[name] = one.grad
        assert found[name].shape == parameter.shape
    return found


@pytest.mark.parametrize("attention", [Written, Fused])
@pytest.mark.parametrize("is_tied", [False, True])
def test_values_and_gradients_are_those_of_the_model(attention: type[nn.Module], is_tied: bool) -> None:
    """Up to rounding: the sums over shards are others."""
    before, model = made(attention, tied=is_tied)
    words, nexts = batch()
    expected = F.cross_entropy(before(words).flatten(0, 1), nexts.flatten())
    found = F.cross_entropy(model(words).flatten(0, 1), nexts.flatten())
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(whole(model(words)), before(words))
    for name, one in gradients(model, before).items():
        torch.testing.assert_close(one, before.get_parameter(name).grad, msg=name)
    names = dict(model.named_parameters())
    assert ("head.weight.0" in names) != is_tied
    assert names["words.weight.3"].shape == (WORDS // SHARDS, WIDTH)


class Threads:
    """Workers that have shards of a model, as threads."""

    def __init__(self, size: int) -> None:
        self._mail = {pair: queue.Queue[Tensor]() for pair in [(a, b) for a in range(size) for b in range(size)]}
        self.size = size

    def run(self, work: Callable[[Place], Any], shards: int = SHARDS) -> list[Any]:
        found: list[Any] = [None] * self.size

        def play(number: int) -> None:
            place = Place(shards)
            place.divide(number, self.size)
            place.exchange = lambda other, tensor: self._exchange(number, other, tensor)
            found[number] = work(place)

        threads = [threading.Thread(target=play, args=(number,), daemon=True) for number in range(self.size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(WAIT_S)
        return found

    def _exchange(self, own: int, other: int, tensor: Tensor) -> Tensor:
        self._mail[own, other].put(tensor.clone())
        return self._mail[other, own].get(timeout=WAIT_S)


@pytest.mark.parametrize("attention", [Written, Fused])
def test_any_number_of_workers_computes_the_same_bits(attention: type[nn.Module]) -> None:
    words, nexts = batch()

    def bits(place: Place) -> dict[str, bytes]:
        _, model = models[place.number]
        for layer in layers_in(model):
            layer.place = place
        output = model(words)
        loss = F.cross_entropy(output.flatten(0, 1), nexts.flatten())
        (loss + whole(output).square().mean()).backward()
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        found |= {"loss": loss.detach(), "output": whole(output).detach()}
        return {name: one.numpy().tobytes() for name, one in found.items()}

    models = [made(attention)]
    (expected,) = Threads(1).run(bits)
    for size in (2, 4):
        models = [made(attention) for _ in range(size)]
        every = Threads(size).run(bits)
        assert all(one is not None for one in every)
        names = {name for one in every for name in one}
        assert names == expected.keys()
        for one in every:
            assert {name: expected[name] for name in one} == one
        assert sum("words.weight.0" in one for one in every) == 1


def sharded(
    value: Tensor, dim: int, blocks: int = 1, place: Place | None = None, *, needs_gradient: bool = False
) -> Sharded:
    place = place if place is not None else Place(SHARDS)
    parts = [part_of(value, shard, place.num_shards, dim % value.dim(), blocks) for shard in place.own]
    parts = [part.requires_grad_(needs_gradient) for part in parts]
    return Sharded.of(parts, place, dim, blocks)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


X = (2, 3, 8, 5)
OTHER = numbers(*X) + 0.5
EXACT: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], int, int]] = {
    # what; function; shape, dimension and blocks of the tensor that is cut
    "gelu": (F.gelu, X, 2, 1),
    "a number": (lambda x: 1 / (1 + x) ** 2 - 3 * x, X, 2, 1),
    "a tensor of the same shape": (lambda x: OTHER * x + OTHER, X, 2, 1),
    "a tensor that is cut": (lambda x: x + numbers(8, 1) * x, X, 2, 1),
    "a tensor of one": (lambda x: x - numbers(5), X, 2, 1),
    "a tensor of more dimensions": (lambda x: x + numbers(4, 2, 3, 8, 5), X, 2, 1),
    "comparison": (lambda x: torch.where(x > 0, x, torch.exp(x)), X, 2, 1),
    "in place": (lambda x: F.relu(x.clone().mul_(2).add_(1), inplace=True), X, 2, 1),
    "dtypes": (lambda x: x.float().to(torch.bfloat16).type_as(x), X, 2, 1),
    "transpose": (lambda x: x.transpose(1, 2).mT.unsqueeze(0).squeeze(0), X, 2, 1),
    "permute": (lambda x: x.permute(3, 2, 0, 1).movedim(0, 2), X, 2, 1),
    "pick": (lambda x: x[:, 1:, :, None, 2].contiguous(), X, 2, 1),
    "ellipsis": (lambda x: x[..., 1:3], X, 2, 1),
    "unbind": (lambda x: torch.stack([one * index for index, one in enumerate(x)], dim=1), X, 2, 1),
    "cat": (lambda x: torch.cat([x, OTHER, x], dim=-1), X, 2, 1),
    "split elsewhere": (lambda x: torch.cat(x.split([1, 2], dim=1)[::-1], dim=1), X, 2, 1),
    "split of blocks": (lambda x: x.split(8, dim=-1)[2] - x.chunk(3, dim=-1)[0], (2, 24), 1, 3),
    "two blocks": (lambda x: x.split([16, 8], dim=-1)[0].view(2, 2, 8)[:, 1], (2, 24), 1, 3),
    "heads": (lambda x: x.view(2, 4, -1).transpose(0, 1), (2, 8), 1, 1),
    "blocks of heads": (lambda x: x.view(2, 3, 4, 2).permute(1, 0, 2, 3).unbind(0)[1], (2, 24), 1, 3),
    "heads together": (lambda x: x.transpose(1, 2).reshape(2, 3, 20), (2, 4, 3, 5), 1, 1),
    "flatten": (lambda x: x.flatten(0, 1).unflatten(0, (2, -1)), X, 2, 1),
    "expand": (lambda x: x[:, :, :, None].expand(-1, -1, 8, 3, -1).reshape(2, 3, 24, 5), X, 2, 1),
    "softmax": (lambda x: x.softmax(-1) + F.log_softmax(x, dim=0), X, 2, 1),
    "sum": (lambda x: x.sum(1) + x.amax(dim=1, keepdim=True)[:, 0] - x.mean((1,)), X, 2, 1),
    "norm": (lambda x: F.layer_norm(x, (5,), numbers(5)) + F.rms_norm(x, (5,)), X, 2, 1),
    "matmul": (lambda x: torch.matmul(x, x.transpose(-1, -2)) @ OTHER.transpose(1, 2), (2, 8, 3, 5), 1, 1),
    "matmul with another": (lambda x: x @ numbers(5, 7), (2, 8, 3, 5), 1, 1),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x + 1, x, is_causal=True), (2, 8, 3, 5), 1, 1),
    "attention by groups": (
        lambda x: F.scaled_dot_product_attention(
            x, x.view(2, 4, 2, 3, 5)[:, :, 0], x.view(2, 4, 2, 3, 5)[:, :, 1], enable_gqa=True
        ),
        (2, 8, 3, 5),
        1,
        1,
    ),
    "two blocks of heads": (
        lambda x: F.scaled_dot_product_attention(*[x.view(2, 3, 8, 4).transpose(1, 2)] * 3),
        (2, 3, 32),
        2,
        2,
    ),
    "softmax in another dtype": (lambda x: x.softmax(-1, dtype=torch.float32), X, 2, 1),
    "arguments by name": (lambda x: torch.sum(input=torch.transpose(input=x, dim0=0, dim1=1), dim=(-1, 0)), X, 2, 1),
    "axis": (lambda x: torch.cat([x, x], axis=-1).sum(axis=0), X, 2, 1),  # type: ignore[call-arg]
    "dtype of another": (lambda x: x.to(torch.ones(3)).type_as(torch.ones(1, dtype=torch.float64)), X, 2, 1),
    "shape of another": (lambda x: x.transpose(0, 1).reshape_as(OTHER), (3, 2, 8, 5), 2, 1),
    "not None": (lambda x: x if x != None else OTHER, X, 2, 1),  # noqa: E711
    "dropout that is off": (lambda x: F.dropout(x, 0.5, training=False), X, 2, 1),
}


@pytest.mark.parametrize("what", EXACT)
def test_a_function_gives_what_it_gives_of_the_whole(what: str) -> None:
    function, shape, dim, blocks = EXACT[what]
    value = numbers(*shape)
    found, expected = function(sharded(value, dim, blocks)), function(value)
    assert isinstance(found, Sharded)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(whole(found), expected, rtol=1e-12, atol=1e-12)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a function that nobody knows": (
        torch.logdet,
        "logdet cannot be computed shard by shard: it is not known to leave",
    ),
    "softmax": (lambda x: x.softmax(2), "softmax cannot .* computes along dimension 2 of (2, 3, 8, 5), which is cut"),
    "sum": (torch.sum, "sum cannot be computed shard by shard: it computes with all values"),
    "pick": (lambda x: x[:, :, 2], "getitem.* picks from dimension 2, which is cut"),
    "part": (lambda x: x[:, :, :4], "getitem.* picks from dimension 2, which is cut"),
    "cat": (lambda x: torch.cat([x, x], dim=2), "cat cannot .* puts tensors together in dimension 2, which is cut"),
    "view": (lambda x: x.view(2, 3, 2, 20), "no dimension of that can be cut into 4 shards as dimension 2 is"),
    "chunk": (lambda x: x.chunk(2, dim=2), "has to be cut as 'columns:2'"),
    "norm": (lambda x: F.layer_norm(x, (8, 5)), "layer_norm cannot .* computes along dimension 2"),
    "matrices that are cut": (lambda x: x @ x.mT, "multiplies matrices of (2, 3, 8, 5) that are cut themselves"),
    "another cut": (lambda x: x + x.transpose(1, 2), "which are cut in other dimensions"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), "whose dimension 2 is cut"),
    "squeeze": (lambda x: x[:, :, :, 0].view(2, 3, 4, 2)[..., 0].squeeze(2), "squeeze cannot .* what it does not to"),
    "pick by a tensor": (lambda x: x[torch.tensor([0, 1])], "getitem.* picks by a tensor or a list"),
    "pick by itself": (lambda x: x[x > 0], "getitem.* picks by a tensor or a list"),
    "another dtype": (lambda x: x.view(torch.int64), "looks at the bytes of another dtype"),
    "no values": (lambda x: x[:0].view(0, -1), "which has no values"),
    "in place of a plain tensor": (lambda x: OTHER.add_(x), "add_ cannot .* writes into an ordinary tensor"),
    "a sum in place": (lambda x: operator.iadd(OTHER, x), "writes into an ordinary tensor"),
    "out": (lambda x: torch.add(x, 1, out=OTHER), "add cannot .* has an argument out"),
    "a view in place": (lambda x: x.transpose_(0, 1), "transpose_ cannot be computed shard by shard"),
    "requires_grad_": (lambda x: x.requires_grad_(False), "requires_grad_ cannot be computed"),
    "where": (torch.where, "where cannot .* asks where values are"),
    "no dim": (lambda x: F.softmax(x), "softmax cannot .* chooses a dimension"),
    "another size": (lambda x: x + x[:, :, :, :].reshape(2, 3, 4, 10)[..., :5], "computes with"),
    "a function of its own": (lambda x: Twice.apply(x) + 1, "TwiceBackward.* would lose its gradients"),
    "a number of it": (lambda x: x.tolist(), "tolist cannot be computed shard by shard"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_mixes_shards_is_refused_in_words(what: str) -> None:
    function, words = REFUSED[what]
    pattern = words.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(UsageError, match=pattern) as error:
        function(sharded(numbers(*X), 2, needs_gradient=words.startswith("Twice")))
    assert "unisono.whole(x) gives every shard the whole tensor" in str(error.value)


def test_dropout_of_a_shard_does_not_depend_on_the_others() -> None:
    """And the generator goes on as it does on a worker with other shards."""

    def dropped(place: Place) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(11)
        found = F.dropout(sharded(numbers(4, 64), 1, place=place), 0.5)
        assert isinstance(found, Sharded)
        return found.parts, torch.rand(3)

    alone, after = dropped(Place(SHARDS))
    assert len({part.numpy().tobytes() for part in alone}) == SHARDS
    assert 0.3 < float((torch.cat(alone) == 0).float().mean()) < 0.7
    for number in range(2):
        place = Place(SHARDS)
        place.divide(number, 2)
        parts, after_here = dropped(place)
        assert all(torch.equal(*pair) for pair in zip(parts, alone[number * 2 :], strict=False))
        assert torch.equal(after, after_here)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6, 8), (2, 8, 3), (8,)])
def test_cross_entropy_of_classes_that_are_cut(shape: tuple[int, ...], reduction: str) -> None:
    dim = 1 if len(shape) > 1 else 0
    target = torch.randint(0, 8, [size for at, size in enumerate(shape) if at != dim])
    if target.dim():
        target[0] = -100
    logits = (numbers(*shape) * 30).requires_grad_()
    place = Place(SHARDS)
    parts = Sharded.of(cut(place, logits, dim), place, dim)
    found = F.cross_entropy(parts, target, reduction=reduction)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    expected = F.cross_entropy(logits, target, reduction=reduction)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    low = F.cross_entropy(Sharded.of([one.bfloat16() for one in parts.parts], place, dim), target, reduction=reduction)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), expected.detach(), rtol=0.05, atol=0.5)
    with pytest.raises(UsageError, match="has weight, label_smoothing"):
        F.cross_entropy(parts, target, label_smoothing=0.1)


def test_sums_over_shards_are_those_of_the_tree() -> None:
    parts = [numbers(7) * 10.0**index for index in range(8)]
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))
    for size in (1, 2, 4, 8):
        found = Threads(size).run(lambda place: join(place, [parts[shard] for shard in place.own]), shards=8)
        assert [one.numpy().tobytes() for one in found] == [expected.numpy().tobytes()] * size


def test_the_layout_of_a_sum_does_not_depend_on_the_number_of_workers() -> None:
    """It decides in which order what follows adds."""
    parts = [numbers(6, 8).t() * shard for shard in range(4)]
    for size in (1, 2, 4):
        found = Threads(size).run(lambda place: join(place, [parts[shard] for shard in place.own]))
        assert [one.stride() for one in found] == [(6, 1)] * size


def test_what_is_no_class_is_refused() -> None:
    place = Place(SHARDS)
    logits = Sharded.of(cut(place, numbers(3, 8), 1), place, 1)
    for target in ([0, 8, 1], [-1, 0, 0]):
        with pytest.raises(RuntimeError, match="a target is no class from 0 to 7"):
            F.cross_entropy(logits, torch.tensor(target))
    with pytest.raises(ValueError, match="'middle' is no reduction"):
        F.cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="middle")
    with pytest.raises(UsageError, match="they have to be classes"):
        F.cross_entropy(logits, torch.tensor([[0, 1, 2]]))
    words = parallelize(nn.Sequential(nn.Embedding(8, 4)), {"0": "vocabulary"}, shards=SHARDS)
    with pytest.raises(RuntimeError, match="an index is not from 0 to 7"):
        words(torch.tensor([3, 8]))


def test_the_output_of_rows_may_be_written_into() -> None:
    model = parallelize(nn.Sequential(nn.Linear(8, 4, bias=False)), {"0": "rows"}, shards=SHARDS)
    found = model(numbers(2, 8).float())
    found += 1
    found.sum().backward()
    assert model.get_parameter("0.weight.3").grad is not None


def test_rows_compute_in_the_dtype_of_autocast() -> None:
    model = parallelize(nn.Sequential(nn.Linear(8, 4)), {"0": "rows"}, shards=SHARDS)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(numbers(2, 8).float()).dtype == torch.bfloat16


def test_a_module_under_two_names_stays_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.again = model[0]
    parallelize(model, {"0": "columns", "1": "rows"}, shards=2)
    assert model.again is model[0]
    assert not isinstance(model.again, nn.Linear)
    assert isinstance(assemble(model).again, nn.Linear)
    assert model.again is model[0]


def test_a_plan_that_was_refused_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))
    with pytest.raises(UsageError, match="has 6 values"):
        parallelize(model, {"0": "columns", "1": "columns"}, shards=4)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    parallelize(model, {"0": "columns"}, shards=2)
    assert all(bool((one == 3.0).all()) for one in model.get_submodule("0.weight").parameters())


def test_weights_that_are_tied_to_another_module() -> None:
    words, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = words.weight
    first, last = nn.Sequential(words), nn.Sequential(head)
    parallelize(first, {"0": "vocabulary"}, shards=2)
    parallelize(last, {"0": "columns"}, shards=2)
    assert first.get_parameter("0.weight.1") is last.get_parameter("0.weight.1")
    words, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = words.weight
    parallelize(nn.Sequential(words), {"0": "vocabulary"}, shards=2)
    with torch.no_grad():
        head.weight.zero_()
    with pytest.raises(UsageError, match="has new values since: load weights before"):
        parallelize(nn.Sequential(head), {"0": "columns"}, shards=2)
    with pytest.raises(UsageError, match="a weight of head is tied to that of a layer that is cut, and head is not"):
        parallelize(Language(Fused, tied=True), {"words": "vocabulary"}, shards=2)


def test_an_embedding_with_padding() -> None:
    layer = nn.Embedding(8, 4, padding_idx=5)
    model = parallelize(nn.Sequential(copy.deepcopy(layer)), {"0": "vocabulary"}, shards=SHARDS)
    words = torch.tensor([[5, 1], [7, 5]])
    assert torch.equal(model(words), layer(words))
    model(words).sum().backward()
    assert not model.get_parameter("0.weight.2").grad[1].any()  # type: ignore[index]
    assert model.get_parameter("0.weight.3").grad[1].all()  # type: ignore[index]


@pytest.mark.parametrize("attention", [Written, Fused])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_is_assembled_again(attention: type[nn.Module], is_tied: bool) -> None:
    before, model = made(attention, tied=is_tied)
    assert assemble(model.eval()) is model
    assert not layers_in(model)
    assert not any(module.training for module in model.modules())
    assert str(model) == str(before)
    expected, found = before.state_dict(), model.state_dict()
    assert {name: one.numpy().tobytes() for name, one in expected.items()} == {
        name: one.numpy().tobytes() for name, one in found.items()
    }
    assert (model.head.weight is model.words.weight) == is_tied
    assert torch.equal(model(batch()[0]), before(batch()[0]))


def test_a_model_with_shards_elsewhere_is_not_assembled() -> None:
    _, model = made()
    torch.utils.swap_tensors(model.get_parameter("head.weight.1"), nn.Parameter(torch.empty(8, WIDTH, device="meta")))
    with pytest.raises(UsageError, match=r"unisono\.assemble: head has shards on other processes"):
        assemble(model)


WRONG: list[tuple[nn.Module, Any, Any, str]] = [
    (nn.Sequential(nn.Linear(4, 4)), {"0": "rows"}, 2.0, "shards=2.0, which is no power of two"),
    (nn.Sequential(nn.Linear(4, 4)), {"0": "rows"}, "2", "shards='2', which is no power of two"),
    (nn.Sequential(nn.Linear(4, 4)), {}, 2, "needs a plan such as {'*.up': 'columns', '*.down': 'rows'}; got {}"),
    (nn.Sequential(nn.Linear(4, 4)), ["0"], 2, "needs a plan such as"),
    (nn.Sequential(nn.Linear(4, 4)), {"0": None}, 2, "0 is to be cut by None: there are columns"),
    (nn.Sequential(nn.Linear(4, 4)), {"0": "columns:0"}, 2, "0 is to be cut by 'columns:0': there are columns"),
    (nn.Sequential(nn.Linear(4, 4)), {"0": "rows"}, 3, "shards=3, which is no power of two"),
    (nn.Sequential(nn.Linear(4, 4)), {"layer": "rows"}, 2, "no module matches 'layer'; those that can be cut are 0"),
    (nn.Sequential(nn.ReLU()), {"layer": "rows"}, 2, "no module matches 'layer'; none can be cut"),
    (nn.Sequential(nn.Linear(4, 4)), {"0": "cols"}, 2, "is to be cut by 'cols': there are columns, columns:3, rows"),
    (nn.Sequential(nn.Linear(4, 4)), {"0": "rows:2"}, 2, "is to be cut by 'rows:2'"),
    (nn.Sequential(nn.Linear(4, 4)), {"*": "rows", "0": "columns"}, 2, "0 is cut by 'rows' and by 'columns'"),
    (nn.Sequential(nn.Linear(4, 6)), {"0": "columns"}, 4, "has 6 values, which cannot be cut into 4 equal parts"),
    (nn.Sequential(nn.Linear(4, 6)), {"0": "columns:3"}, 4, "has 6 values, which cannot be cut into 12 equal parts"),
    (nn.Sequential(nn.Conv1d(4, 4, 1)), {"0": "rows"}, 2, "0 is a Conv1d, and 'rows' cuts an nn.Linear"),
    (nn.MultiheadAttention(4, 2), {"out_proj": "rows"}, 2, "nn.MultiheadAttention computes with its weights itself"),
    (nn.Sequential(nn.Embedding(4, 4)), {"0": "rows"}, 2, "0 is a Embedding, and 'rows' cuts an nn.Linear"),
    (nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), {"0": "vocabulary"}, 2, "has max_norm"),
]


@pytest.mark.parametrize(("model", "plan", "shards", "words"), WRONG, ids=[one[-1][:40] for one in WRONG])
def test_wrong_plans_are_refused_in_words(model: nn.Module, plan: Any, shards: Any, words: str) -> None:
    before = dict(model.named_modules())
    with pytest.raises(UsageError) as error:
        parallelize(model, plan, shards=shards)
    assert words in str(error.value)
    assert dict(model.named_modules()) == before


def test_other_errors() -> None:
    _, model = made(tied=True)
    with pytest.raises(UsageError, match="layers that are cut already"):
        parallelize(model, PLAN, shards=SHARDS)
    torch.manual_seed(1)
    tied = Language(Fused, tied=True)
    with pytest.raises(UsageError, match="would be cut in two ways"):
        parallelize(tied, {"words": "vocabulary", "head": "rows"}, shards=SHARDS)
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="0 has hooks"):
        parallelize(hooked, {"0": "rows"}, shards=2)
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize(two, {"0": "columns", "1": "columns"}, shards=2)
    with pytest.raises(UsageError, match="needs all of its input, which is cut already"):
        two(numbers(2, 4).float())


def test_a_model_of_one_shard_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert parallelize(model, {"0": "rows"}, shards=1) is model
    assert type(model[0]) is nn.Linear


def test_stages_of_layers_in_other_numbers_of_shards() -> None:
    two, four = (parallelize(nn.Sequential(nn.Linear(4, 4)), {"0": "rows"}, shards=shards) for shards in (2, 4))
    with pytest.raises(UsageError, match="layers in 2 and in 4 shards"):
        unisono.Stages(two, four, cuts=2)
