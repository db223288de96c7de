"""What a checkpoint needs of several members: the last one begins when all have said what they know, and what the
members that write a checkpoint do not hold is lent to one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import torch

from unisono.engine.checkpoint.saving import Saver, Wish
from unisono.engine.checkpoint.snapshot import Moment, Snapshot
from unisono.engine.checkpoint.writer import write_facts
from unisono.engine.exchange import Parcel
from unisono.engine.rounds.gathering import union
from unisono.engine.rounds.life import CHECKPOINT, Rounds
from unisono.engine.state.packing import grouped
from unisono.record.checkpoint_files import Stream, memory_at
from unisono.system.faults import point

__all__ = ["LENDING", "begin_last", "lend"]

LENDING: Final = "lending"
"""The kind of the round in which states travel to a member that writes them."""

TOGETHER_BYTES = 16 << 20
"""Tensors up to this size together are sent at once."""


def begin_last(rounds: Rounds, saver: Saver, moment: Callable[[], Moment]) -> bool:
    """Begin the last checkpoint, unless none is wanted: from then on one member writes it by itself. Collective.

    Args:
        moment: returns the boundary, with the members as they are now.

    Returns:
        Whether one is being written; the same on all members.

    Raises:
        CheckpointError: it could not be written, and the policy asks to end the run then.
    """
    team = rounds.team
    while True:
        said = union(rounds, lambda: {_own_id(rounds): msgspec.msgpack.encode(saver.wish(team.generation))})
        wishes = {worker: msgspec.msgpack.decode(one, type=Wish) for worker, one in said.items()}
        with team.waiting():  # for a disk, which is nobody's fault
            if not saver.begin_last(moment(), wishes):
                return False
        generations = {one.generation for one in wishes.values()}
        generation = generations.pop() if len(generations) == 1 else None
        if not rounds.tracked.is_spread or lend(rounds, saver, saver.snapshot, generation, kind=CHECKPOINT):
            saver.publish_last()
            return True


def lend(
    rounds: Rounds, saver: Saver, snapshot: Snapshot | None, generation: int | None, *, kind: str = LENDING
) -> bool:
    """Bring what no writer of a snapshot holds to one that writes it. Collective.

    Args:
        snapshot: None: this member was behind at a loss, and takes part in what the others have begun.
        generation: in which the snapshot was taken. If a member is lost, another snapshot will be taken.

    Returns:
        Whether the writer has got everything; the same on all members.
    """

    def trade() -> dict[str, bytes]:
        assert snapshot is not None
        file = _bring(rounds, snapshot)
        try:
            if file is not None:
                write_facts(snapshot.lent_path, file.close())
        except OSError as error:
            saver.note_lent(error)
        return {"lent": b""} if snapshot.part is not None else {}

    return bool(union(rounds, trade=trade, generation=generation if snapshot is not None else None, kind=kind))


def _bring(rounds: Rounds, snapshot: Snapshot) -> Stream | None:
    """Send tensors to a member that writes them, a few at a time, so that no worker has to hold them all. Collective.

    Returns:
        The file, on that member.

    Raises:
        PeerLost, DeadlineExceeded: a member was lost.
    """
    team = rounds.team
    rank = {worker: number for number, worker in enumerate(team.worker_ids)}
    own, file = _own_id(rounds), None
    for group in grouped(snapshot.loans, lambda loan: loan.tensor.nbytes, TOGETHER_BYTES):
        point("shard.in_lending")
        tensors = [_made(one.tensor) if one.target == own else one.tensor for one in group]
        team.exchange.deliver(
            [Parcel(rank[one.source], (rank[one.target],), tensor) for one, tensor in zip(group, tensors, strict=True)]
        )
        if group[0].target == own:
            file = snapshot.receive() if file is None else file
            for tensor in tensors:
                if tensor.nbytes:
                    file.write(memory_at(tensor.data_ptr(), tensor.nbytes, tensor))
    return file


def _made(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor as a file has it: row by row, however it lies on the member that holds it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _own_id(rounds: Rounds) -> str:
    return rounds.team.worker_ids[rounds.team.rank]
