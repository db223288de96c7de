"""Comparison of the workers: all of them must hold, and compute, the same bits.

With the sums of a step every member sends digests of its state and of micro-batches that two members have computed
(`unisono.core.rehearsals` has the reasons and the steps). All members see the same digests after the commit, before
anything is updated, so all raise the same error. Only then do they exchange the details of their states or
gradients, to name the first difference.

Of members that differ the newcomers are sent away: those that are on trial, and of two of unequal arithmetic (another
processor, another version of torch) the newer one. The others go on. Otherwise all raise the same error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import nn

from unisono.core.cursor import seed_of
from unisono.core.divergence import OUT_OF_STEP, Facts, causes, parting_words
from unisono.core.errors import DivergenceError
from unisono.core.plan import Plan
from unisono.core.rehearsals import (
    Odd,
    Twice,
    digest_of,
    is_compared,
    is_rehearsed,
    key_of,
    leaf_that_differs,
    minority,
    odd_newcomers,
    odd_ones,
    rehearsal,
)
from unisono.core.telemetry import Compared
from unisono.core.words import listed
from unisono.engine.microbatch.folding import Fingerprint
from unisono.engine.rounds import Dispute
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import LOST
from unisono.engine.state.packing import described, quick_digest
from unisono.engine.state.tracked import Tracked

__all__ = [
    "COPIES_DIFFER",
    "Agreement",
    "Digests",
    "check_digests",
    "compiled_by",
    "digest_of_objects",
    "has_minority",
    "held_by_all",
    "odd_in_objects",
]

COPIES_DIFFER = (
    "{first} and {second} hold copies of {what} that differ. Both computed them from the same gradients with the same "
    "arithmetic, so one of the machines computes or stores wrong values: its memory, processor or GPU is probably "
    "faulty. Resume without that machine, from an earlier checkpoint; the journal says what ran where"
)


class Digests(msgspec.Struct, frozen=True):
    """Digests of the objects that a member tracks."""

    arithmetic: int
    objects: dict[str, str]
    """By name; empty where there is no other member to compare with."""
    held: dict[str, dict[int, int]] = {}
    """By sharded optimizer, the digests of the states that the member holds, by the numbers of their tensors."""


class _Details(msgspec.Struct, frozen=True):
    """Details that a member sends when digests have differed."""

    state: dict[str, str] = {}
    """Every value of the state by its path."""
    leaves: list[Fingerprint] = []
    compiled: str = ""


class Agreement:
    """This member's part in the comparisons of one ``run.steps``.

    Args:
        rehearses: compute some micro-batches twice; otherwise only states are compared.
        last_step: the number of the step, within ``run.steps``, that is checked as the last one; None: there is none.
        lag: by so many steps the update of a gradient comes later than the gradient.
        phase: calls of ``run.steps`` before this one.
    """

    def __init__(
        self,
        rounds: Rounds,
        tracked: Tracked,
        *,
        rehearses: bool,
        last_step: int | None,
        lag: int = 0,
        phase: int = 0,
    ) -> None:
        self.unit = "micro-batch"
        """Of a rehearsal, for errors."""
        self.dispute: Dispute | None = None
        """What this member remembers of a step in which members have computed different values; None: they have not."""
        self._members = rounds.members
        self._judge = rounds.judge
        self._tracked = tracked
        self._rehearses = rehearses
        self._rehearses_alone = rehearses and _is_recurrent(tracked)
        self._last_step = last_step
        self._step, self._turn = -1, 0
        self._digest: int | None = None
        self._copies: tuple[int, int] | None = None  # (generation, digest)
        self._is_rehearsed = False
        self._own: list[Fingerprint] = []
        self._other: list[Fingerprint] = []
        self._has_warned = False
        self._lag = lag
        self._phase = phase

    def start_step(self, number: int, total: int) -> None:
        """Decide whether a step is compared and rehearsed, and take the digest of the state if it is compared.

        Args:
            number: of the step within ``run.steps``.
            total: steps of the run that are done.
        """
        self.pass_over(total)
        is_last = number == self._last_step
        is_team = self._members.size > 1
        is_first = self._members.balancing.is_first_of_generation
        rehearses = self._rehearses if is_team else self._rehearses_alone
        has_newcomers = bool(self.on_trial(total))
        self._is_rehearsed = rehearses and is_rehearsed(
            total, alone=not is_team, is_first_of_generation=is_first or has_newcomers, is_last=is_last
        )
        if is_team and (self._is_rehearsed or has_newcomers or is_compared(total, is_last=is_last)):
            self._digest = quick_digest(self._tracked.compared())
            if self._tracked.sharded:
                own_id = self._members.worker_ids[self._members.rank]
                self._copies = (self._members.team.generation, self._tracked.balance_of_copies(own_id))

    def on_trial(self, total: int) -> frozenset[int]:
        """Return the ranks of the newcomers of which nothing is summed at a step of the run; the same on all. Local."""
        return self._members.on_trial(total, self._lag)

    def compared(self, plan: Plan, turn: int) -> Twice:
        """Return this member's part in the comparison of micro-batches in this step: its rehearsal, or what the
        tap that settles differences has chosen.

        Args:
            turn: pass over the global batch.
        """
        self._turn = turn
        if self._is_rehearsed:
            return rehearsal(plan, self._members.rank, self._step, self.on_trial(self._step))
        return self._judge.twice(plan, self._step, turn)

    def expected(self, number: int, total: int, plan: Plan) -> Sequence[int]:
        """Return the micro-batches of another member that this one will compute in a coming step, to fetch them ahead.

        Args:
            number: of the step within ``run.steps``.
            total: its number in the run.
            plan: the probable plan of that step.
        """
        is_team, is_last = self._members.size > 1, number == self._last_step
        rehearses = self._rehearses if is_team else self._rehearses_alone
        if rehearses and is_rehearsed(total, alone=not is_team, is_last=is_last):
            return rehearsal(plan, self._members.rank, total).other
        return self._judge.twice(plan, total, 0, is_forecast=True).other

    def pass_over(self, total: int) -> None:
        """Compare nothing in a step that is summed after a loss.

        Args:
            total: its number in the run.
        """
        self._digest = self._copies = self.dispute = None
        self._own, self._other = [], []
        self._step, self._is_rehearsed = total, False

    @property
    def may_be_disputed(self) -> bool:
        """Whether it may be found out, after this step is summed, that a member is wrong. Local, and equal on all."""
        compares = self._is_rehearsed or self._digest is not None or self._judge.has_twice(self._step, self._turn)
        return self._judge.settles and compares

    @property
    def rehearses(self) -> bool:
        """Whether members compute a micro-batch of another one as well in this step."""
        return self._is_rehearsed

    @property
    def is_rehearsed(self) -> bool:
        """Whether a rehearsal has left a fingerprint of a micro-batch of this step."""
        return self._is_rehearsed and bool(self._own)

    @property
    def own(self) -> Fingerprint | None:
        """The micro-batch of this step that this member has computed and another one computes as well."""
        return self._own[0] if self._own else None

    def note_own(self, fingerprint: Fingerprint) -> None:
        """Keep the fingerprint of this member's micro-batch that another one computes as well."""
        self._own.append(fingerprint)

    def note_other(self, fingerprint: Fingerprint) -> None:
        """Keep the fingerprint of another member's micro-batch."""
        self._other.append(fingerprint)

    def says(self) -> Compared:
        """Return what this member has to compare in this step."""
        found: dict[str, int] = {"arithmetic": self._members.team.arithmetic, "part": self._members.team.part}
        if self._digest is not None:
            found |= {"compared_step": self._step, "state_digest": self._digest}
        if self._copies is not None and self._copies[0] == self._members.team.generation:
            # A member that was lost since then would be missing in the sum.
            found |= {"copies_generation": self._copies[0], "copies_digest": self._copies[1]}
        for name, computed in (("own", self._own), ("other", self._other)):
            if computed:
                key = key_of([one.leaf for one in computed])
                found |= {f"{name}_leaf": key, f"{name}_digest": digest_of([one.digest for one in computed])}
        return Compared(**found)

    def differs(self, said: Mapping[str, Compared]) -> bool:
        """Return whether the members have computed different values, so that it will be found out who is wrong. Local,
        and the same on all members. False where no tap settles differences.

        Args:
            said: by worker, of those that have summed the step.
        """
        return self._judge.differ(self._without_odd(said))

    def is_in_dispute(self, said: Mapping[str, Compared], *, is_disputed: bool = False) -> bool:
        """Return whether there is a `dispute`, by what members have said. Local, and the same on all members. There is
        none where no tap settles differences.

        Args:
            said: by worker, of those that have summed the step.
            is_disputed: other members have begun to find out who is wrong.
        """
        if not self._judge.settles:
            return False
        if len({each.arithmetic for each in said.values()}) == 1:
            is_disputed |= self._have_copies_that_differ(list(said.values()))
        if self._judge.compare(self._without_odd(said), self._step, self._turn, is_disputed=is_disputed):
            self.dispute = Dispute({one.leaf: one.by_place for one in (*self._own, *self._other)}, self._digest)
        return self.dispute is not None

    def check(self, said: Mapping[str, Compared], *, is_disputed: bool = False) -> bool:
        """Compare the digests that all members have sent with the sums of the step. Collective where some differ.

        Args:
            said: by worker, in the order of the ranks.
            is_disputed: other members have begun to find out who is wrong.

        Returns:
            Whether the sums count; False: there is a `dispute`.

        Raises:
            DivergenceError: members have other bits; or this one alone, a newcomer without which the others go on.
        """
        if self._members.size == 1:
            self._check_alone()
        if self.is_in_dispute(said, is_disputed=is_disputed):
            return False
        if self._digest is not None:
            odd = self._odd(said)
            self._compare(list(said.values()), [rank for rank, one in enumerate(said) if one not in odd])
            if odd:
                self._send_away(said, odd)
            self._judge.agreed(self._step, self._lag)
        return True

    def _compare(self, said: Sequence[Compared], ranks: Sequence[int]) -> None:
        """Compare what these members have said."""
        compared = [rank for rank in ranks if said[rank].compared_step == self._step]
        states = {rank: said[rank].state_digest for rank in compared}
        if len(set(states.values())) > 1:
            self._states_differ(said, states)
        if self._have_copies_that_differ(said):
            self._copies_differ(said)
        for owner in compared:
            for helper in compared:
                if helper != owner and leaf_that_differs(said[owner], said[helper]) >= 0:
                    self._leaves_differ(said, owner, helper)

    # -- inside --------------------------------------------------------------------------------------

    def _odd(self, said: Mapping[str, Compared]) -> dict[str, Odd]:
        return odd_newcomers(said, self._members.joined, self._step, lag=self._lag)

    def _without_odd(self, said: Mapping[str, Compared]) -> Mapping[str, Compared]:
        """Return what all have said but the newcomers that are about to be sent away: nobody has to settle that."""
        odd = self._odd(said)
        return {worker: one for worker, one in said.items() if worker not in odd} if odd else said

    def _have_copies_that_differ(self, said: Sequence[Compared]) -> bool:
        is_whole = {each.copies_generation for each in said} == {self._members.team.generation}
        return self._copies is not None and is_whole and sum(each.copies_digest for each in said) % (1 << 64) != 0

    def _check_alone(self) -> None:
        own, other = self.own, self._other[0] if self._other else None
        if own is not None and other is not None and own.leaf == other.leaf and own.digest != other.digest:
            facts = _facts_of(own, other, Facts(compiled=compiled_by(self._tracked)))
            what = own.difference(other, "the first time", "the second")
            raise DivergenceError(
                f"micro-batch {own.leaf} of step {self._step} was computed twice, with different gradients: {what}. On "
                f"several workers the result would depend on their number. Nothing was updated. {causes(facts)}"
            )

    def _states_differ(self, said: Sequence[Compared], states: Mapping[int, int]) -> None:
        ids = self._members.worker_ids
        wrong = _odd_ones(states, [each.arithmetic for each in said])
        if wrong is None:
            self._warn_of_arithmetic()
            return
        ranks, usual = wrong
        details = self._exchange(said, _Details(state=self._described()))
        what = _first_difference(details, ranks[0], usual, ids) if details else ""
        facts = self._facts(ids[usual], ids[ranks[0]], said, details, is_of_state=True)
        raise DivergenceError(
            f"the workers have drifted apart: at step {self._step} the state of "
            f"{listed([ids[rank] for rank in ranks])} is not that of {ids[usual]}{what}. {causes(facts)}",
            sound=self._judge.sound,
        )

    def _copies_differ(self, said: Sequence[Compared]) -> None:
        ids = self._members.worker_ids
        if len({each.arithmetic for each in said}) > 1:
            self._warn_of_arithmetic()
            return
        mine = {
            path: text
            for name, optimizer in self._tracked.sharded.items()
            for path, text in described(optimizer.state_dict()["state"], f"{name}['state']").items()
        }
        details = self._exchange(said, _Details(state=mine))
        raise DivergenceError(f"at step {self._step} {_first_copies(details, ids)}", sound=self._judge.sound)

    def _warn_of_arithmetic(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(_OTHER_ARITHMETIC, stacklevel=2)

    def _leaves_differ(self, said: Sequence[Compared], owner: int, helper: int) -> None:
        ids, leaf = self._members.worker_ids, said[owner].own_leaf
        details = self._exchange(said, self._details())
        facts = self._facts(ids[owner], ids[helper], said, details, leaf)
        what = _difference_of(details, leaf, (owner, helper), ids)
        raise DivergenceError(
            f"{self.unit} {leaf} of step {self._step} was computed by two workers, and its gradient differs between "
            f"{ids[owner]} and {ids[helper]}{what}. Nothing was updated. {causes(facts)}",
            sound=max(0, facts.joined),
        )

    def _send_away(self, said: Mapping[str, Compared], odd: Mapping[str, Odd]) -> None:
        """End this member, if it is a newcomer that differs from those before it. Collective."""
        ids, own = list(said), self._members.worker_ids[self._members.rank]
        details = self._exchange(list(said.values()), msgspec.structs.replace(self._details(), state=self._described()))
        if (mine := odd.get(own)) is None:
            return
        pair = ids.index(mine.member), ids.index(own)
        if mine.leaf < 0:
            first = _first_difference(details, pair[1], pair[0], ids) if details else ""
            what = f"at step {self._step} its state is not that of {mine.member}{first}"
        else:
            first = _difference_of(details, mine.leaf, pair, ids)
            what = (
                f"the gradient of {self.unit} {mine.leaf} of step {self._step} is not that of {mine.member}, which has "
                f"computed it as well{first}"
            )
        facts = self._facts(mine.member, own, list(said.values()), details, mine.leaf, is_of_state=mine.leaf < 0)
        has_counted = self._members.rank not in self.on_trial(self._step)
        raise DivergenceError(parting_words(own, what, facts, has_counted=has_counted), goes_on=True)

    def _details(self) -> _Details:
        return _Details(leaves=[*self._own, *self._other], compiled=compiled_by(self._tracked))

    def _described(self) -> dict[str, str]:
        """Return every value of the state by its path."""
        return {
            name: text
            for tracked, value in self._tracked.compared().items()
            for name, text in described(value, tracked).items()
        }

    def _facts(
        self,
        first: str,
        second: str,
        said: Sequence[Compared],
        details: Sequence[_Details],
        leaf: int = -1,
        *,
        is_of_state: bool = False,
    ) -> Facts:
        ids, joined = self._members.worker_ids, self._members.joined
        newer = max((first, second), key=lambda worker: joined.get(worker, -1))
        ranks = ids.index(first), ids.index(second)
        facts = Facts(
            is_of_state=is_of_state,
            is_arithmetic_equal=said[ranks[0]].arithmetic == said[ranks[1]].arithmetic,
            joined=joined.get(newer, -1),
            newer=newer,
            num_skipped=self._phase if ids.index(newer) in self.on_trial(self._step) else 0,
            compiled=next((one.compiled for one in details if one.compiled), ""),
        )
        pair = [_leaf_of(details, rank, leaf) for rank in ranks]
        return facts if pair[0] is None or pair[1] is None else _facts_of(pair[0], pair[1], facts)

    def _exchange(self, said: Sequence[Compared], details: _Details) -> list[_Details]:
        """Return the details of all members, by rank; empty where they cannot be exchanged any more."""
        if any(each.compared_step != self._step for each in said):
            return []  # a member that has finished this step before a loss does not compare it again
        try:
            payloads = self._members.gather(msgspec.msgpack.encode(details))
        except LOST:
            return []
        return [msgspec.msgpack.decode(payload, type=_Details) for payload in payloads]


def _is_recurrent(tracked: Tracked) -> bool:
    """Return whether a model has recurrent layers, whose hidden state a script may carry from batch to batch."""
    kinds = (nn.RNNBase, nn.RNNCellBase)
    return any(isinstance(part, kinds) for module in tracked.modules.values() for part in module.modules())


_OTHER_ARITHMETIC = (
    "workers whose arithmetic differs no longer hold the same state. All of them continue, and the result is that of "
    "the first worker. unisono run --strict rejects such workers"
)


def check_digests(digests: Mapping[str, Digests]) -> None:
    """Compare the digests of all workers' objects, by worker.

    Raises:
        DivergenceError: workers of equal arithmetic have other objects.
    """
    known = {worker: each for worker, each in digests.items() if each.objects}
    if not known:
        return
    firsts: dict[int, str] = {}
    for worker, each in known.items():
        first = firsts.setdefault(each.arithmetic, worker)
        different = [name for name, digest in each.objects.items() if digest != known[first].objects.get(name)]
        if different:
            raise DivergenceError(
                f"the workers have drifted apart: {', '.join(different)} of {worker} is not that of {first}. "
                f"{OUT_OF_STEP}"
            )
    if any(known[first].objects != known[next(iter(known))].objects for first in firsts.values()):
        warnings.warn(_OTHER_ARITHMETIC, stacklevel=2)


def odd_in_objects(rounds: Rounds, digests: Mapping[str, Digests], what: Mapping[str, str]) -> set[str]:
    """Return the newcomers on trial that differ from the members before them. Local, and the same on all members.

    Args:
        digests: of all workers' objects, by worker.
        what: by worker, what else of a newcomer differs, as a sentence without its full stop.

    Raises:
        DivergenceError: this member is one of them; the others go on without it.
    """
    ids, members = list(digests), rounds.members
    trial = {ids[rank] for rank in members.on_trial(rounds.position.number, rounds.lag)}
    if not trial:
        return set()
    usual = next(one for one in ids if one not in trial)
    found = {one: what[one] for one in trial if one in what}
    for one in trial:
        names = [name for name, own in digests[one].objects.items() if own != digests[usual].objects.get(name)]
        if names:
            found[one] = f"after step {rounds.position.number} {listed(names)} of it is not that of {usual}"
    if (own := members.worker_ids[members.rank]) in found:
        is_equal = digests[own].arithmetic == digests[usual].arithmetic
        facts = Facts(is_of_state=own not in what, is_arithmetic_equal=is_equal, joined=members.joined[own], newer=own)
        raise DivergenceError(parting_words(own, found[own], facts, has_counted=False), goes_on=True)
    return set(found)


def digest_of_objects(digests: Digests) -> int:
    """Return one digest of all objects."""
    return seed_of(0, *(int(digest, 16) for _, digest in sorted(digests.objects.items())))


def has_minority(digests: Mapping[str, Digests]) -> bool:
    """Return whether the objects of some workers, by worker, differ from those of most workers of their arithmetic."""
    states = {one: digest_of_objects(each) for one, each in digests.items()}
    return bool(odd_ones(states, {one: each.arithmetic for one, each in digests.items()}))


def held_by_all(digests: Mapping[str, Digests]) -> dict[str, dict[int, int]]:
    """Return the digests of the states that all workers together hold, by sharded optimizer and number of the tensor.

    Args:
        digests: by worker.

    Raises:
        DivergenceError: workers of equal arithmetic have other bits in their copies of a state.
    """
    found: dict[str, dict[int, int]] = {}
    first: dict[tuple[int, str, int], tuple[str, int]] = {}
    for worker, each in digests.items():
        for name, states in each.held.items():
            for number, digest in states.items():
                other, expected = first.setdefault((each.arithmetic, name, number), (worker, digest))
                if digest != expected:
                    raise DivergenceError(COPIES_DIFFER.format(first=other, second=worker, what=f"a state of {name}"))
                if found.setdefault(name, {}).setdefault(number, digest) != digest:
                    warnings.warn(_OTHER_ARITHMETIC, stacklevel=2)
    return found


def _leaf_of(details: Sequence[_Details], rank: int, leaf: int) -> Fingerprint | None:
    return next((one for one in details[rank].leaves if one.leaf == leaf), None) if details else None


def _difference_of(details: Sequence[_Details], leaf: int, ranks: tuple[int, int], ids: Sequence[str]) -> str:
    """Return how what two members have got for a micro-batch differs, as a sentence after another one."""
    mine, theirs = (_leaf_of(details, rank, leaf) for rank in ranks)
    return "" if mine is None or theirs is None else f". {mine.difference(theirs, *(ids[rank] for rank in ranks))}"


def _facts_of(mine: Fingerprint, theirs: Fingerprint, facts: Facts) -> Facts:
    """Return facts with what two fingerprints of one micro-batch say."""
    known = mine.batch and theirs.batch
    return replace(
        facts,
        are_batches_equal=mine.batch == theirs.batch if known else None,
        is_loss_equal=mine.weighted_loss == theirs.weighted_loss,
    )


def compiled_by(tracked: Tracked) -> str:
    """Return what compiles a tracked model, a part of it, or what is made of it; "": nothing does."""
    parts = [part for module in tracked.modules.values() for part in module.modules()]
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        return "TorchScript"
    # What a script computes with is often not what it tracks. torch has no public word for what was compiled.
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {}).values()
    return "torch.compile" if any(one is not None for one in backends) else ""


def _odd_ones(states: Mapping[int, int], arithmetics: Sequence[int]) -> tuple[list[int], int] | None:
    """Return the ranks that differ among those of one arithmetic, and one of the others; None: there are none."""
    for arithmetic in dict.fromkeys(arithmetics[rank] for rank in states):
        ranks = [rank for rank in states if arithmetics[rank] == arithmetic]
        if odd := minority([states[rank] for rank in ranks]):
            usual = next(rank for index, rank in enumerate(ranks) if index not in odd)
            return [ranks[index] for index in odd], usual
    return None


def _first_copies(details: Sequence[_Details], ids: Sequence[str]) -> str:
    """Return in words which copies of a state differ."""
    first: dict[str, int] = {}
    for rank, each in enumerate(details):
        for path, text in each.state.items():
            other = first.setdefault(path, rank)
            if details[other].state[path] != text:
                return COPIES_DIFFER.format(first=ids[other], second=ids[rank], what=path)
    return COPIES_DIFFER.format(first="one worker", second="another", what="a state of a sharded optimizer")


def _first_difference(details: Sequence[_Details], rank: int, usual: int, ids: Sequence[str]) -> str:
    theirs, ours = details[rank].state, details[usual].state
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            number = sum(ours.get(name) != theirs.get(name) for name in {*ours, *theirs})
            more = f", the first of {number} differences" if number > 1 else ""
            return (
                f" ({path} is {theirs.get(path, 'not there')} on {ids[rank]} and {ours.get(path, 'not there')} on "
                f"{ids[usual]}{more})"
            )
    return ""
