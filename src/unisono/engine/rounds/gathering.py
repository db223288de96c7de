"""Rounds in which the members only say something: what each says, and one result that all of them end with.

A member that has seen the commit gives the result to those that repeat the round without a member that was lost. So
what follows from it is the same on all members, also where it follows from the words of the lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec
import torch.distributed as dist
from torch import Tensor

from unisono.core.plan import Plan
from unisono.core.tree import Node, leaf
from unisono.engine.exchange.script_group import ScriptGroup
from unisono.engine.rounds.life import CHECKPOINT, Rounds
from unisono.engine.rounds.members import Gathered, Members, Undivided
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.engine.state.sums import Sums, Total
from unisono.system.faults import point

__all__ = ["BlockRound", "Gather", "GroupRound", "SumsRound", "TalkRound", "Together", "together", "union"]


class Gather(Undivided):
    """Each member says something, and all end with what all have said. Other rounds override `own` and `merge`.

    Args:
        title: equal on all members.
        value: returns what this member says.
    """

    def __init__(self, members: Members, title: str, kind: str, value: Callable[[], bytes] = bytes) -> None:
        super().__init__(members)
        self.title = title
        self.kind = kind
        self._value = value
        self.result = b""
        """Once the round is over; the same on all members."""

    def own(self) -> bytes:
        """Return what this member says; called again after a loss, when the member may have another rank. Local."""
        return self._value()

    def merge(self, said: Mapping[str, bytes]) -> bytes:
        """Return the result, from what the members have said, by worker id in the order of the ranks. Local."""
        return msgspec.msgpack.encode(said)

    @property
    def by_worker(self) -> dict[str, bytes]:
        """What the members have said, by worker id in the order of the ranks that they had. After the round."""
        return msgspec.msgpack.decode(self.result, type=dict[str, bytes])

    def compute(self, plan: Plan) -> Iterator[object]:
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        letters = self._members.letters(self.own())
        final = next((letter.payload for letter in letters if letter.is_final), None)
        if final is None:
            payloads = (letter.payload for letter in letters)
            final = self.merge(dict(zip(self._members.worker_ids, payloads, strict=True)))
        self.result = final
        return Gathered(self._members, self.result)


class TalkRound(Gather):
    """What the members say to each other between two steps: ``run.barrier``, ``run.broadcast``, ``run.all_gather``.

    Args:
        title: of the call.
        value: returns what this member says.
    """

    def __init__(self, rounds: Rounds, title: str, value: Callable[[], bytes] = bytes, kind: str = "talk") -> None:
        super().__init__(rounds.members, title, kind, value)

    @property
    def values(self) -> list[bytes]:
        """Of all members, by rank, once the round is over."""
        return list(self.by_worker.values())

    def compute(self, plan: Plan) -> Iterator[object]:
        point("in_talk")
        yield from ()

    def finish(self) -> None:
        point("talked")


class BlockRound(TalkRound):
    """A block of the script that one member runs before the others; if that member is lost meanwhile, the next one.

    `compute` yields once on the member whose turn it is, and goes on when the member has run its block.
    """

    def __init__(self, rounds: Rounds, title: str) -> None:
        super().__init__(rounds, title)
        self._has_run = False

    def compute(self, plan: Plan) -> Iterator[object]:
        point("in_talk")
        if plan.ranges[self._members.rank] and not self._has_run:
            yield None
            self._has_run = True

    def interrupt(self) -> Collection[Node]:
        return [leaf(0, self.num_leaves)] if self._has_run else []


class GroupRound(TalkRound):
    """Connects the members of the current generation by a group of ``torch.distributed``.

    All members get the group of the same generation. If a member is lost before this one has its group, and another
    member has got it, this one gets a group that is over: so the collectives raise on all of them, and all call again.
    """

    def __init__(self, rounds: Rounds, title: str) -> None:
        team = rounds.team
        super().__init__(rounds, title, lambda: team.generation.to_bytes(8, "little"))
        self.group: dist.ProcessGroup | None = None
        self._team = team

    def combine(self, plan: Plan) -> Gathered:
        gathered = super().combine(plan)
        if int.from_bytes(self.values[0], "little") == self._team.generation:
            with self._team.waiting():
                self.group = self._team.process_group()
        else:
            self.group = ScriptGroup(self._team.rank, self._team.size)
        return gathered


class Together(Gather):
    """Work that counts once the first member has done it, e.g. a checkpoint that all members wait for.

    When that member is lost meanwhile, the next one does it.

    Args:
        work: called on all members, perhaps more than once; it may do nothing on all but the first.
        payload: what this member says.
    """

    def __init__(self, members: Members, work: Callable[[], None], payload: bytes = b"") -> None:
        super().__init__(members, "a checkpoint or the end of the run", CHECKPOINT, lambda: payload)
        self._work = work

    def compute(self, plan: Plan) -> Iterator[object]:
        with self._members.waiting():
            self._work()
        yield from ()


def together(rounds: Rounds, work: Callable[[], None], payload: bytes = b"") -> dict[str, bytes]:
    """Do something that counts once the first member has done it; the others wait for that. Collective.

    Returns:
        The payloads by worker id, in the order of the ranks.
    """
    round_ = Together(rounds.members, work, payload)
    for _ in rounds.play(round_):
        pass
    return round_.by_worker


class _Union(Gather):
    """Each member brings the values that it has made, by name."""

    def __init__(
        self,
        members: Members,
        work: Callable[[], Mapping[str, bytes]],
        trade: Callable[[], Mapping[str, bytes]],
        generation: int | None,
        kind: str,
    ) -> None:
        super().__init__(members, "a checkpoint or the end of the run", kind)
        self._work = work
        self._trade = trade
        self._generation = generation
        self._values: dict[str, bytes] = {}

    def compute(self, plan: Plan) -> Iterator[object]:
        with self._members.waiting():
            self._values = {**self._work(), **self._values}
        yield from ()

    def own(self) -> bytes:
        if self._members.team.generation == self._generation:
            with self._members.waiting():
                self._values = {**self._trade(), **self._values}
        return msgspec.msgpack.encode(self._values)

    def merge(self, said: Mapping[str, bytes]) -> bytes:
        brought = (msgspec.msgpack.decode(each, type=dict[str, bytes]) for each in said.values())
        return msgspec.msgpack.encode(dict(sorted((name, value) for each in brought for name, value in each.items())))


def union(
    rounds: Rounds,
    work: Callable[[], Mapping[str, bytes]] = dict,
    *,
    trade: Callable[[], Mapping[str, bytes]] = dict,
    generation: int | None = None,
    kind: str = CHECKPOINT,
) -> dict[str, bytes]:
    """Return the values that all members bring, by name, the same on all of them. Collective.

    Args:
        work: returns those of this member; names of different members differ. Called again when a member was lost
            meanwhile: what it has returned for a name before stays as it was.
        trade: returns more of them, and may use the exchange: collective, and called on all members or on none.
        generation: the one in which ``trade`` is called, equal on all members. None, or when a member was lost
            meanwhile: it is not called.
        kind: of the round.
    """
    round_ = _Union(rounds.members, work, trade, generation, kind)
    for _ in rounds.play(round_):
        pass
    return round_.by_worker


class SumsRound(Gather):
    """The sums of a step whose names are new, by micro-batch: makes the names known to all members.

    A sum of ``step.add`` travels in the tail of the slot, for which its name and shape must be known before the step.
    In the step that brings a new name, each member keeps the values of its own micro-batches, and after the commit of
    the gradients the members exchange these. The values of a member that is lost in between are computed again.

    Args:
        have: by leaf, the values of the micro-batches that this member has computed in the step.
        compute_again: yields a micro-batch to the script, and puts its values into ``have``.

    Attributes:
        totals: of the step, by name, once the round is over.
    """

    def __init__(
        self,
        members: Members,
        sums: Sums,
        num_leaves: int,
        have: dict[int, dict[str, Tensor]],
        compute_again: Callable[[int], Iterator[object]],
    ) -> None:
        super().__init__(members, "the sums of a step", "sums", lambda: to_bytes(have))
        self.num_leaves = num_leaves
        self.totals: dict[str, Total] = {}
        self._sums = sums
        self._have = have
        self._compute_again = compute_again
        self._is_first = False

    def first_plan(self) -> Plan:
        self._is_first = True  # together the members have the values of all micro-batches
        return super().first_plan()

    def compute(self, plan: Plan) -> Iterator[object]:
        todo = () if self._is_first else plan.ranges[self._members.rank]
        for index in todo:
            if index not in self._have:
                yield from self._compute_again(index)
        point("in_sums")

    def merge(self, said: Mapping[str, bytes]) -> bytes:
        for values in said.values():
            self._have.update(from_bytes(values))
        return to_bytes(self._have)

    def interrupt(self) -> Collection[Node]:
        self._is_first = False
        return [leaf(index, self.num_leaves) for index in self._have]

    def finish(self) -> None:
        known = from_bytes(self.result)
        self.totals = self._sums.learn({index: known[index] for index in range(self.num_leaves)})
