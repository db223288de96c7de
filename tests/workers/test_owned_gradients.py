"""Gradients that go to the owners of their parameters only: the same bits in half the bytes."""

from __future__ import annotations

import copy
import functools
import math
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import unisono
from tests.workers.exchanges import Member, every_kind, expected, layouts, share_of, telemetry_of
from tests.workers.models import Mixed, Mlp, bits_of, vectors
from tests.workers.processes import Seat, Team
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.routes import Route, routes_of, rows_for
from unisono.engine.exchange import Share, combine
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout
from unisono.engine.state.elsewhere import Elsewhere

pytestmark = pytest.mark.more

LAYOUTS = (0, 2, 3)
"""Of several dtypes; of several pieces; one that rounds."""


def routes_for(layout: FlatLayout, size: int) -> tuple[Route, ...]:
    """One owner for the first tensor, two for the next, all for the third, and so on; the tail for all."""
    needed = []
    for number, entry in enumerate(layout.gradients):
        first = entry.offset * entry.sum_dtype.itemsize // ROW_BYTES
        ranks = tuple(dict.fromkeys((number + step) % size for step in range(number % 3)))
        needed.append((range(first, entry.end_row), ranks if number else (size - 1,)))
    needed.sort(key=lambda one: (one[0].start, one[0].stop))
    return routes_of([*needed, (range(layout.tail_row, layout.num_rows), ())])


def _routed(seat: Seat, kind: str, path: str, num_leaves: int) -> list[tuple[int, dict[int, str]]]:
    exchange = Member(kind, seat, path).enter(1, range(seat.size))
    found = []
    for step, number in enumerate(LAYOUTS):
        layout = layouts()[number]
        exchange.prepare(layout)
        whole = share_of(exchange, step, num_leaves)
        share = Share(num_leaves, whole.plan, whole.slots, routes_for(layout, seat.size))
        if step % 2:
            exchange.offer(share, layout.num_rows // 2)
        combined = combine(exchange, share, telemetry_of(seat.rank, step))
        rows = rows_for(share.routes, seat.rank, range(layout.num_rows))
        found.append(
            (combined.digest, {row: bits_of(combined.slot.rows(row, row + 1)) for part in rows for row in part})
        )
        exchange.release(combined.slot)
    exchange.all_gather(b"")
    exchange.close()
    return found


@every_kind
def test_each_member_gets_the_rows_that_it_needs(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """With the bits and the digest of the whole sum."""
    with Team(size, _routed, kind, str(tmp_path), 6) as team:
        results = team.results()
    for step, number in enumerate(LAYOUTS):
        layout = layouts()[number]
        reference = expected_rows(number, step, 6)
        for rank, result in enumerate(results):
            digest, rows = result[step]
            assert digest == expected(number, step, 6).digest
            assert rows == {row: reference[row] for row in rows}
            assert set(range(layout.tail_row, layout.num_rows)) <= rows.keys(), rank
    if size > 1:
        assert len(results[0][0][1]) < layouts()[LAYOUTS[0]].num_rows


def expected_rows(layout: int, step: int, num_leaves: int) -> dict[int, str]:
    """The rows of the whole sum, as one member has it."""
    from unisono.engine.exchange.alone import Alone

    exchange = Alone(torch.device("cpu"))
    exchange.prepare(layouts()[layout])
    combined = combine(exchange, share_of(exchange, step, num_leaves), telemetry_of(0, step))
    assert combined.digest == expected(layout, step, num_leaves).digest
    return {row: bits_of(combined.slot.rows(row, row + 1)) for row in range(layouts()[layout].num_rows)}


# -- bytes -------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Four layers of equal size, so that four owners have equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def _sent(seat: Seat, place: Place, options: dict[str, Any], folder: str) -> list[int]:
    with place.run(seed=3) as run:
        model = Wide()
        optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if options:
            optimizer = unisono.shard(optimizer, **options)
        run.track(model=model, optimizer=optimizer)
        found = []
        for step in run.steps(list(torch.randn(32, 256)), batch_size=8, microbatches=4, epochs=1):
            for x in step:
                model(x).square().mean().backward()
            sums = step._played.result.sent_bytes  # type: ignore[union-attr]
            optimizer.step()
            found.append(sums + run._rounds.members.take_delivered_bytes())
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_sums_to_owners_and_values_back_are_the_bytes_of_an_all_reduce(size: int, tmp_path: pathlib.Path) -> None:
    """With whole gradients the values come on top: half as much again."""
    num_bytes = sum(one.nbytes for one in Wide().parameters())
    part = num_bytes * (size - 1) / size
    for options, expected_bytes in (
        ({}, 2 * part),
        ({"copies": 1}, 3 * part),
        ({"copies": 1, "gradients": "owners"}, 2 * part),
        ({"copies": 1, "gradients": "owners", "parameters": "host"}, part),
    ):
        results = train_on("gloo", size, _sent, options, str(tmp_path))
        for step in (1, 2, 3):  # in the first step states are shared out
            mean = sum(each[step] for each in results) / size
            assert mean == pytest.approx(expected_bytes, rel=0.02), options


# -- clipping ----------------------------------------------------------------------------------------

OWNERS: dict[str, Any] = {"copies": 1, "gradients": "owners"}
CLIPS: list[dict[str, Any]] = [
    {"max_norm": 0.3},
    {"max_norm": 0.3, "foreach": False},
    {"max_norm": 0.05, "norm_type": math.inf},
    {"max_norm": 2.0, "norm_type": 1},
    {"max_norm": 0.3, "norm_type": 3.0, "error_if_nonfinite": True},
]


def train(run: unisono.Run, clip: Any, model: nn.Module, **options: Any) -> str:
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if options:
        optimizer = unisono.shard(optimizer, **options)
    run.track(model=model, optimizer=optimizer)
    totals = []
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=1):
        for x, y in step:
            F.cross_entropy(model(x).float(), y).backward()
        totals.append(clip(model.parameters()))
        optimizer.step()
    return bits_of([totals, model.state_dict()])


def clipped(options: dict[str, Any], parameters: Any) -> Tensor:
    return unisono.clip_grad_norm_(parameters, **options)


def by_torch(options: dict[str, Any], parameters: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, **options)


def by_value(parameters: Any) -> None:
    unisono.clip_grad_value_(parameters, 0.01)


def _clip(seat: Seat, place: Place) -> list[str]:
    found = []
    for options in CLIPS:
        for make in (Mlp, Mixed):
            with place.run(seed=3) as run:
                found.append(train(run, partial(clipped, options), make(), **OWNERS))
    with place.run(seed=3) as run:
        found.append(train(run, by_value, Mlp(), **OWNERS))
    return found


@functools.cache
def clipped_alone() -> list[str]:
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for options in CLIPS:
        for make in (Mlp, Mixed):
            with AloneRun(seed=3) as run:
                found.append(train(run, partial(by_torch, options), make()))
    with AloneRun(seed=3) as run:
        found.append(train(run, by_value, Mlp()))
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_clipping_has_the_bits_of_torch_with_whole_gradients(kind: str) -> None:
    """The norm, of every order, and what comes of it; float32 alone and mixed with other dtypes."""
    assert train_on(kind, 3, _clip) == [clipped_alone()] * 3


def test_outside_of_such_a_training_it_is_the_function_of_torch() -> None:
    layers = [nn.Linear(5, 3), nn.Linear(5, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        layer(torch.arange(5.0)).square().sum().backward()
    total = unisono.clip_grad_norm_(layers[0].parameters(), 0.5)
    assert bits_of(total) == bits_of(nn.utils.clip_grad_norm_(layers[1].parameters(), 0.5))
    unisono.clip_grad_value_(layers[0].weight, 0.01)
    nn.utils.clip_grad_value_(layers[1].weight, 0.01)
    assert [bits_of(one.grad) for one in layers[0].parameters()] == [
        bits_of(one.grad) for one in layers[1].parameters()
    ]


# -- what a script sees ------------------------------------------------------------------------------


def _look(seat: Seat, place: Place) -> list[str]:
    """What raises, in the words of the error; and zero_grad() in all its forms, which does not."""
    said = []
    with place.run(seed=3) as run:
        model = Mlp()
        optimizer = unisono.shard(optim.AdamW(model.parameters(), lr=0.1), **OWNERS)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=1):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            away = [one for one in model.parameters() if isinstance(one.grad, Elsewhere)]
            here = [one for one in model.parameters() if not isinstance(one.grad, Elsewhere)]
            assert away
            assert here
            gradient = away[0].grad
            assert gradient is not None
            assert gradient.shape == away[0].shape
            assert "Elsewhere" in repr(gradient)
            reads: list[Callable[[Tensor], object]] = [
                lambda one: one.norm(),
                lambda one: one + 1,
                lambda one: one.numpy(),
                lambda one: one.tolist(),
                copy.deepcopy,
                lambda one: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                lambda one: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            ]
            for read in reads:
                with pytest.raises(unisono.UsageError) as caught:
                    read(gradient)
                said.append(str(caught.value))
            if step.number == 0:
                optimizer.zero_grad(set_to_none=False)
                assert all(not one.grad.any() for one in here if one.grad is not None)
            optimizer.step()
            assert isinstance(away[0].grad, Elsewhere)
            (model if step.number else optimizer).zero_grad()
            assert all(one.grad is None for one in model.parameters())
    return said


def test_reading_a_gradient_that_is_elsewhere_names_the_function_to_use() -> None:
    for said in train_on("shared", 3, _look):
        assert said
        assert all("unisono.clip_grad_norm_" in one for one in said)
        assert all("is not on this worker" in one for one in said)
