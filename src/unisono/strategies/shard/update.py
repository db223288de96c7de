"""The update of an optimizer whose states are shared out (`unisono.strategies.shard.sharding`), as rounds.

`UpdateRound`: each member updates the parameters that it owns; the first owner of each sends the new values to those
that do not own it. `StatesRound`: states move, because members were lost or have come. Both decide by what all members
know (the table of owners, a part of the optimizer's state), never by the members of the moment: a member that is in an
earlier round may see others than one that is ahead.

An update ends with an exchange in which each member says that it has all that it gets. A member that has passed it
knows that nobody needs anything more of this round but the words of that exchange, which it keeps (`Gathered`): so the
script may change parameters at once. Until then every new value stays where it is, and is sent again after a loss. New
values are never mixed with old ones in a computation: a member that has a part of them takes no part in the sum of
gradients before it has all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from unisono.core.errors import DivergenceError, PeerLost, StateLost
from unisono.core.holdings import Holders
from unisono.core.ownership import MemberPlace, Owners, living, owners, senders
from unisono.core.plan import Plan
from unisono.core.tree import Node
from unisono.engine.exchange import Parcel
from unisono.engine.loop.process_settings import give_back_freed_memory
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.members import Gathered, Members, Undivided
from unisono.engine.rounds.moving import MovingRound
from unisono.engine.rounds.routing import Routing
from unisono.engine.rounds.team import places
from unisono.engine.state.elsewhere import Elsewhere
from unisono.engine.state.packing import from_bytes, quick_digest, to_bytes
from unisono.engine.state.tracked import Tracked
from unisono.strategies.shard.hosting import Written, check_hosted, is_mapped, mapped, scratch
from unisono.strategies.shard.owner_routing import OwnedGradients
from unisono.strategies.shard.sharding import Outline, ShardedOptimizer, Shares
from unisono.system.faults import point

__all__ = ["StatesRound", "UpdateRound", "shared_updates"]


class _Having(msgspec.Struct, frozen=True):
    """What a member says before new values are sent again."""

    have: list[int] = []
    """The parameters of which it has the new values."""
    known: list[int] = []
    """The parameters that it has updated itself, and so has their new states, or that are known to have none."""


def state_lost(members: Members, shares: Shares, name: str, index: int, what: str) -> StateLost:
    """Return the error that nobody has something of a parameter any more."""
    table, copies = shares.owners, shares.copies
    had = " and ".join(table[index]) if table is not None and index < len(table) else "nobody"
    return StateLost(
        f"{what} of parameter {index} of {name} was held by {had} (unisono.shard with copies={copies}), and all of "
        f"them are lost: the run cannot continue from here. Resume from {members.newest()}; with more copies a run "
        "survives more simultaneous losses"
    )


class UpdateRound(Undivided):
    """One step() of a sharded optimizer.

    Args:
        name: of the tracked optimizer.
    """

    kind: Final = "update"

    def __init__(self, members: Members, shares: Shares, name: str, clock: Clock) -> None:
        super().__init__(members)
        assert shares.owners is not None
        self.members_then: list[MemberPlace] = []
        """The members that have finished the round, equal on all."""
        self._clock = clock
        self._shares = shares
        self._name = name
        self._known: set[int] = set()
        """What all members together know, as they have said last."""
        self._at_first: list[set[int]] | None = None
        """By rank: the new values that each member makes; None: members were lost, and say what they have."""
        self._owners = shares.owners
        self._parameters = shares.parameters()
        self._todo = shares.to_update()
        self._new: set[int] = set()  # parameters that have their new values here
        self._made: set[int] = set()  # those of them that this member has updated
        self._open: set[int] = set()  # parameters into which something was perhaps written, and not all
        self._has_begun = False
        self._changes: dict[int, Outline] = {}
        self._earlier: dict[int, Tensor] = {}
        """By parameter that was written over: its value before, where the change may travel instead of the value."""

    @property
    def title(self) -> str:
        return f"{self._name}.step()"

    def first_plan(self) -> Plan:
        self._at_first = self._having_at_first()  # no member has anything of this round yet
        return super().first_plan()

    def interrupt(self) -> Collection[Node]:
        self._clock.switch("waiting")
        self._at_first = None
        self._earlier = {}
        return super().interrupt()

    def compute(self, plan: Plan) -> Iterator[object]:
        """Update what this member owns; once, but for what has lost its owners meanwhile."""
        self._clock.switch("update")
        own = self._own(self._members.worker_ids[self._members.rank]) - self._new - self._open
        own = {index for index in own if not isinstance(self._parameters[index].grad, Elsewhere)}
        if own or not self._has_begun:
            self._has_begun = True  # a step() counts once, also where it has nothing to update
            self._update(own)
            self._new |= own
            self._made |= own
        point("shard.updated")
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        self._clock.switch("exchange")
        having, said = self._at_first, None
        if having is None:
            having, said = self._hear()
            if said is None:
                self._check_states(having)
        if said is None:
            first = {index: self._sender(index, having) for index in self._todo}
            self._deliver(having, first)
            point("shard.delivered")
            said = self._say(first)
        self._read(said)
        return Gathered(self._members, said)

    def finish(self) -> None:
        point("shard.committed")
        self._shares.note(self._changes)
        self._shares.stateless.update(index for index in self._todo if index not in self._shares.outlines)

    def _update(self, own: Collection[int]) -> None:
        """Give these parameters their new values."""
        self._keep_earlier(own)
        self._shares.update_own(own)

    @property
    def _sends_changes(self) -> bool:
        """Whether the changes of parameters may travel: after a loss, a part of a new value may be anywhere."""
        return self._at_first is not None and self._members.team.exchange.wants_earlier

    def _keep_earlier(self, own: Collection[int]) -> None:
        if self._sends_changes:
            self._earlier = {index: self._parameters[index].detach().clone() for index in own}

    def _before(self, index: int) -> Tensor | None:
        """Return what all members had before the round as the value of a parameter, where its change may travel."""
        return self._earlier.get(index, self._parameters[index].detach()) if self._sends_changes else None

    def _having_at_first(self) -> list[set[int]]:
        """Return which new values each member makes, by rank, where no member is lost."""
        return [self._own(worker_id) for worker_id in self._members.worker_ids]

    def _hear(self) -> tuple[list[set[int]], bytes | None]:
        """Return what each member has, by rank, and what all have said if some have finished the round. Collective."""
        own = _Having(sorted(self._new), sorted(self._made | self._shares.stateless))
        letters = self._members.letters(msgspec.msgpack.encode(own))
        if (said := next((letter.payload for letter in letters if letter.is_final), None)) is not None:
            return [], said
        heard = [msgspec.msgpack.decode(letter.payload, type=_Having) for letter in letters]
        self._known = {index for one in heard for index in one.known}
        return [set(one.have) for one in heard], None

    def _lost(self, index: int, what: str) -> StateLost:
        return state_lost(self._members, self._shares, self._name, index, what)

    def _check_states(self, having: Sequence[set[int]]) -> None:
        """Raise StateLost if a new value is here whose first state was with its owners only."""
        ids = self._members.worker_ids
        for index in self._todo:
            is_alone = index not in self._shares.outlines and not any(one in ids for one in self._owners[index])
            if is_alone and index not in self._known and any(index in have for have in having):
                raise self._lost(index, "the state")

    def _own(self, worker_id: str) -> set[int]:
        """Return the parameters that a member updates: what it owns, and what has no owner and no state."""
        ids = self._members.worker_ids
        return {
            index
            for index in self._todo
            if worker_id in self._owners[index]
            or (index not in self._shares.outlines and not any(one in ids for one in self._owners[index]))
        }

    def _sender(self, index: int, having: Sequence[set[int]]) -> int:
        """Return the rank of who sends a parameter: the first owner that is a member, else any that has it."""
        ids = self._members.worker_ids
        first = [ids.index(one) for one in self._owners[index] if one in ids]
        ranks: list[int] = [*first, *range(len(ids))]
        for rank in ranks:
            if index in having[rank]:
                return rank
        raise self._lost(index, "the state" if index in self._shares.outlines else "the new value")

    def _deliver(self, having: Sequence[set[int]], first: Mapping[int, int]) -> None:
        """Send new values to those that lack them; ``first`` is the rank of who sends each parameter."""
        parcels = []
        for index in self._todo:
            has = [index in have for have in having]
            for source, targets in senders(first[index], has, self._members.team.hosts):
                parcels.append(Parcel(source, targets, self._parameters[index].detach(), self._before(index)))
        self._open = set(self._todo) - self._new
        self._members.deliver(parcels)
        self._new.update(self._todo)
        self._earlier = {}

    def _say(self, first: Mapping[int, int]) -> bytes:
        """Say that this member has all, and how the states that it answers for have changed. Collective."""
        rank = self._members.rank
        own = [index for index in self._todo if first[index] == rank]
        mine = {"changes": self._shares.changes(own), "options": quick_digest(self._shares.options())}
        heard = [from_bytes(payload) for payload in self._members.gather(to_bytes(mine, self._name))]
        if len({one["options"] for one in heard}) > 1:
            raise DivergenceError(
                f"after {self._name}.step() its options (param_groups) are not the same on all workers: the optimizer "
                "computes them from all of its parameters, so its states cannot be distributed. Use it without "
                "unisono.shard"
            )
        changes = {index: outline for one in heard for index, outline in one["changes"].items()}
        return to_bytes({"changes": changes, "members": [tuple(one) for one in places(self._members.team)]})

    def _read(self, said: bytes) -> None:
        heard: dict[str, Any] = from_bytes(said)
        self._changes = heard["changes"]
        self.members_then = [MemberPlace(*one) for one in heard["members"]]


class HostRound(UpdateRound):
    """One step() where each host has one copy of the parameters (`unisono.strategies.shard.hosting`).

    Until the round is over, every member sees the old values: new ones lie where nobody reads. On each host one member
    has them in memory that the others map: the first of its owners there that has the value, or one that gets it from
    another host. A member that is alone on its host writes where the parameters are.

    Args:
        is_update: False: the values stay what they are, and come to where each host has them once.
    """

    def __init__(self, members: Members, shares: Shares, name: str, clock: Clock, *, is_update: bool = True) -> None:
        super().__init__(members, shares, name, clock)
        assert shares.memory is not None
        self._memory = shares.memory
        self._is_update = is_update
        self._values: dict[int, Tensor] = {}
        """By parameter: the new value, wherever it is; none for a parameter that has it."""
        self._mapped: dict[int, Tensor] = {}
        """By parameter: the new value, as a writer of this host has it."""
        self._places: dict[int, Tensor] | None = None
        """By parameter of which this member is the writer: where the new value goes; None: that is not decided."""
        if not is_update:
            self._todo = list(range(len(self._parameters)))
            self._new = set(self._todo)
            self._values = {index: self._parameters[index].detach() for index in self._todo}

    @property
    def title(self) -> str:
        return super().title if self._is_update else f"the parameters of {self._name} coming into one copy a host"

    def finish(self) -> None:
        for index in self._todo:
            if (value := self._mapped.get(index, self._values.get(index))) is not None:
                self._parameters[index].data = value
        self._values, self._mapped, self._places = {}, {}, None
        self._memory.commit(self._todo)
        if self._is_update:
            super().finish()
        else:
            point("shard.committed")
            self._shares.together = tuple(one.worker_id for one in self.members_then)
            give_back_freed_memory()  # the parameters that were this worker's own

    def interrupt(self) -> Collection[Node]:
        self._places = None
        return super().interrupt()

    def compute(self, plan: Plan) -> Iterator[object]:
        if self._is_update:
            return super().compute(plan)
        point("shard.updated")
        return iter(())

    @property
    def _sends_changes(self) -> bool:
        return self._is_update and super()._sends_changes

    def _having_at_first(self) -> list[set[int]]:
        return super()._having_at_first() if self._is_update else [set(self._todo) for _ in range(self._members.size)]

    def _check_states(self, having: Sequence[set[int]]) -> None:
        if self._is_update:
            super()._check_states(having)

    def _update(self, own: Collection[int]) -> None:
        parameters, is_alone = self._parameters, self._is_alone
        if is_alone:  # others write where nobody reads
            self._keep_earlier(own)
        places = self._decide_places(self._at_first) if self._at_first is not None else {}
        before = {index: parameters[index].data for index in own}
        for index, value in before.items():
            if (place := places.get(index)) is not None:
                parameters[index].data = place.copy_(value)
            elif not is_alone:
                parameters[index].data = scratch(value)
            elif is_mapped(value):
                parameters[index].data = value.clone()
        try:
            self._shares.update_own(own)
        finally:
            for index, value in before.items() if not is_alone else ():
                self._values[index], parameters[index].data = parameters[index].data, value

    @property
    def _hosts(self) -> dict[str, list[int]]:
        """The ranks of the members, by host."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self._members.team.hosts):
            found.setdefault(host, []).append(rank)
        return found

    @property
    def _near(self) -> list[int]:
        """The ranks of the members of this host."""
        return self._hosts[self._members.team.hosts[self._members.rank]]

    @property
    def _is_alone(self) -> bool:
        return len(self._near) == 1

    def _writer(self, index: int, ranks: Sequence[int], having: Sequence[set[int]]) -> int:
        """Return who has a new value in memory for the members of a host: one that has the value, if there is one.

        Args:
            ranks: of the host.
        """
        ids, turn = self._members.worker_ids, index % len(ranks)
        owning = [rank for rank in (ids.index(one) for one in self._owners[index] if one in ids) if rank in ranks]
        in_order = [*owning, *ranks[turn:], *ranks[:turn]]
        return next((rank for rank in in_order if index in having[rank]), in_order[0])

    def _decide_places(self, having: Sequence[set[int]]) -> dict[int, Tensor]:
        """Return the places of the parameters of which this member is the writer, until a member is lost."""
        if self._places is None:
            near, rank = self._near, self._members.rank
            own = [index for index in self._todo if self._writer(index, near, having) == rank]
            is_shared = len(near) > 1
            self._places = self._memory.places(self._parameters, own, anew=not self._is_update) if is_shared else {}
        return self._places

    def _deliver(self, having: Sequence[set[int]], first: Mapping[int, int]) -> None:
        places, rank = self._decide_places(having), self._members.rank
        for index, place in places.items():
            if (value := self._values.get(index)) is not None and value.data_ptr() != place.data_ptr():
                place.copy_(value)
        self._values |= {index: places[index] for index in places if index in self._values}
        hosts, parcels, coming = self._hosts.values(), [], []
        for index in self._todo:
            targets = [
                self._writer(index, ranks, having)
                for ranks in hosts
                if not any(index in having[other] for other in ranks)
            ]
            if not targets:
                continue
            tensor = self._values.get(index, self._parameters[index].detach())
            if rank in targets:
                coming.append(index)
                tensor = places.get(index, tensor)
            parcels.append(Parcel(first[index], tuple(sorted(targets)), tensor, self._before(index)))
        self._open = set(coming) if self._is_alone else set()
        self._members.deliver(parcels)
        self._earlier = {}
        self._values |= {index: places[index] for index in coming if index in places}
        self._map(list(places))
        self._new.update(self._todo)

    def _map(self, own: Collection[int]) -> None:
        """Say what this member has written, and map what the members of its host have. Collective."""
        said = self._members.gather(msgspec.msgpack.encode(self._memory.written(own)))
        if self._is_alone:
            return
        try:
            for rank in self._near:
                for written in msgspec.msgpack.decode(said[rank], type=list[Written]):
                    self._mapped |= mapped(self._parameters, written)
        except FileNotFoundError as error:
            raise PeerLost(f"{self._members.worker_ids[rank]} has left, and its parameters with it: {error}") from error
        self._values |= self._mapped


class StatesRound(MovingRound):
    """States move to those that are to own them from now on."""

    def __init__(self, members: Members, shares: Shares, name: str, clock: Clock) -> None:
        super().__init__(members, shares, f"the states of {name} moving between workers", clock)
        self._shares = shares
        self._name = name

    def choose(self, now: Holders, staying: Sequence[int]) -> Mapping[int, tuple[str, ...]]:
        shares, ids = self._shares, self._members.worker_ids
        number, table = len(shares.parameters()), shares.owners or ()
        living_owners = living((*table, *((),) * (number - len(table))), ids)
        held = tuple(
            tuple(ids[rank] for rank in now.get(index, ())) if index in shares.outlines else living_owners[index]
            for index in range(number)
        )
        for index, outline in shares.outlines.items():
            if not held[index] and any(part[0] == "tensor" for part in outline.values()):
                raise state_lost(self._members, shares, self._name, index, "the state")
        everyone = places(self._members.team)
        found = owners(shares.sizes(), [everyone[rank] for rank in staying], shares.copies, held)
        return dict(enumerate(found))

    def finish(self) -> None:
        own_id = self._members.worker_ids[self._members.rank]
        own = {index for index, each in self.wanted.items() if own_id in each}
        self._shares.owners = tuple(self.wanted.values())
        for index in own.intersection(self._shares.outlines).difference(self._shares.here()):
            self._shares.put(index, self._shares.made(index))  # plain values, which all members know
        self._shares.keep(own)


@contextmanager
def shared_updates(rounds: Rounds, tracked: Tracked, clock: Clock) -> Iterator[None]:
    """Return a context in which the steps of sharded optimizers are rounds. Collective where one begins to be shared
    out.

    Args:
        clock: of the loop.
    """
    updates: list[_Update] = []
    sharded = {name: one for name, one in tracked.optimizers.items() if isinstance(one, ShardedOptimizer)}
    for name, optimizer in sharded.items():
        if optimizer._shares.memory is not None:
            check_hosted(name, optimizer._shares.parameters(), _others(optimizer, tracked))
    try:
        for name, optimizer in sharded.items():
            update = _Update(rounds, optimizer._shares, name, clock)
            optimizer._shares.bind(update, rounds)
            update.settle()
            updates.append(update)
        if updates:
            rounds.before_departure = partial(_move_all, updates)
        if any(one._shares.to_owners for one in sharded.values()):
            rounds.routing = OwnedGradients(list(tracked.optimizers.values()))
        yield
    finally:
        rounds.before_departure = None
        rounds.routing = Routing()
        for optimizer in sharded.values():
            optimizer._shares.unbind()


def _others(optimizer: ShardedOptimizer, tracked: Tracked) -> dict[str, Tensor]:
    """Return the tracked parameters and buffers that an optimizer does not update, by name."""
    own = set(map(id, optimizer._shares.parameters()))
    found: list[tuple[str, Tensor]] = [*tracked.parameters()]
    for name, module in tracked.modules.items():
        found += [(f"{name}.{path}", one) for path, one in module.named_buffers()]
    return {name: one for name, one in found if id(one) not in own}


def _move_all(updates: Sequence[_Update]) -> None:
    for update in updates:
        update.move()


class _Update:
    """The updates of one optimizer, in a training loop."""

    def __init__(self, rounds: Rounds, shares: Shares, name: str, clock: Clock) -> None:
        self._rounds = rounds
        self._shares = shares
        self._clock = clock
        self._what = (rounds.members, shares, name, clock)
        self._good: tuple[list[int], list[MemberPlace], Owners] | None = None
        """Sizes, members and owners that are as they should be."""

    def __call__(self) -> None:
        """Make one step; then states move if members were lost or have come. Collective."""
        self.settle()
        shares = self._shares
        round_ = UpdateRound(*self._what) if shares.memory is None else HostRound(*self._what)
        self._play(round_)
        assert shares.owners is not None
        now = (shares.sizes(), round_.members_then, shares.owners)
        if now != self._good:
            if owners(shares.sizes(), round_.members_then, shares.copies, shares.owners) != shares.owners:
                self.move()
            else:
                if not {one.worker_id for one in round_.members_then}.issubset(shares.together):
                    self._share()  # newcomers have copies of their own
                self._good = now

    def settle(self) -> None:
        """Give each parameter its owners, where some have none. Collective if so."""
        if not self._shares.is_settled:
            self.move()

    def move(self) -> None:
        """Move states to where they are to be, with the members that there are and those that leave. Collective."""
        self._play(StatesRound(*self._what))
        self._share()

    def _share(self) -> None:
        """Let each host have one copy of the parameters, where it is to be so. Collective."""
        if self._shares.memory is not None:
            self._play(HostRound(*self._what, is_update=False))

    def _play(self, round_: UpdateRound | StatesRound) -> None:
        with torch.no_grad():
            for _ in self._rounds.play(round_):
                pass
        self._clock.switch("update")  # what follows is the script's
