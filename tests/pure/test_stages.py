"""`unisono.Stages` on one process: cuts, errors, the order of a pipeline, and gradients against those of torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from unisono.core.errors import StepError, UsageError
from unisono.core.groups import parts_of
from unisono.strategies.stages.flight import Away, Flight, OwnBuffers, Pilot, one_forward_one_backward
from unisono.strategies.stages.module import Stages, stages_in

# -- cuts --------------------------------------------------------------------------------------------


def linears(number: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(number)]


@pytest.mark.parametrize(
    ("num_modules", "cuts", "expected"),
    [
        (1, 1, (0,)),
        (4, 4, (0, 1, 2, 3)),
        (6, 4, (0, 2, 4, 5)),
        (7, 3, (0, 3, 5)),
        (5, [1, 4], (0, 1, 4)),
        (5, (2,), (0, 2)),
        (3, [], (0,)),
    ],
)
def test_cuts(num_modules: int, cuts: int | Sequence[int], expected: tuple[int, ...]) -> None:
    model = Stages(*linears(num_modules), cuts=cuts)
    assert model.cuts == expected
    assert model.num_stages == len(expected)
    of_stages = [list(model.modules_of(stage)) for stage in range(model.num_stages)]
    assert list(itertools.chain.from_iterable(of_stages)) == list(model.children())
    assert [model.stage_of(index) for index in range(num_modules)] == [
        stage for stage, modules in enumerate(of_stages) for _ in modules
    ]


@pytest.mark.parametrize(
    ("num_modules", "cuts", "message"),
    [
        (3, 4, "cannot make 4 stages of 3 modules"),
        (3, 0, "cannot make 0 stages of 3 modules"),
        (0, 1, "cannot make 1 stages of 0 modules"),
        (3, [3], r"from 1 to 2; got \(3,\)"),
        (3, [0], r"from 1 to 2; got \(0,\)"),
        (4, [2, 2], r"ascending, from 1 to 3; got \(2, 2\)"),
        (4, [3, 1], r"ascending, from 1 to 3; got \(3, 1\)"),
    ],
)
def test_cuts_that_make_no_stages(num_modules: int, cuts: int | Sequence[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Stages(*linears(num_modules), cuts=cuts)


def test_a_module_belongs_to_one_stage() -> None:
    """Its weights may be those of another module; buffers could not be shared."""
    shared = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"one Linear is in stages 0 and 1 .*b\.weight = a\.weight"):
        Stages(shared, nn.Tanh(), shared, cuts=2)
    assert Stages(nn.Tanh(), shared, shared, cuts=[1]).num_stages == 2


@pytest.mark.parametrize("given_module", [lambda: 3, lambda: torch.relu])
def test_what_makes_no_module(given_module: Any) -> None:
    with pytest.raises(UsageError, match=r"takes modules, or functions that make one; got a (int|builtin_function)"):
        Stages(nn.Linear(2, 2), given_module, cuts=2)


@given(st.integers(1, 40), st.integers(1, 12))
def test_parts_are_next_to_each_other_and_as_equal_as_may_be(num_stages: int, num_parts: int) -> None:
    found = parts_of(num_stages, num_parts)
    assert list(itertools.chain.from_iterable(found)) == [*range(num_stages)]
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert num_parts > num_stages or min(map(len, found)) >= 1


class _Settings:
    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.settings = self.run = self.spec = self


def as_part(monkeypatch: pytest.MonkeyPatch, part: int, num_parts: int) -> None:
    """Let this process be a worker with a part."""
    member = _Settings(num_parts)
    member.part = part  # type: ignore[attr-defined]
    monkeypatch.setattr("unisono.strategies.stages.module.members.current", lambda: member)


def test_more_parts_than_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    as_part(monkeypatch, 0, 3)
    with pytest.raises(
        UsageError, match=r"has 2 stages and no layers .* a group of this run has 3 processes.* --workers Nx2"
    ):
        Stages(*linears(4), cuts=2)


@pytest.mark.parametrize("part", range(2))
def test_a_worker_keeps_its_stages_and_the_others_have_no_memory(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    as_part(monkeypatch, part, 2)
    model = Stages(*linears(4), cuts=4)
    assert not any(one.is_meta for one in model.parameters()), "initial values are drawn as usual"
    known = dict(model.named_parameters())
    model.cut()
    assert {name: one.is_meta for name, one in model.named_parameters()} == {
        f"{index}.{name}": index // 2 != part for index in range(4) for name in ("weight", "bias")
    }
    assert all(known[name] is one for name, one in model.named_parameters()), "optimizers hold them"
    with pytest.raises(UsageError, match=r"this process has 2 of its 4 stages"):
        model(torch.zeros(1, 4))


def test_a_function_that_makes_a_module_leaves_no_memory_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    expected = Stages(*linears(4), cuts=2).state_dict()
    as_part(monkeypatch, 1, 2)
    torch.manual_seed(5)
    model = Stages(*[lambda: nn.Linear(4, 4)] * 4, cuts=2)
    assert [one.weight.is_meta for one in model.children()] == [True, True, False, False]
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, expected[name])


def test_a_conversion_of_the_dtype_converts_stages_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    as_part(monkeypatch, 0, 2)
    model = Stages(nn.Linear(2, 2), nn.BatchNorm1d(2), cuts=2)
    model.cut()
    model.to(torch.float64)
    assert {one.dtype for one in model.parameters()} == {torch.float64}
    assert [one.is_meta for one in model.parameters()] == [False, False, True, True]
    count = model.get_buffer("1.num_batches_tracked")
    assert (count.dtype, count.is_meta) == (torch.int64, True)


def test_stages_within_a_module_are_found_by_path() -> None:
    model = Stages(*linears(2), cuts=2)
    assert stages_in(model) == [("", model)]
    assert stages_in(nn.ModuleDict({"body": model})) == [("body", model)]
    assert stages_in(nn.Linear(2, 2)) == []


def test_outside_of_a_training_it_is_the_sequence_of_its_modules() -> None:
    layers = linears(3)
    x = torch.randn(5, 4)
    assert torch.equal(Stages(*layers, cuts=2)(x), nn.Sequential(*layers)(x))


# -- the order of a pipeline -------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 12))
def test_one_forward_one_backward(num_parts: int, num_leaves: int) -> None:
    """Every part does each micro-batch once, forward and later back, in order; few are under way; nobody waits for
    one who waits for him.
    """
    leaves = [3 * leaf + 1 for leaf in range(num_leaves)]
    orders = [one_forward_one_backward(leaves, num_parts - 1 - part) for part in range(num_parts)]
    for part, order in enumerate(orders):
        assert [leaf for is_forward, leaf in order if is_forward] == leaves
        assert [leaf for is_forward, leaf in order if not is_forward] == leaves
        under_way = list(itertools.accumulate(1 if is_forward else -1 for is_forward, _ in order))
        assert min(under_way, default=0) >= 0
        assert max(under_way, default=0) <= num_parts - part
    done: set[tuple[bool, int, int]] = set()
    at = [0] * num_parts
    while any(at[part] < len(orders[part]) for part in range(num_parts)):
        ready = [
            part
            for part in range(num_parts)
            if at[part] < len(orders[part]) and _may(orders[part][at[part]], part, num_parts, done)
        ]
        assert ready, "all wait for each other"
        for part in ready:
            done.add((*orders[part][at[part]], part))
            at[part] += 1


def _may(what: tuple[bool, int], part: int, num_parts: int, done: set[tuple[bool, int, int]]) -> bool:
    is_forward, leaf = what
    if is_forward:
        return part == 0 or (True, leaf, part - 1) in done
    return part == num_parts - 1 or (False, leaf, part + 1) in done


# -- a flight through the stages of one process ------------------------------------------------------


def fly(model: Stages, loss_of: Any, leaf: int = 0) -> tuple[Tensor, list[tuple[int, int]]]:
    """Compute the gradients of one micro-batch; returns its loss, and (micro-batch, stage) for which a seed was set."""
    seeds: list[tuple[int, int]] = []
    pilot = Pilot(model, lambda *where: seeds.append(where))
    pilot.flight = Flight(leaf)
    model.carry(pilot)
    try:
        loss = loss_of(model)
        loss.backward()
        pilot.chain()
    finally:
        model.carry(None)
    return loss.detach(), seeds


class Two(nn.Module):
    """Passes on two tensors, of which one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x.detach() * 2


class Meet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.layer(x * other)


def mlp() -> Iterator[nn.Module]:
    for _ in range(3):
        yield from (nn.Linear(12, 12), nn.Tanh())
    yield nn.Linear(12, 3)


def pooled() -> Iterator[nn.Module]:
    yield from (nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    yield nn.Linear(40, 3)


def pair() -> Iterator[nn.Module]:
    yield from (nn.Linear(12, 12), Two(), Meet())


def frozen_first() -> Iterator[nn.Module]:
    first, *others = mlp()
    yield from (first.requires_grad_(False), *others)


@pytest.mark.parametrize("made", [mlp, pooled, pair, frozen_first])
@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_gradients_are_those_of_the_model_without_cuts(made: Any, cuts: int) -> None:
    """With nothing random in it: the same operations in the same order, so the same bits."""
    torch.manual_seed(1)
    model = Stages(*made(), cuts=cuts)
    plain = copy.deepcopy(model)
    x, y = torch.randn(9, 12), torch.randint(0, 3, (9,))
    loss, seeds = fly(model, lambda called: F.cross_entropy(called(x), y), leaf=4)
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
    assert seeds == [(4, stage) for stage in range(cuts)]


def test_the_gradient_of_an_input_of_the_script_comes_through_all_stages() -> None:
    torch.manual_seed(1)
    model = Stages(*mlp(), cuts=3)
    x = torch.randn(9, 12, requires_grad=True)
    fly(model, lambda called: called(x).square().mean())
    found, x.grad = x.grad, None
    model(x).square().mean().backward()
    assert torch.equal(found, x.grad)


def test_what_a_boundary_does_not_use_gets_no_gradient() -> None:
    """An output that the next stage leaves out, and one without a graph."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.used(x), self.spare(x), torch.ones(3)

    class First(nn.Module):
        def forward(self, x: Tensor, spare: Tensor, ones: Tensor) -> Tensor:
            assert spare.requires_grad
            assert not ones.requires_grad
            return x * ones.sum()

    model = Stages(Spare(), First(), cuts=2)
    fly(model, lambda called: called(torch.randn(2, 4)).sum())
    assert model.get_parameter("0.used.weight").grad is not None
    assert model.get_parameter("0.spare.weight").grad is None


@pytest.mark.parametrize(
    ("result", "kinds"),
    [({"a": torch.zeros(1)}, "dict"), (None, "NoneType"), (3.0, "float"), ((), ""), ([torch.zeros(1)], "list")],
)
def test_a_boundary_that_is_no_tensor(result: Any, kinds: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return result

    model = Stages(Odd(), nn.Linear(4, 4), cuts=2)
    with pytest.raises(StepError, match=rf"stage 0 of unisono.Stages returned \({kinds}\): between two stages go"):
        fly(model, lambda called: called(torch.zeros(1, 4)).sum())


def test_a_tuple_with_something_else_in_it() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, 3

    model = Stages(Odd(), nn.Linear(4, 4), cuts=2)
    with pytest.raises(StepError, match=r"returned \(Tensor, int\)"):
        fly(model, lambda called: called(torch.zeros(1, 4)).sum())


def test_a_second_call_and_a_call_outside_of_a_micro_batch() -> None:
    model = Stages(*linears(2), cuts=2)
    with pytest.raises(StepError, match=r"called once for each micro-batch.*this call is the second one"):
        fly(model, lambda called: (called(torch.zeros(1, 4)) + called(torch.zeros(1, 4))).sum())
    pilot = Pilot(model, lambda *_: None)
    model.carry(pilot)
    with pytest.raises(StepError, match="where no micro-batch is computed"):
        model(torch.zeros(1, 4))


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_that_pass_tensors_on_have_the_gradients_of_one_process(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts in this process, one after the other."""
    torch.manual_seed(1)
    whole = Stages(*pair(), *[nn.Linear(3, 3), nn.Linear(3, 3)], cuts=4)
    x, y = torch.randn(9, 12), torch.randint(0, 3, (9,))
    parts, between, pilots = [], dict[int, Any](), []
    for part in range(num_parts):
        as_part(monkeypatch, part, num_parts)
        model = Stages(*copy.deepcopy([*whole.children()]), cuts=4)
        model.cut()
        parts.append(model)
        send = lambda value, part=part: between.__setitem__(part, value)  # noqa: E731
        pilots.append(Pilot(model, lambda *_: None, send, lambda part=part: between[part - 1]))
        pilots[part].flight = Flight(0)
        model.carry(pilots[part])
        if part < num_parts - 1:
            with pytest.raises(Away):
                model(x)
    loss = F.cross_entropy(parts[-1](x), y)
    loss.backward()
    pilots[-1].chain()
    for part in reversed(range(num_parts - 1)):
        pilots[part].back(parts[part].own.stop - 1, pilots[part + 1].take_gradients())
    expected, _ = fly(whole, lambda called: F.cross_entropy(called(x), y))
    assert torch.equal(loss.detach(), expected)
    seen = []
    for model in parts:
        for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            if not one.is_meta:
                seen.append(name)
                assert torch.equal(one.grad, other.grad), name
    assert sorted(seen) == sorted(name for name, _ in whole.named_parameters())


def test_buffers_of_micro_batches_that_are_under_way_do_not_mix() -> None:
    """Two forwards, then the first micro-batch's buffers, then the second's; each began from the same ones."""
    norm = nn.BatchNorm1d(3)
    before = norm.running_mean.clone()
    buffers = OwnBuffers([(norm, name) for name in norm._buffers])
    found, expected = [], []
    for seed in range(2):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        alone = copy.deepcopy(norm)
        alone(x)
        expected.append(alone.running_mean)
        buffers.take_off()
        norm(x)
        found.append(buffers.land())
        assert torch.equal(norm.running_mean, before)
    for landed, mean in zip(found, expected, strict=True):
        buffers.board(landed)
        assert torch.equal(norm.running_mean, mean)
        buffers.land()
    assert torch.equal(norm.running_mean, before)


def test_it_is_a_part_of_the_library() -> None:
    assert unisono.Stages is Stages
