"""Transfer of the state of a run from one member to the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from unisono.core.errors import PeerLost, StateLost, UsageError
from unisono.engine.exchange import Exchange, Parcel
from unisono.engine.rounds import Report
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.team import Team
from unisono.engine.state.packing import Packed, digest_of_each, pack_held, unpack
from unisono.engine.state.tracked import Tracked
from unisono.system.faults import point

__all__ = ["StateHeader", "begin_alike", "send_state", "share_state"]


class StateHeader(msgspec.Struct, frozen=True):
    """Header of a state: everything but the content of its tensors."""

    skeleton: bytes
    kinds: list[tuple[str, list[int]]]
    """(dtype, shape) of each tensor."""
    away: list[int] = []
    """The numbers of those that do not travel with it: meta tensors."""
    digests: list[int] = []
    """Of those that do."""

    @classmethod
    def of(cls, packed: Packed, *, digests: bool = False) -> StateHeader:
        kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in packed.tensors]
        away = [number for number, tensor in enumerate(packed.tensors) if tensor.is_meta]
        here = [tensor for tensor in packed.tensors if not tensor.is_meta] if digests else []
        return cls(packed.skeleton, kinds, away, digest_of_each(here))

    def empty(self, *, is_target: bool = True) -> list[torch.Tensor]:
        """Return tensors of these kinds, to be filled; meta tensors for those that do not travel.

        Args:
            is_target: False: all are meta tensors, which say what travels between others.
        """
        away = set(self.away if is_target else range(len(self.kinds)))
        return [
            torch.empty(shape, dtype=getattr(torch, kind), device="meta" if number in away else "cpu")
            for number, (kind, shape) in enumerate(self.kinds)
        ]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise PeerLost if tensors that were received are not those that were sent."""
        if digest_of_each(tensors) != self.digests:
            raise PeerLost("tensors changed on their way between two workers")


def share_state(
    members: Members,
    tracked: Tracked,
    reports: Sequence[Report],
    unwritten_lines: Callable[[], list[str]] = list,
) -> tuple[list[Report], dict[str, Any] | None]:
    """Give every fresh member the state of the run; where all are fresh, make them agree on that of rank 0. Collective.

    Args:
        reports: of all members, by rank.
        unwritten_lines: returns the lines of the journal that newcomers may have to write.

    Returns:
        The reports as they are now (a newcomer gets that of its source, as of one that joins), and on a newcomer the
        state.
    """
    team = members.team
    if all(report.fresh for report in reports):
        if len(reports) > 1:
            begin_alike(team, tracked)
        return list(reports), None
    if not any(report.fresh for report in reports):
        return list(reports), None
    source = next(rank for rank, report in enumerate(reports) if not report.fresh)
    packed = None
    if team.rank == source:
        packed = pack_held({**tracked.state(), "lines": unwritten_lines()}, "tracked")
    fresh = [rank for rank, report in enumerate(reports) if report.fresh]
    state = send_state(team.exchange, source, fresh, packed)
    own = _share_apart(team, tracked, reports)
    if state is not None:
        state["objects"].update(own)
    found = reports[source]
    as_newcomer = [
        msgspec.structs.replace(found, arithmetic=report.arithmetic, joined=found.total) for report in reports
    ]
    return [new if report.fresh else report for report, new in zip(reports, as_newcomer, strict=True)], state


def _share_apart(team: Team, tracked: Tracked, reports: Sequence[Report]) -> dict[str, Any]:
    """Give every fresh member the states of the part of the model that it carries. Collective where there are parts.

    Returns:
        On a fresh member, its states by the name of the tracked object.

    Raises:
        StateLost: no member is left that carries some part.
    """
    found: dict[str, Any] = {}
    for part in range(team.num_parts) if team.num_parts > 1 else ():
        lane = team.lane(part)
        fresh = [rank for rank in lane if reports[rank].fresh]
        holding = [rank for rank in lane if not reports[rank].fresh]
        if not holding:
            raise StateLost(f"no remaining worker has the state of part {part} of the model")
        packed = None
        if team.rank == holding[0]:
            packed = pack_held({name: one.state_dict() for name, one in tracked.spread_apart.items()}, "tracked")
        if fresh and (got := send_state(team.exchange, holding[0], fresh, packed)) is not None:
            found = got
    return found


def begin_alike(team: Team, tracked: Tracked) -> None:
    """Compare the states of members that begin together; where they differ, all take that of rank 0. Collective.

    Raises:
        UsageError: the members track tensors of other shapes.
    """
    packed = pack_held(tracked.whole_state(), "tracked")  # nothing is shared out before the first training loop
    own = StateHeader.of(packed, digests=True)
    payloads = team.exchange.all_gather(msgspec.msgpack.encode(own))
    headers = [msgspec.msgpack.decode(payload, type=StateHeader) for payload in payloads]
    for part in range(team.num_parts):
        _make_alike(team, tracked, headers, team.lane(part), packed)


def _make_alike(
    team: Team, tracked: Tracked, headers: Sequence[StateHeader], lane: Sequence[int], packed: Packed
) -> None:
    """Have members of one lane begin with the same state. Collective for all members."""
    first, own = headers[lane[0]], headers[team.rank]
    different = [rank for rank in lane if headers[rank] != first]
    if not different:
        return
    ids = team.worker_ids
    for rank in different:
        if headers[rank].kinds != first.kinds:
            raise UsageError(
                f"{ids[rank]} tracks {len(headers[rank].kinds)} tensors whose shapes are not those of the "
                f"{len(first.kinds)} of {ids[lane[0]]}; "
                "all workers must build the same model"
            )
    state = send_state(team.exchange, lane[0], different, packed)
    if state is None:
        return
    changed = [index for index, (a, b) in enumerate(zip(own.digests, first.digests, strict=True)) if a != b]
    what = f"{len(changed)} tensors, the first is {packed.paths[changed[0]]}" if changed else "settings, no tensor"
    warnings.warn(
        f"{ids[team.rank]} starts with a different state from {ids[lane[0]]}'s, and uses that of {ids[lane[0]]}: "
        f"{what}. Set the seed before making the model (unisono.Run(seed=...) does)",
        stacklevel=3,
    )
    tracked.load(state)


def send_state(exchange: Exchange, source: int, targets: Sequence[int], packed: Packed | None) -> dict[str, Any] | None:
    """Send the state that rank ``source`` passes as ``packed`` to the ``targets``. Collective.

    Returns:
        The state, on a target; its meta tensors are meta tensors there, too. On all others None.
    """
    mine = packed if exchange.rank == source else None
    own = msgspec.msgpack.encode(StateHeader.of(mine)) if mine is not None else b""
    header = msgspec.msgpack.decode(exchange.all_gather(own)[source], type=StateHeader)
    is_target = exchange.rank in targets
    tensors = mine.tensors if mine is not None else header.empty(is_target=is_target)
    point("in_admission")
    exchange.deliver(
        [Parcel(source, tuple(targets), one) for number, one in enumerate(tensors) if number not in header.away]
    )
    state: dict[str, Any] | None = unpack(header.skeleton, tensors) if is_target else None
    return state
