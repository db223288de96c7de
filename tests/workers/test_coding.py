"""Coded messages: the same bits in fewer bytes, for every exchange, with members that cannot, and through losses."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parts import ALL
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import served_by
from tests.workers.exchanges import STEPS, Member, Outcome, content, expected, layouts, share_of, telemetry_of
from tests.workers.losses import ended_workers
from tests.workers.processes import Seat, Team
from unisono.core.coding_rules import Mode
from unisono.core.errors import PeerLost
from unisono.engine.exchange import Exchange, Parcel, coder, combine
from unisono.engine.exchange.coding import encode
from unisono.engine.exchange.network import Network
from unisono.engine.exchange.two_level import TwoLevel
from unisono.engine.exchange.wire import Wire
from unisono.testing import Faults, run_workers
from unisono.testing import Outcome as RunOutcome

pytest.importorskip("zstandard")
pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("coded_training.py")
NETWORKS = [("gloo", 2), ("gloo", 3), ("gloo", 5), ("two-level", 3), ("two-level", 4)]
every_network = pytest.mark.parametrize(("kind", "size"), NETWORKS)

# -- exchanges ---------------------------------------------------------------------------------------


def wire_of(exchange: Exchange) -> Wire | None:
    assert isinstance(exchange, Network | TwoLevel)
    return exchange.wire


def entered(seat: Seat, kind: str, path: str, without: Sequence[int] = ()) -> Exchange:
    """An exchange that codes everything, but for members without the package."""
    setattr(coder, "can_code", lambda: seat.rank not in without)  # in this process  # noqa: B010
    return Member(kind, seat, path, coding=Mode.ALWAYS).enter(1, range(seat.size))


def _all_steps(seat: Seat, kind: str, path: str, without: tuple[int, ...]) -> dict[str, Any]:
    exchange = entered(seat, kind, path, without)
    wire, made = wire_of(exchange), layouts()
    steps, coded, prepared = [], [], -1
    for step, (layout, num_leaves) in enumerate(STEPS):
        if layout != prepared:
            exchange.prepare(made[layout])
            prepared = layout
        coded.append(wire.coder.senders if wire is not None else ())
        share = share_of(exchange, step, num_leaves)
        if step % 2 and seat.rank % 2:
            exchange.offer(share, made[layout].tail_row // 2)
        combined = combine(exchange, share, telemetry_of(seat.rank, step))
        assert list(combined.telemetry) == [telemetry_of(rank, step) for rank in range(seat.size)]
        steps.append(Outcome.of(combined))
        exchange.release(combined.slot)
    exchange.all_gather(b"")
    exchange.close()
    return {"steps": steps, "coded": coded}


@every_network
def test_coded_sums_have_the_same_bits(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """All dtypes and layouts. The first sum of an exchange is not coded: its members have not spoken yet."""
    with Team(size, _all_steps, kind, str(tmp_path), ()) as team:
        results = team.results()
    for result in results:
        assert result["steps"] == [expected(layout, step, number) for step, (layout, number) in enumerate(STEPS)]
        num_lanes = len(result["coded"][0])
        assert result["coded"] == [(False,) * num_lanes, *[(True,) * num_lanes] * (len(STEPS) - 1)]


def test_where_a_member_cannot_code_nobody_does_and_that_is_said_once(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Team(3, _all_steps, "gloo", str(tmp_path), (1,)) as team:
        results = team.results()
    for result in results:
        assert result["steps"] == [expected(layout, step, number) for step, (layout, number) in enumerate(STEPS)]
        assert result["coded"] == [(False,) * 3] * len(STEPS)
    said = [line for line in capfd.readouterr().err.splitlines() if "zstandard" in line]
    assert len(said) == 3, "each of three processes says it"
    assert len({*said}) == 1
    assert "if rank 1 had the package zstandard: pip install" in said[0]


class Spoiler:
    """What a member says that wants to harm the others."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __call__(self, data: Tensor, width: int, earlier: Tensor | None = None) -> Tensor:
        message = self._right(data, width, earlier).clone()
        if self._how == "noise":
            message[:] = torch.arange(5, 5 + len(message)).to(torch.uint8)  # numbers of 5 bytes
        elif self._how == "growing planes":
            message[4 : 4 + 4 * width] = 255
        return message

    _right = staticmethod(encode)


def _deceived(seat: Seat, kind: str, path: str, how: str) -> str:
    exchange, layout = entered(seat, kind, path), layouts()[2]
    exchange.prepare(layout)
    combined = combine(exchange, share_of(exchange, 0, 6), telemetry_of(seat.rank, 0))
    exchange.release(combined.slot)
    if seat.rank == 1:
        setattr(coder, "encode", Spoiler(how))  # noqa: B010
    share = share_of(exchange, 1, 6)
    whole = {node: content(slot) for node, slot in share.slots.items()}
    with pytest.raises(PeerLost) as raised:
        combine(exchange, share, telemetry_of(seat.rank, 1))
    assert {node: content(slot) for node, slot in share.slots.items()} == whole
    exchange.close()
    return str(raised.value)


@pytest.mark.parametrize("how", ["noise", "growing planes"])
@pytest.mark.parametrize(("kind", "size"), [("gloo", 2), ("two-level", 4)])
def test_messages_that_are_none_end_the_exchange_and_harm_nothing(
    kind: str, size: int, how: str, tmp_path: pathlib.Path
) -> None:
    with Team(size, _deceived, kind, str(tmp_path), how) as team:
        reasons = team.results()
    assert any("has sent cannot be decoded: " in reason for reason in reasons), reasons


# -- deliveries --------------------------------------------------------------------------------------

SHAPES = [(300, 40), (3,), (70, 11, 3), (120_000,), (5,)]


def value(parcel: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(parcel)
    start = torch.randn(SHAPES[parcel], generator=generator)
    start = start if parcel != 2 else start.transpose(0, 2)  # its elements are not in their order in memory
    return start * (1 + 1e-4 * turn)


def _delivered(seat: Seat, kind: str, path: str) -> tuple[list[int], list[bool]]:
    exchange = entered(seat, kind, path)
    exchange.prepare(layouts()[1])
    sent, wanted = [], []
    for turn in range(1, 5):
        if turn == 3:
            combined = combine(exchange, share_of(exchange, 0, 4), telemetry_of(seat.rank, 0))
            exchange.release(combined.slot)
        wanted.append(exchange.wants_earlier)
        parcels, expecting = [], []
        for parcel in range(len(SHAPES)):
            source = (parcel + turn) % exchange.size
            targets = tuple(rank for rank in range(exchange.size) if rank != source)
            tensor = value(parcel, turn if exchange.rank == source else turn - 1).clone(
                memory_format=torch.preserve_format
            )
            earlier = value(parcel, turn - 1) if exchange.rank == source else tensor
            parcels.append(Parcel(source, targets, tensor, earlier if turn != 4 else None))
            expecting.append(value(parcel, turn))
        sent.append(exchange.deliver(parcels))
        exchange.all_gather(b"")
        for got, right in zip(parcels, expecting, strict=True):
            assert torch.equal(got.tensor.contiguous().view(torch.int32), right.contiguous().view(torch.int32))
    exchange.close()
    return sent, wanted


@every_network
def test_changes_of_tensors_give_their_new_bits(kind: str, size: int, tmp_path: pathlib.Path) -> None:
    """Before members have said that they code, coded with what was there before, and without."""
    with Team(size, _delivered, kind, str(tmp_path)) as team:
        results = team.results()
    totals = [sum(sent[turn] for sent, _ in results) for turn in range(4)]
    assert totals[0] == totals[1]
    assert totals[2] < 0.75 * totals[0]
    assert totals[2] < totals[3] < 0.95 * totals[0]
    for _, wanted in results:
        assert wanted in ([False, False, True, True], [False] * 4 if kind == "two-level" else [])


# -- trainings ---------------------------------------------------------------------------------------

STEPS_OF_RUN = 8


def train(directory: Path, workers: int, *options: str, arguments: Sequence[str] = (), **more: Any) -> RunOutcome:
    outcome = run_workers(
        SCRIPT,
        workers,
        directory=directory,
        options=[*PATIENT, *options],
        arguments=["--steps", str(STEPS_OF_RUN), *arguments],
        timeout_s=WAIT_S,
        **more,
    )
    assert outcome.exit_code == 0, outcome.output
    return outcome


def sent_by(outcome: RunOutcome) -> list[int]:
    return [line["sent_bytes"] for line in outcome.lines if line["kind"] == "step"]


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunOutcome]:
    """One worker, by wire."""
    with served_by(standing_nursery):
        return {
            wire: train(tmp_path_factory.mktemp("calm") / "run", 1, arguments=["--wire", wire])
            for wire in ("fp32", "bf16")
        }


OWNERS = ["--shard", "worker"]


@pytest.mark.usefixtures("nursery")
def test_a_training_sends_so_many_bytes_and_has_the_same_bits(calm: dict[str, RunOutcome], tmp_path: Path) -> None:
    """Sums; sums to owners, and changes of parameters back; sums that are rounded: as shares of raw float32."""
    ways = {"raw": ("never", []), "sums": ("always", []), "owners": ("always", OWNERS),
            "bf16": ("always", ["--wire", "bf16"])}  # fmt: skip
    sent = {}
    for name, (coding, arguments) in ways.items():
        options = ("--exchange", "gloo", "--set", f"coding={coding}")
        outcome = train(tmp_path / name, 2, *options, arguments=arguments)
        right = calm["bf16" if name == "bf16" else "fp32"]
        assert (outcome.digests, outcome.final) == (right.digests, right.final), outcome.output
        sent[name] = sent_by(outcome)[1:]  # in the first step nothing has been said
    raw = max(sent["raw"])
    assert min(sent["raw"]) == raw
    assert max(sent["sums"]) <= 0.86 * raw
    assert max(sent["owners"]) <= 0.76 * raw
    assert max(sent["bf16"]) <= 0.36 * raw


KILLS = [
    ("gloo", 2, "published", 1, []),
    ("gloo", 3, "reduced", 0, []),
    ("gloo", 3, "committed", 2, ["--wire", "bf16"]),
    ("two-level", 3, "reduced", 2, []),
    ("gloo", 2, "shard.updated", 0, OWNERS),
    ("gloo", 3, "deliver.sent", 1, OWNERS),
    ("gloo", 3, "deliver.received", 2, OWNERS),
    ("two-level", 3, "shard.delivered", 2, OWNERS),
]
OPTIONS = {"two-level": ["--set", "simulate-hosts=2"]}
if ALL:
    KILLS += [
        ("gloo", 3, at, rank, ["--shard", way])
        for at in ("reduced", "shard.updated", "deliver.sent", "deliver.received", "shard.delivered", "shard.committed")
        for rank in range(3)
        for way in ("worker", "host")
        if not (way == "host" and at.startswith("deliver"))  # one host has one copy
    ]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("exchange", "workers", "at", "rank", "arguments"), KILLS)
def test_a_kill_changes_no_bit(
    exchange: str,
    workers: int,
    at: str,
    rank: int,
    arguments: list[str],
    calm: dict[str, RunOutcome],
    tmp_path: Path,
) -> None:
    """The survivors have what they have of coded messages; what is sent again goes as a whole."""
    options = ["--exchange", exchange, *OPTIONS.get(exchange, []), "--set", "coding=always"]
    if "--shard" in arguments:
        arguments = [*arguments, "--copies", "2"]
    faults = Faults().kill(f"w{rank}", step=3, at=at)
    hurt = train(tmp_path / "run", workers, *options, arguments=arguments, faults=faults)
    assert ended_workers(hurt.output), "nobody was killed"
    right = calm["bf16" if "bf16" in arguments else "fp32"]
    assert (hurt.digests, hurt.final) == (right.digests, right.final), hurt.output


@pytest.mark.usefixtures("nursery")
def test_who_has_another_earlier_value_gets_the_whole_one(calm: dict[str, RunOutcome], tmp_path: Path) -> None:
    """A script that has spoiled what another worker owns is mended by the update, as without coding."""
    arguments = [*OWNERS, "--spoil", "3"]
    outcome = train(tmp_path / "run", 2, "--exchange", "gloo", "--set", "coding=always", arguments=arguments)
    assert (outcome.digests, outcome.final) == (calm["fp32"].digests, calm["fp32"].final), outcome.output
