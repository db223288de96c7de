"""The last checkpoint of a run whose optimizer states are shared out: all members that hold some write it together.

No step follows at once, so nothing is written in the background: the members agree on what is to be written, each
writes its part, and the first that sees the directory publishes them. When a member is lost meanwhile, the others write
the parts as they are given out among them, unless the parts of before are all on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import torch

from unisono.engine.checkpoint.saving import UNSEEN, Saver, Wish, WrittenPart
from unisono.engine.checkpoint.snapshot import Moment, Snapshot
from unisono.engine.checkpoint.writer import write_facts
from unisono.engine.exchange import Parcel
from unisono.engine.rounds.gathering import union
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.packing import grouped
from unisono.record.checkpoints import Stream, memory_at
from unisono.system.faults import point

__all__ = ["LENDING", "lend", "save_together"]

LENDING: Final = "lending"
"""The kind of the round in which states travel to a member that writes them."""

TOGETHER_BYTES = 16 << 20
"""Tensors up to this size together are sent at once."""


def save_together(rounds: Rounds, saver: Saver, moment: Callable[[], Moment]) -> None:
    """Write the last checkpoint, unless none is wanted; when this returns, it is on the disk. Collective.

    Args:
        moment: returns the boundary, with the members as they are now.

    Raises:
        CheckpointError: it could not be written, and the policy asks to end the run then.
    """
    wishes = {
        worker: msgspec.msgpack.decode(one, type=Wish)
        for worker, one in union(rounds, lambda: {_own_id(rounds): msgspec.msgpack.encode(saver.wish())}).items()
    }
    known = wishes.values()
    is_done = max(one.saved for one in known) == moment().position.total and not any(one.asked for one in known)
    reaching = {worker for worker, one in wishes.items() if one.reaches}
    if is_done or not any(one.wants for one in known):
        saver.settle(moment(), None)
    elif reaching:
        _write(rounds, saver, moment, reaching)
    elif any(one.is_left for one in known):  # they write this checkpoint, with the same content
        saver.settle(moment(), None)
    else:
        saver.settle(moment(), None, failure=UNSEEN)


def lend(rounds: Rounds, saver: Saver, snapshot: Snapshot | None, generation: int) -> None:
    """Bring what no writer of a snapshot holds to one that writes it. Collective.

    Args:
        snapshot: None: this member was behind at a loss, and takes part in what the others have begun.
        generation: in which the snapshot was taken. If a member is lost, another snapshot will be taken.
    """

    def trade() -> dict[str, bytes]:
        assert snapshot is not None
        file = _bring(rounds, snapshot)
        try:
            if file is not None:
                write_facts(snapshot.lent_path, file.close())
        except OSError as error:
            saver.note_lent(error)
        return {}

    union(rounds, trade=trade, generation=generation if snapshot is not None else None, kind=LENDING)


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


def _write(rounds: Rounds, saver: Saver, moment: Callable[[], Moment], reaching: Collection[str]) -> None:
    """Write all parts, and publish them. Collective."""
    whole = None
    while whole is None:
        parts = _decode(union(rounds, lambda: _write_own(rounds, saver, moment(), reaching)))
        if (own := _put_together(parts)) is not None and own.has_loans:
            trade = partial(_write_lent, rounds, saver, own)
            parts += _decode(union(rounds, trade=trade, generation=own.generation))
        if failed := [one for one in parts if one.error]:
            saver.settle(moment(), None, failure=failed[0].error, teller=failed[0].worker_id)
            return
        whole = _put_together(parts, with_loans=True)
    found = whole
    failures = union(rounds, lambda: _publish(rounds, saver, reaching, found))
    if b"" in failures.values():
        saver.settle(moment(), whole)
    else:
        teller, failure = next(iter(failures.items()))
        saver.settle(moment(), None, failure=failure.decode(), teller=teller)


def _put_together(parts: Sequence[WrittenPart], *, with_loans: bool = False) -> WrittenPart | None:
    """Return the parts of the first generation whose members have written all of them; None: there is no such one.

    Args:
        with_loans: also the part of the tensors that no writer holds.
    """
    for generation in sorted({one.generation for one in parts}):
        same = [one for one in parts if one.generation == generation]
        files = {name: facts for one in same for name, facts in one.parts.items()}
        missing = same[0].num_parts - len(files)
        if missing <= (same[0].has_loans and not with_loans):
            return msgspec.structs.replace(same[0], parts=files)
    return None


def _write_lent(rounds: Rounds, saver: Saver, own: WrittenPart) -> dict[str, bytes]:
    """Bring what no writer holds to one that writes it. Collective."""
    snapshot = saver.attempt(own.generation)
    file = _bring(rounds, snapshot)
    if file is None:
        return {}
    try:
        written = msgspec.structs.replace(own, parts={snapshot.lent_path.name: file.close()})
    except OSError as error:
        written = msgspec.structs.replace(own, parts={}, error=error.strerror or str(error), worker_id=_own_id(rounds))
    return {f"{own.generation} lent": msgspec.msgpack.encode(written)}


def _own_id(rounds: Rounds) -> str:
    return rounds.team.worker_ids[rounds.team.rank]


def _write_own(rounds: Rounds, saver: Saver, moment: Moment, reaching: Collection[str]) -> dict[str, bytes]:
    if any(one in reaching for one in moment.worker_ids):
        written = saver.write_part(moment, reaching)
    else:  # those that saw the directory are lost: all hear of it before they go on
        written = WrittenPart(moment.generation, 0, error=UNSEEN)
    return {f"{written.generation} {_own_id(rounds)}": msgspec.msgpack.encode(written)}


def _publish(rounds: Rounds, saver: Saver, reaching: Collection[str], whole: WrittenPart) -> dict[str, bytes]:
    failure = saver.publish(rounds.team.worker_ids, reaching, whole)
    return {_own_id(rounds): failure.encode()} if failure is not None else {}


def _decode(values: Mapping[str, bytes]) -> list[WrittenPart]:
    return [msgspec.msgpack.decode(one, type=WrittenPart) for one in values.values()]
