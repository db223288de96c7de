"""Loading of what not all members hold (`engine.state.spread`) from a checkpoint: each gets what it is to hold.

A member that sees the checkpoint reads its states itself; to the others they are sent, a few tensors at a time. So no
member ever has all states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.core.errors import CheckpointError
from unisono.core.holdings import Holders, Move, moves
from unisono.engine.checkpoint.loading import read_tensors
from unisono.engine.checkpoint.snapshot import tensor_names
from unisono.engine.exchange import Parcel
from unisono.engine.rounds.team import Team, places
from unisono.engine.state.packing import Packed, grouped, pack_held, unpack
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import Manifest
from unisono.system.faults import point

__all__ = ["load_shares", "without_shares"]

TOGETHER_BYTES = 16 << 20
"""Tensors up to this size together are read and sent at once."""


class _Seen(msgspec.Struct, frozen=True):
    """A checkpoint, as the member names it that has chosen it."""

    path: str = ""
    crc32: int = 0


def without_shares(state: dict[str, Any], tracked: Tracked) -> Packed:
    """Return a whole state in which meta tensors stand for all that `load_shares` loads."""
    packed = pack_held(state, "tracked")
    tensors = list(packed.tensors)
    for number in tracked.apart_in(packed.paths):
        tensors[number] = tensors[number].to("meta")
    return packed._replace(tensors=tensors)


def load_shares(team: Team, tracked: Tracked, checkpoint: Path | None) -> None:
    """Load what not all members hold, when all else of a checkpoint is loaded. Collective.

    When this returns, all members have what they are to hold. Until then a member that is lost takes nothing with it:
    the others begin from the checkpoint again.

    Args:
        checkpoint: on rank 0, from where; whatever it is on other members.

    Raises:
        CheckpointError: the checkpoint was changed meanwhile. PeerLost, DeadlineExceeded: a member was lost.
    """
    if not tracked.is_spread:
        return
    packed = without_shares(tracked.whole_state(), tracked)
    found, seen_by = _find(team, checkpoint)
    if found is not None and tensor_names(packed.paths) != [entry.name for entry in found[1].tensors]:
        raise CheckpointError(f"{found[0]} does not hold the tensors that this worker has loaded from it")
    wanted = _wanted(team, tracked, packed)
    here = dict[int, Tensor]()
    if found is not None:
        here = read_tensors(*found, [number for number, ranks in wanted.items() if team.rank in ranks])
    # A tensor comes from a member that has read it anyway, else from any that sees the checkpoint.
    now = {number: [rank for rank in ranks if rank in seen_by] or sorted(seen_by) for number, ranks in wanted.items()}
    sent = moves(now, wanted, lambda number: packed.tensors[number].nbytes)
    for group in grouped(sent, lambda move: packed.tensors[move.unit].nbytes, TOGETHER_BYTES):
        here |= _send(team, group, packed.tensors, found, here)
    point("shard.loading")
    team.exchange.all_gather(b"")
    tensors = [here.get(number, tensor) for number, tensor in enumerate(packed.tensors)]
    whole = unpack(packed.skeleton, tensors)
    for (kind, name), part in tracked.spread.items():
        part.load_shares(whole[kind][name], part.plan(places(team)))


def _find(team: Team, checkpoint: Path | None) -> tuple[tuple[Path, Manifest] | None, set[int]]:
    """Return the checkpoint as this member sees it, and the ranks of those that see it. Collective."""
    own = _Seen()
    if team.rank == 0:
        assert checkpoint is not None
        own = _Seen(str(checkpoint.resolve()), files.read_manifest(checkpoint).crc32)
    named = msgspec.msgpack.decode(team.exchange.all_gather(msgspec.msgpack.encode(own))[0], type=_Seen)
    found = None
    try:
        manifest = files.read_manifest(Path(named.path))
        found = (Path(named.path), manifest) if manifest.crc32 == named.crc32 else None
    except CheckpointError:
        pass  # this member does not see it
    answers = team.exchange.all_gather(b"" if found is None else b"sees")
    return found, {rank for rank, answer in enumerate(answers) if answer}


def _wanted(team: Team, tracked: Tracked, packed: Packed) -> Holders:
    """Return by number of a tensor the members that are to have it; equal on all."""
    rank = {worker: number for number, worker in enumerate(team.worker_ids)}
    holders = {key: part.plan(places(team)) for key, part in tracked.spread.items()}
    return {
        number: tuple(sorted(rank[one] for one in holders[key][unit]))
        for number, key, unit in tracked.units_in(packed.paths)
    }


def _send(
    team: Team,
    group: Sequence[Move],
    tensors: Sequence[Tensor],
    found: tuple[Path, Manifest] | None,
    here: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """Send tensors to those that do not see the checkpoint; returns what this member gets. Collective.

    Args:
        tensors: of the checkpoint; meta tensors.
        here: those that this member has read.
    """
    missing = [move.unit for move in group if move.source == team.rank and move.unit not in here]
    read = read_tensors(*found, missing) if found is not None else {}
    got, parcels = dict[int, Tensor](), []
    for number, source, targets in group:
        tensor = tensors[number]
        if team.rank in targets:
            tensor = got[number] = torch.empty_like(tensor, device="cpu")
        elif team.rank == source:
            tensor = here[number] if number in here else read[number]
        parcels.append(Parcel(source, targets, tensor))
    team.exchange.deliver(parcels)
    return got
