"""Exchanges between members on GPUs: the sums of the tree, whatever connects them.

Members on one GPU meet over gloo, by way of the host's memory; the same exchange is tried on the CPU as well. Members
with a GPU each meet over NCCL. The process that starts them asks CUDA nothing: what it forks could use no GPU then.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

import pytest
import torch

from tests.workers.exchanges import (  # fixtures among them  # noqa: F401
    STEPS,
    Member,
    collected,
    content,
    expected,
    layouts,
    one_thread,
    share_of,
    telemetry_of,
)
from tests.workers.processes import Seat, Team
from unisono.engine.exchange import Exchange, Parcel, combine, reduce
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.network import Network
from unisono.engine.exchange.reduce import Reduction
from unisono.system.capacity import machine_gpus

CPU = torch.device("cpu")
NUM_GPUS = len(machine_gpus())
ONE_GPU = pytest.mark.skipif(NUM_GPUS < 1, reason="no CUDA device here")
TWO_GPUS = pytest.mark.skipif(NUM_GPUS < 2, reason="no second CUDA device here")
PLACES = [
    pytest.param("cpu", 3, id="copied on the CPU"),
    pytest.param("emulated one", 3, id="three on an emulated card"),
    pytest.param("emulated each", 3, id="on an emulated card each"),
    pytest.param("one", 1, marks=ONE_GPU, id="alone on a GPU"),
    pytest.param("one", 2, marks=ONE_GPU, id="two on one GPU"),
    pytest.param("one", 3, marks=ONE_GPU, id="three on one GPU"),
    pytest.param("each", max(2, NUM_GPUS), marks=TWO_GPUS, id="on a GPU each"),
]


def enter(seat: Seat, place: str, path: str) -> Exchange:
    member = Member("gloo", seat, path)
    if place.startswith("emulated"):
        os.environ["EMULATED_CARD"] = f"card {seat.rank if place.endswith('each') else 0}"
        importlib.import_module("tests.emulated.library")
        device = torch.device("emu", 0)
    else:
        device = CPU if place == "cpu" else torch.device("cuda", seat.rank if place == "each" else 0)
    if place == "cpu":  # so that not all buckets are under way at a time
        reduce.BUCKET_BYTES, reduce.RECEIVED_BYTES = 32768, 1
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if seat.size == 1:
            return Alone(device)
    context = Context(
        generation=1,
        rank=seat.rank,
        hosts=(range(seat.size),),
        device=device,
        timeout_s=member.timeout_s,
        store=member.store,
    )
    wire = context.open_wire("all", range(seat.size))
    wire._copies |= place == "cpu"
    exchange = Network(wire)
    exchange.kind = Reduction
    return exchange


def _all_steps(seat: Seat, place: str, path: str) -> list[tuple[int, str]]:
    exchange, made, prepared, steps = enter(seat, place, path), layouts(), -1, []
    for step, (layout, num_leaves) in enumerate(STEPS):
        if layout != prepared:
            exchange.prepare(made[layout])
            prepared = layout
        share = share_of(exchange, step, num_leaves)
        if step % 2 and seat.rank % 2:
            exchange.offer(share, made[layout].tail_row // 2)
        combined = combine(exchange, share, telemetry_of(seat.rank, step))
        assert list(combined.telemetry) == [telemetry_of(rank, step) for rank in range(seat.size)]
        here = made[layout].num_rows
        steps.append((combined.digest, content(combined.slot.copy_to(_on_the_host(combined.slot)))))
        assert combined.slot.layout.num_rows == here
        exchange.release(combined.slot)
    exchange.all_gather(b"")
    exchange.close()
    return steps


def _on_the_host(slot: Any) -> Any:
    return type(slot)(slot.layout, torch.zeros(slot.layout.slot_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(("place", "size"), PLACES)
def test_every_step_gives_the_bits_of_the_tree(place: str, size: int, tmp_path: pathlib.Path) -> None:
    """The sums have the bits that a CPU gives. A GPU divides by multiplying with the inverse, so the means may differ
    from the CPU's in the last bit, and are equal on all members.
    """
    with Team(size, _all_steps, place, str(tmp_path)) as team:
        results = team.results()
    for step, (layout, num_leaves) in enumerate(STEPS):
        wanted = expected(layout, step, num_leaves)
        assert {result[step][0] for result in results} == {wanted.digest}, f"step {step}"
        assert len({result[step][1] for result in results}) == 1, f"step {step}"
        if place not in ("one", "each"):
            assert results[0][step][1] == wanted.content


def _all_deliveries(seat: Seat, place: str, path: str) -> list[list[float]]:
    """From the first member to the last, and back to all: some members send nothing, others receive nothing."""
    exchange = enter(seat, place, path)
    device = getattr(exchange, "device", CPU)
    found = []
    for source, targets in ((0, (seat.size - 1,)), (seat.size - 1, tuple(range(seat.size - 1)))):
        tensor = torch.full((1000,), 1.0 + source if seat.rank == source else 0.0, device=device)
        beside = torch.full((7,), 5.0 if seat.rank == source else 0.0)  # on the host, as the step of an optimizer
        exchange.deliver([Parcel(source, targets, tensor), Parcel(source, targets, beside)])
        found.append([float(tensor.sum()), float(beside.sum())])
    exchange.all_gather(b"")
    exchange.close()
    return found


@pytest.mark.parametrize(("place", "size"), [each for each in PLACES if each.id != "alone on a GPU"])
def test_tensors_reach_the_members_that_get_them(place: str, size: int, tmp_path: pathlib.Path) -> None:
    with Team(size, _all_deliveries, place, str(tmp_path)) as team:
        results = team.results()
    last = size - 1
    for rank, (there, back) in enumerate(results):
        assert there == ([1000.0, 35.0] if rank in (0, last) else [0.0, 0.0])
        assert back == [1000.0 * size, 35.0]
