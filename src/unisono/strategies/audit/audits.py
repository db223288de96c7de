"""Audits: what follows when two members have computed different values. `unisono.core.audit_rules` has the rules.

The digests travel with the sums of a step, so all members see the same difference after the commit, before anything is
updated (`unisono.engine.rounds.agreement`). Then, in a step where there is one:

1. all members say which digests they have, of their states and of the micro-batches that another member has computed
   as well, in a round of its own. When it is over, all of them have seen the commit of the step, and nobody needs a sum
   of it any more. Whoever has another state than most is wrong;
2. where most have the same state, all compute the micro-batch that differs once more, and some others, and say what has
   come out, in another round;
3. those that are right ask the head to end the ones that are wrong, meet in the next generation, and do the whole step
   again. Nothing was updated, so nothing of the wrong values is left.

A loss at any of these points is survived as in all rounds. A member that sums again without a lost member hears that
others have begun an audit (`Rounds.follows`), and takes part. Nobody knows what a member has computed that is lost
before all have spoken: the step is done again without that member, which is not named.

Where groups carry the model in parts, a group computes what another one has computed, and members of the same part
compare what has come out of it. Gradients alone do not say which part was wrong, because a wrong output spoils the
gradients of all parts. So a member also remembers the digest of its output, and of all places at which two groups
differ, the first in the order of the computation is disputed (`unisono.core.groups.places`).

With a delay (`unisono.strategies.delay.pipeline`) the same happens when the gradient is about to be applied, and all
steps whose sums are made since then are done again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from unisono.cluster.worker.member import Member
from unisono.core.audit_rules import AuditVerdict, Record, judge, parts, tried
from unisono.core.cursor import MASK
from unisono.core.errors import DivergenceError, PeerLost, UsageError
from unisono.core.groups import place_words
from unisono.core.messages import Convicted
from unisono.core.plan import Plan
from unisono.core.rehearsals import Twice, key_of, odd_ones
from unisono.core.settings import AuditThen, RunSettings
from unisono.core.spec import MOST_AUDITED
from unisono.core.telemetry import NOT_COMPARED, Compared
from unisono.core.words import NAMES_THE_LINE, count, listed
from unisono.engine.exchange.flat import with_flipped_bit
from unisono.engine.rounds import Dispute, Repeats
from unisono.engine.rounds.agreement import COPIES_DIFFER
from unisono.engine.rounds.gathering import TalkRound
from unisono.engine.rounds.life import DISPUTE, Rounds
from unisono.engine.rounds.members import Gathered
from unisono.engine.rounds.taps import Loop, Tap
from unisono.engine.state.tracked import Tracked
from unisono.engine.state.walk import tensors_of_state
from unisono.system.faults import point, spoils

__all__ = ["Audits", "Testimony", "first_difference", "make_audits", "of_states", "spoil"]

MOST_VAIN: Final = 5
"""So often nobody may remember what differed in one step, before the memory of a machine is taken for faulty."""
AGAIN_WITHIN: Final = 100
"""So many steps after a worker was found to be wrong another one is not believed to be: the script is the cause."""

CAUSES: Final = (
    "Look for whatever the inner loop, the model, its hooks or the dataset remember of other batches, or take from "
    "elsewhere: a counter, a generator of the script's own, a cache, the clock, run.rank; docs/guarantees.md has what "
    f"a micro-batch may depend on. {NAMES_THE_LINE}"
)


class Audits(Tap):
    """This member's part in the audits of a run.

    Args:
        share: of the micro-batches that a second member computes as well.
        convict: tells the head; None: there is none, and the run ends.

    Attributes:
        then: what the run does when a member is wrong.
        record: since when the members are known to be right.
    """

    settles = True
    _rounds: Rounds

    def __init__(
        self, *, share: float, then: AuditThen, seed: int, convict: Callable[[Convicted], None] | None
    ) -> None:
        self.record = Record()
        self._share = share
        self.then = then
        self._seed = seed
        self._convict = convict
        self._arithmetics: tuple[int, tuple[int, ...]] = (0, ())  # (generation, by rank)
        self._hosts: dict[str, str] = {}  # by worker, also of those that are lost
        self._begun: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}  # by (step, turn) and key
        self._last: tuple[int, tuple[str, ...], frozenset[str]] | None = None  # (step, who was wrong, their hosts)
        self._digests: dict[str, str] = {}
        self._vain = (-1, 0)  # (step, how often nothing was found in it)

    def enter(self, rounds: Rounds) -> None:
        """Look on at these rounds from now on."""
        self._rounds = rounds
        rounds.taps.append(self)

    @property
    def sound(self) -> int:  # type: ignore[override]
        return self.record.alike

    def before_loop(self, loop: Loop) -> None:
        self.record.lag = max(self.record.lag, loop.lag)

    def agreed(self, step: int, lag: int = 0) -> None:
        self.record.same(step)

    # -- a step --------------------------------------------------------------------------------------

    def twice(self, plan: Plan, step: int, turn: int, *, is_forecast: bool = False) -> Twice:
        found = self._parts(plan, step, turn)
        if not is_forecast:
            self._begun = {at: known for at, known in self._begun.items() if at[0] + self.record.lag >= step - 1}
            self._begun[step, turn] = {key_of(one.own): one.own for one in found if one.own}
        return found[self._rounds.members.rank]

    def has_twice(self, step: int, turn: int) -> bool:
        return bool(self._begun.get((step, turn)))

    def _parts(self, plan: Plan, step: int, turn: int) -> Sequence[Twice]:
        members = self._rounds.members
        if members.size < 2 or len(plan.ranges) != members.size or any(plan.kept):
            return (Twice(),) * members.size
        generation, arithmetics = self._arithmetics
        if generation != members.team.generation:
            arithmetics = (0,) * members.size
        return parts(
            plan,
            members.team.hosts,
            arithmetics,
            groups=members.team.groups,
            share=self._share,
            seed=self._seed,
            step=step,
            turn=turn,
        )

    def differ(self, said: Mapping[str, Compared]) -> bool:
        states = {one: each.state_digest for one, each in said.items() if each.compared_step != NOT_COMPARED}
        arithmetics = {one: each.arithmetic for one, each in said.items()}
        return bool(odd_ones(states, arithmetics)) or not all(pair.is_equal for pair in _pairs_of(said))

    def compare(self, said: Mapping[str, Compared], step: int, turn: int, *, is_disputed: bool) -> bool:
        members = self._rounds.members
        if tuple(said) == members.worker_ids:
            self._arithmetics = members.team.generation, tuple(each.arithmetic for each in said.values())
            self._hosts.update(zip(members.worker_ids, members.team.hosts, strict=True))
        is_disputed = is_disputed or self.differ(said)
        if turn == 0:
            self._digests = {}
        self.record.seen(step, {worker: self._hosts.get(worker, "") for worker in said})
        leaves, num_parts = self._begun.pop((step, turn), {}), members.team.num_parts
        for key, pairs in itertools.groupby(sorted(_pairs_of(said), key=lambda pair: pair.key), lambda pair: pair.key):
            of_key, right = leaves.get(key, (key,)), [pair for pair in pairs if pair.is_equal]
            # Digests of the parts of a micro-batch add up to its own (`unisono.engine.exchange.flat.digest_rows`).
            if turn == 0 and len(right) == num_parts and (num_parts == 1 or len(of_key) == 1):
                whole = sum(next(iter(pair.digests.values())) for pair in right) & MASK
                self._digests[",".join(map(str, of_key))] = f"{whole:016x}"
            for pair in right if not is_disputed else ():
                self.record.right(step, pair.digests, len(of_key))
        return is_disputed

    def take_digests(self) -> dict[str, str]:
        """Return, once, the digests of the micro-batches that were audited in the first pass of the last step, by their
        numbers: "3", or "3,7" where a worker had several.
        """
        found, self._digests = self._digests, {}
        return dict(sorted(found.items(), key=lambda item: [int(leaf) for leaf in item[0].split(",")]))

    # -- who is wrong --------------------------------------------------------------------------------

    def settle(self, round_: Repeats, dispute: Dispute) -> Generator[Any, None, None]:
        said = yield from self._ask(round_.number, dispute)
        found = of_states(said, round_.number, self.record)
        if found is None and (pair := first_difference(said)) is not None:
            found = yield from self._try_again(round_, pair)
        if found is None:
            self._check_vain(round_.number)
        self._rounds.book.redo()  # before the members meet, and report what they have of these sums
        if found is not None:
            self._conclude(*found, round_.number)

    def _ask(self, step: int, dispute: Dispute) -> Generator[Any, None, list[Testimony]]:
        """Return what all members know, and learn what they know of each other. Collective."""
        rounds, members = self._rounds, self._rounds.members

        def own() -> bytes:
            states = {} if dispute.state is None else {_WHOLE: dispute.state}
            for name, digests in rounds.tracked.held_digests().items():
                states |= {f"a state of {name} ({number})": digest for number, digest in digests.items()}
            return msgspec.msgpack.encode(
                Testimony(
                    members.worker_ids[members.rank],
                    members.team.arithmetic,
                    {leaf: dict(digests) for leaf, digests in dispute.leaves.items()},
                    states,
                    dict(self.record.passed),
                    self.record.begins,
                    self.record.compared,
                )
            )

        asked = TalkRound(rounds, f"the audit of step {step}", own, DISPUTE)
        yield from rounds.play(asked)
        said = [msgspec.msgpack.decode(each, type=Testimony) for each in asked.values]
        for one in said:
            self.record.learn(one.passed, one.begins, one.compared)
        return said

    def _try_again(self, round_: Repeats, pair: _Pair) -> Generator[Any, None, _Found]:
        """Have all members compute a micro-batch again, and some others, and return who is wrong. Collective.

        Raises:
            DivergenceError: nobody can say who.
        """
        before = self._rounds.members.worker_ids
        trial = _Trial(self._rounds, round_, pair.key)
        yield from self._rounds.play(trial)
        columns = trial.columns(pair)
        again = columns[0] if columns else {}
        verdict = judge(pair.digests, again, columns[1:])
        num_parts = self._rounds.team.num_parts
        what = f"{place_words(pair.place, num_parts)} " if num_parts > 1 else ""
        what += f"{round_.unit} {pair.key}"
        if verdict.kind != "convicted":
            first, sound = self._bounds([*before, *pair.digests], verdict)
            lost = [one for one in pair.digests if one not in again]
            doubt = _doubt(first, sound, round_.number)
            raise DivergenceError(_undecided(verdict, what, round_.number, pair, lost, doubt), sound=sound)
        return verdict, what

    def _check_vain(self, step: int) -> None:
        """Note that nobody knows any more of what differed: a member was lost, and its sums are with it.

        Raises:
            DivergenceError: that is so again and again in one step.
        """
        self._vain = (step, self._vain[1] + 1) if self._vain[0] == step else (step, 1)
        if self._vain[1] > MOST_VAIN:
            raise DivergenceError(
                f"the digests that workers have sent with the sums of step {step} differ, and those that they remember "
                f"do not, {self._vain[1]} times: the memory of a machine is probably faulty. Nothing was updated",
                sound=self.record.sound(self.record.passed),
            )

    def _bounds(self, workers: Sequence[str], verdict: AuditVerdict) -> tuple[int, int]:
        """Return the first step that is to be doubted where these are wrong, and the steps of a sound checkpoint."""
        if verdict.is_of_state:
            return self.record.alike, self.record.alike
        is_lasting = verdict.is_lasting
        return self.record.doubtful_from(workers, is_lasting=is_lasting), self.record.sound(
            workers, is_lasting=is_lasting
        )

    def _conclude(self, verdict: AuditVerdict, what: str, step: int) -> None:
        """Go on without the members that are wrong. Collective."""
        rounds, wrong = self._rounds, verdict.wrong
        present = set(rounds.members.worker_ids)
        hosts = frozenset(self._hosts.get(one, "") for one in wrong)
        self._check_first(wrong, hosts, step, what)
        first, sound = self._bounds(wrong, verdict)
        goes_back = self.then == "go-back" and first < step
        if self._convict is None:
            raise DivergenceError(
                f"{listed(list(wrong))} computes wrong values: {what} of step {step} has other bits there than on most "
                f"members. {_doubt(first, sound, step)}",
                sound=sound,
            )
        self._last = step, wrong, hosts
        if rounds.members.worker_ids[rounds.members.rank] not in wrong:
            self._convict(
                Convicted(
                    worker_ids=list(wrong),
                    step=step,
                    doubtful_from=first,
                    sound=sound,
                    goes_back=goes_back,
                    what=what,
                    is_lasting=verdict.is_lasting,
                )
            )
        if goes_back or present & set(wrong):  # else all of them are lost meanwhile
            rounds.regroup(PeerLost(f"{listed(list(wrong))} computes wrong values, and is to be ended", wrong))

    def _check_first(self, wrong: Sequence[str], hosts: frozenset[str], step: int, what: str) -> None:
        """Check that not one worker after the other is found to be wrong.

        Raises:
            DivergenceError: that is so; the script is probably the cause.
        """
        if self._last is None or step - self._last[0] >= AGAIN_WITHIN:
            return
        at, others, known = self._last
        is_same_machine = hosts <= known
        if is_same_machine and len(set(self._hosts.values())) > 1:
            return
        pair = "workers of one machine" if is_same_machine else "machines"
        raise DivergenceError(
            f"{listed(list(wrong))} has other bits in {what} of step {step} than most members, as "
            f"{listed(list(others))} had in step {at}. That two {pair} fail so soon after each other is unlikely: the "
            f"script probably decides by the worker. {CAUSES}",
            sound=self.record.sound([*wrong, *others]),
        )


def make_audits(
    settings: RunSettings, share: float, then: AuditThen, seed: int, member: Member | None
) -> Audits | None:
    """Return the audits of a run; None: nothing is audited.

    Args:
        share, then: what the script asks for; the command line wins.
        member: None: the script runs alone.

    Raises:
        UsageError: they make no sense.
    """
    share, then = settings.audit or share, settings.audit_then or then
    if not 0.0 <= share <= MOST_AUDITED:
        raise UsageError(
            "audit is the share of the micro-batches that a second worker computes as well, from 0 to "
            f"{MOST_AUDITED:g}, e.g. 0.01; got {share}"
        )
    if then not in ("go-back", "go-on"):
        raise UsageError(f'audit_then is "go-back" or "go-on"; got {then!r}')
    if not share:
        return None
    convict = member.convict if member is not None else None
    return Audits(share=share, then=then, seed=seed, convict=convict)


def spoil(tracked: Tracked) -> None:
    """Flip a bit of the state, where a test wants this worker's machine to be faulty. Between two steps."""
    with torch.no_grad():
        if (bit := spoils("parameter")) is not None:
            parameter = next(one for _, one in tracked.parameters() if not one.is_meta)
            parameter.copy_(with_flipped_bit(parameter, bit))
        if (bit := spoils("optimizer")) is not None:
            values = (value for one in tracked.optimizers.values() for _, value in tensors_of_state(one))
            found = next((value for value in values if value.numel() > 1 and not value.is_meta), None)
            if found is None:
                raise UsageError("the optimizers have no state yet that a fault could spoil: choose a later step")
            found.copy_(with_flipped_bit(found, bit))


# -- what all were told with the sums of a step -------------------------------------------------------


class _Pair(msgspec.Struct, frozen=True):
    """Two members of equal arithmetic that have computed the same micro-batches."""

    key: int
    """Of the micro-batches (`unisono.core.rehearsals.key_of`); of one, its number."""
    arithmetic: int
    digests: dict[str, int]
    """By worker, of all these micro-batches together: of the one that has summed them, and of its helper."""
    place: int = 0
    """At which they have computed this, where workers carry parts of the model (`unisono.core.groups.places`)."""

    @property
    def is_equal(self) -> bool:
        return len(set(self.digests.values())) == 1


def _pairs_of(said: Mapping[str, Compared]) -> Iterator[_Pair]:
    """Yield the pairs of members that have computed the same micro-batches.

    Args:
        said: with the sum of a step, by worker.
    """
    owners = {(each.own_leaf, each.part): worker for worker, each in said.items() if each.own_leaf != NOT_COMPARED}
    for helper, each in said.items():
        owner = owners.get((each.other_leaf, each.part), helper)
        if owner != helper and said[owner].arithmetic == each.arithmetic:
            digests = {owner: said[owner].own_digest, helper: each.other_digest}
            yield _Pair(each.other_leaf, each.arithmetic, digests)


# -- what they say when they are asked ----------------------------------------------------------------

_WHOLE: Final = "its state"


class Testimony(msgspec.Struct, frozen=True):
    """What a member knows of a step."""

    worker: str
    arithmetic: int
    leaves: dict[int, dict[int, int]]
    """The digests of the micro-batches that it has computed and another member as well, by place."""
    states: dict[str, int]
    """The digests of its state before the step, if it has taken one, and of the states of sharded optimizers that it
    holds, by what they are of in words."""
    passed: dict[str, list[int]]
    """What it knows of the members (`Record.passed`)."""
    begins: int
    compared: int


class _Result(msgspec.Struct, frozen=True):
    """What has come out when a member has computed micro-batches again."""

    worker: str
    arithmetic: int
    digests: list[dict[int, int]]
    """By place, in the order in which they were asked for; []: the member is in no group, and has computed nothing."""


class _Trial(TalkRound):
    """All members compute a micro-batch again, and some others, and say what has come out."""

    def __init__(self, rounds: Rounds, round_: Repeats, leaf: int) -> None:
        super().__init__(rounds, f"the trial of {round_.unit} {leaf} of step {round_.number}", self._said, DISPUTE)
        self._round = round_
        self._leaves = tried(leaf, round_.num_leaves)
        self._digests: list[dict[int, int]] = []

    def columns(self, pair: _Pair) -> list[dict[str, int]]:
        """Return for each of the micro-batches what has come out at the place of a pair, by worker, on all members of
        its arithmetic. Once the round is over.
        """
        results = [msgspec.msgpack.decode(each, type=_Result) for each in self.values]
        known = {one.worker: one.digests for one in results if one.digests and one.arithmetic == pair.arithmetic}
        columns = (dict(zip(known, each, strict=True)) for each in zip(*known.values(), strict=True))
        at_place = (
            {worker: each[pair.place] for worker, each in column.items() if pair.place in each} for column in columns
        )
        return [column for column in at_place if column]

    def compute(self, plan: Plan) -> Iterator[object]:
        if self._members.team.num_parts == 1:
            yield from self._compute()

    def combine(self, plan: Plan) -> Gathered:
        """A group computes together, so its members begin together, and anew after a loss: only where all know that
        nobody has the result already.
        """
        members = self._members
        if members.team.num_parts > 1:
            final = next((letter.payload for letter in members.letters(b"") if letter.is_final), None)
            if final is not None:
                self.result = final
                return Gathered(members, final)
            self._digests = []
            for _ in self._compute():
                raise AssertionError("a group does not yield micro-batches to the script")
        return super().combine(plan)

    def _compute(self) -> Iterator[object]:
        point("in_talk")
        for leaf in self._leaves[len(self._digests) :]:
            if digests := (yield from self._round.compute_uncounted(leaf)):
                self._digests.append(dict(digests))

    def _said(self) -> bytes:
        own = self._members.worker_ids[self._members.rank]
        return msgspec.msgpack.encode(_Result(own, self._members.team.arithmetic, self._digests))


# -- what follows from it -----------------------------------------------------------------------------

_Found = tuple[AuditVerdict, str]
"""Who is wrong, and in what, in words."""


def of_states(said: Sequence[Testimony], step: int, record: Record) -> _Found | None:
    """Return who has another state than most, or another copy of one; None: nobody has.

    The same on all members, also where some have met again since, without a member that has spoken.

    Raises:
        DivergenceError: two holders have different copies, and no third can say who is wrong.
    """
    arithmetics = {one.worker: one.arithmetic for one in said}
    for name in sorted({name for one in said for name in one.states}, key=lambda name: (name != _WHOLE, name)):
        digests = {one.worker: one.states[name] for one in said if name in one.states}
        if wrong := odd_ones(digests, arithmetics):
            what = _WHOLE if name == _WHOLE else f"its copy of {name.partition(' (')[0]}"
            return AuditVerdict("convicted", wrong, is_lasting=True, is_of_state=True), what
        for first, second in itertools.combinations(digests, 2):
            if name != _WHOLE and arithmetics[first] == arithmetics[second] and digests[first] != digests[second]:
                raise DivergenceError(
                    f"at step {step} {COPIES_DIFFER.format(first=first, second=second, what=name)}", sound=record.alike
                )
    return None


def first_difference(said: Sequence[Testimony]) -> _Pair | None:
    """Return the first micro-batch that members of equal arithmetic have computed differently, at the first place where
    they have; None: there is none.
    """
    found: dict[tuple[int, int, int], dict[str, int]] = {}
    for one in said:
        for leaf, digests in one.leaves.items():
            for place, digest in digests.items():
                found.setdefault((leaf, place, one.arithmetic), {})[one.worker] = digest
    pairs = (_Pair(leaf, arithmetic, each, place) for (leaf, place, arithmetic), each in sorted(found.items()))
    return next((pair for pair in pairs if not pair.is_equal), None)


def _undecided(verdict: AuditVerdict, disputed: str, step: int, pair: _Pair, lost: Sequence[str], doubt: str) -> str:
    """Return in words that nobody can say who is wrong.

    Args:
        disputed: the micro-batch, in words.
        lost: members that are lost meanwhile.
        doubt: what is to be doubted.
    """
    first = sorted(pair.digests)
    its = "" if "part" in disputed else "its gradient "
    what = f"{disputed} of step {step} was computed by {listed(first)}, and {its}is not the same"
    if verdict.kind == "many":
        return (
            f"{what}; when all workers computed it again, there were so many results that not one machine is wrong: "
            f"the micro-batch is not deterministic. Nothing was updated. {CAUSES}"
        )
    gone = [one for one in first if one in lost]
    if gone:
        hint = f"{listed(gone)} is lost meanwhile, and may as well be the one that is right"
    elif len(verdict.wrong) == 1:
        hint = (
            f"{verdict.wrong[0]} has got two results for it, and the other worker one, so the machine of "
            f"{verdict.wrong[0]} is probably faulty"
        )
    else:
        hint = "Each gets its own again: a machine is faulty, or the script decides by the worker"
    return f"{what}; with two workers nobody can say who is wrong (a third one would decide). {hint}. {doubt}"


def _doubt(first: int, sound: int, step: int) -> str:
    """Return in words what is to be doubted where the run ends because members are wrong at a step."""
    doubtful = f"step {first}" if first == step - 1 else f"the steps {first} to {step - 1}"
    what = f"what they have computed in {doubtful} is" if first < step else "their states are"
    return (
        f"Nothing was updated in step {step}, but {what} to be doubted: test the machines, and go on from a checkpoint "
        f"of at most {count(sound, 'step')}"
    )
