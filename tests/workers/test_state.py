"""State dicts travel whole, without pickle, and their digests see every bit."""

from __future__ import annotations

import collections
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from tests.workers.models import bits_of
from tests.workers.processes import Seat
from tests.workers.static_team import Place, train_on
from unisono.core.errors import StepError, UsageError
from unisono.engine.rounds.transfer import send_state
from unisono.engine.state.packing import digest_of_state, digest_of_tensor, grouped, pack, unpack
from unisono.engine.state.tracked import Tracked

settings.register_profile("checks", derandomize=True, deadline=None, max_examples=200)
settings.register_profile("person", deadline=None, max_examples=200)
settings.load_profile("checks" if os.environ.get("CI") else "person")

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, NaNs with a payload among them."""
    count = torch.Size(shape).numel()
    raw = torch.tensor(list(random.Random(seed).randbytes(count * dtype.itemsize)), dtype=torch.uint8)
    return (raw % 2 == 0).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(random_tensor, st.sampled_from(DTYPES), shapes, st.integers(0, 2**32))
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.int8, torch.device("cpu"), torch.device("cuda", 1), 1j, -2.5 + 1e300j]),
    st.builds(numpy.float32, st.floats(width=32)), st.builds(numpy.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(numpy.bool_, st.booleans()), st.builds(numpy.float64, st.floats()),
)  # fmt: skip
pairs = st.tuples(st.integers(), st.text(max_size=2))
keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), pairs)
states = st.recursive(
    st.one_of(plain, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.text(max_size=3), max_size=4),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and to the bit: NaN equals itself, -0.0 is not 0.0, 1 is not True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return bits_of(a) == bits_of(b)
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, numpy.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


# -- there and back ----------------------------------------------------------------------------------


@given(states)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    packed = pack(state)
    again = unpack(packed.skeleton, [tensor.clone() for tensor in packed.tensors])
    assert same(again, state)
    assert digest_of_state(again) == digest_of_state(state)
    assert len(packed.paths) == len(packed.tensors)


def test_arrays_come_back_and_can_be_written() -> None:
    turned = numpy.arange(6.0).reshape(2, 3)[:, ::-1]
    state = {"a": turned, "b": numpy.zeros((0, 2), dtype=numpy.int8), "c": numpy.array(3 + 1j)}
    packed = pack(state)
    again = unpack(packed.skeleton, packed.tensors)
    assert same(again, {name: value.copy() for name, value in state.items()})
    again["a"][0, 0] = 7
    assert packed.tensors == []


def test_what_users_track_comes_back() -> None:
    """Real optimizers, schedulers, averages and scalers, after a step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizers = [
        torch.optim.AdamW(model.parameters(), amsgrad=True),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adagrad(model.parameters()),
        torch.optim.RMSprop(model.parameters()),
    ]
    parts = [ConstantLR(optimizers[3]), CosineAnnealingLR(optimizers[3], 4)]
    schedulers = [
        OneCycleLR(optimizers[0], 0.1, total_steps=5),
        ReduceLROnPlateau(optimizers[1]),
        MultiStepLR(optimizers[2], [1, 2]),
        SequentialLR(optimizers[3], parts, milestones=[2]),
    ]
    model(torch.randn(5, 3)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    objects: list[Any] = [
        model,
        *optimizers,
        *schedulers,
        torch.optim.swa_utils.AveragedModel(model),
        torch.amp.GradScaler("cpu"),
    ]
    for value in objects:
        packed = pack(value.state_dict(), type(value).__name__)
        assert digest_of_state(unpack(packed.skeleton, packed.tensors)) == digest_of_state(value.state_dict())


def test_tensors_are_neither_copied_nor_attached() -> None:
    parameter = nn.Parameter(torch.ones(3))
    (found,) = pack({"p": parameter}).tensors
    assert found.data_ptr() == parameter.data_ptr()
    assert not found.requires_grad


def test_paths_say_where_a_tensor_stands() -> None:
    state = {"model": {"a.weight": torch.ones(1)}, 3: [0, (torch.ones(1),)]}
    assert pack(state, "tracked").paths == ["tracked['model']['a.weight']", "tracked[3][1][0]"]


# -- refusals ----------------------------------------------------------------------------------------


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Custom(), "Custom"),
        (lambda: None, "builtins.function"),
        (Path("x"), "PosixPath"),
        (numpy.array(["a"]), "numpy.ndarray"),
        (numpy.datetime64(3, "s"), "numpy.datetime64"),
        (torch.Generator(), "torch._C.Generator"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_path(value: Any, kind: str) -> None:
    with pytest.raises(UsageError) as caught:
        pack({"optimizer": {"state": [1, {"x": value}]}}, "tracked")
    assert str(caught.value).startswith("tracked['optimizer']['state'][1]['x'] is a ")
    assert kind in str(caught.value)
    assert "state_dict() may hold tensors" in str(caught.value)


def test_a_key_that_cannot_travel_is_refused() -> None:
    with pytest.raises(UsageError, match=r"tracked\['a'\] \(a key\) is a .*Custom"):
        pack({"a": {Custom(): 1}}, "tracked")


# -- digests -----------------------------------------------------------------------------------------


@given(tensor=tensors.filter(lambda t: t.numel() > 0 and t.dtype != torch.bool), data=st.data())
def test_every_bit_counts(tensor: Tensor, data: st.DataObject) -> None:
    before = digest_of_tensor(tensor)
    other = tensor.clone()
    raw = other.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_of_tensor(other) != before
    assert digest_of_tensor(tensor.clone()) == before


@pytest.mark.parametrize("place", [0, 1, 65_535, 65_536, 200_000, 399_999])
@pytest.mark.parametrize("bit", [0, 31])
def test_every_bit_of_a_large_tensor_counts(place: int, bit: int) -> None:
    """Of all blocks, and of the words behind the last whole one."""
    tensor = torch.arange(400_001, dtype=torch.int32)
    before = digest_of_tensor(tensor)
    tensor[place] ^= -(1 << 31) if bit == 31 else 1
    assert digest_of_tensor(tensor) != before


ALIKE = [
    *(1, True, 1.0, "1", b"1", None, 1j, [1], (1,), {1}, {1: 1}, numpy.int64(1), numpy.float32(1), numpy.ones(1)),
    *(torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1, 1), torch.float32, "torch.float32"),
]


@given(states, st.sampled_from(ALIKE))
def test_types_count(state: Any, value: Any) -> None:
    """What compares equal in Python is not the same state."""
    equal = [other for other in ALIKE if digest_of_state([state, other]) == digest_of_state([state, value])]
    assert len(equal) == 1
    assert same(equal[0], value)


def test_the_order_of_tensors_counts() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert digest_of_state([a, b]) != digest_of_state([b, a])
    assert digest_of_tensor(a) != digest_of_tensor(b)
    many = torch.arange(200_000, dtype=torch.float64)
    assert digest_of_tensor(many) != digest_of_tensor(many.roll(65_536))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([torch.zeros(1, dtype=t.dtype), t.reshape(-1)])[1:].view(t.shape),
        lambda t: nn.Parameter(t.clone()),
    ],
)
def test_how_a_tensor_lies_in_memory_does_not_count(view: Any) -> None:
    tensor = torch.randn(300, 500)
    assert digest_of_tensor(view(tensor)) == digest_of_tensor(tensor)


# -- caches ------------------------------------------------------------------------------------------


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("mask", None, persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)


def test_a_state_has_no_caches() -> None:
    """Workers have them in other sizes, or not at all; states, and what is summed, have the same shapes everywhere."""
    ours, theirs = Tracked(), Tracked()
    for tracked, model in ((ours, mine := Cached()), (theirs, yours := Cached())):
        tracked.add({"model": model})
    yours.inner.mask, yours.table[0] = torch.ones(3), 7.0
    ours.load(theirs.state())
    assert (mine.table.tolist(), mine.inner.mask) == ([7.0], None)
    mine.table = torch.arange(4.0)
    for tracked in (ours, theirs):
        assert {name: kept.shape for name, kept in tracked.state()["hidden"].items()} == {"model.table": (1,)}
        assert [(name, kept.shape) for name, kept in tracked.buffers().named()] == [("model.table", (1,))]
    ours.load(theirs.state())
    assert mine.table.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_parameters_that_only_an_optimizer_has_are_a_part_of_the_state() -> None:
    """Layers in a plain list, a bare tensor: no ``state_dict`` has them, that of the optimizer neither."""
    optimizers, trackeds = [], [Tracked(), Tracked()]
    for tracked in trackeds:
        head, bare, body = nn.Linear(2, 2), nn.Parameter(torch.randn(3)), nn.Linear(2, 1)
        optimizers.append(torch.optim.SGD([*head.parameters(), bare, *body.parameters()], lr=0.1, momentum=0.9))
        tracked.add({"model": head, "optimizer": optimizers[-1]})
    ours, theirs = trackeds
    assert theirs.compared()["what no state_dict has"].keys() == {f"optimizer.0.{index}" for index in (2, 3, 4)}
    ours.load(theirs.state())
    for mine, yours in zip(*(each.param_groups[0]["params"] for each in optimizers), strict=True):
        assert bits_of(mine) == bits_of(yours)
        assert mine is not yours
        assert mine.requires_grad
    of_old_version = theirs.whole_state()
    del of_old_version["hidden"]["optimizer.0.2"]
    with pytest.raises(UsageError, match=r"^the state lacks optimizer\.0\.2: parameters that no tracked module"):
        ours.load(of_old_version)


def test_a_newcomer_knows_how_often_backward_is_called() -> None:
    """A penalty in every 16th step is no news to a worker that joined after the last one."""
    gone, fresh = Tracked(), Tracked()
    for tracked in (gone, fresh):
        tracked.add({"model": nn.Linear(2, 2)})
    gone.calls.known[1] = 2
    fresh.load(gone.state())
    assert fresh.calls.known == {1: 2}


def test_a_scheduler_of_another_version_of_torch_is_loaded() -> None:
    """Its state is all that it has, private notes among it, and these change from version to version."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    tracked = Tracked()
    tracked.add({"scheduler": MultiStepLR(optimizer, [3])})
    state = tracked.state()
    state["objects"]["scheduler"] |= {"_of_another_version": False}
    del state["objects"]["scheduler"]["_step_count"]
    tracked.load(state)

    class Forgetful:
        def state_dict(self) -> dict[str, int]:
            return {"count": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    tracked = Tracked()
    tracked.add({"own": Forgetful()})
    state = tracked.state()
    state["objects"]["own"] = {}
    with pytest.raises(StepError, match=r"own .* is not the same after load_state_dict"):
        tracked.load(state)


def _send_empty(seat: Seat, place: Place) -> list[list[float]]:
    state = {"empty": torch.empty(0), "bias": torch.tensor([1.5, -2.0])}
    found = send_state(place.exchange(), 0, [1], pack(state) if seat.rank == 0 else None)
    return [one.tolist() for one in (found or {}).values()]


def test_a_state_whose_first_tensors_are_empty_travels() -> None:
    assert train_on("shared", 2, _send_empty) == [[], [[], [1.5, -2.0]]]


def test_groups_keep_the_order_and_hold_no_more_than_they_may() -> None:
    assert grouped([0, 3, 4, 1, 9, 0, 2], int, 7) == [[0, 3, 4], [1], [9], [0, 2]]
    assert grouped([8], int, 7) == [[8]]
    assert grouped([], int, 7) == []
