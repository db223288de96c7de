"""Audits: what follows when two members have computed different values. `unisono.decisions.audits` has the rules.

The digests travel with the sums of a step, so all members see the same difference after the commit, before anything is
updated. Then, in a step where there is one:

1. all members say which digests they have (`_Testimony`), in a round of its own. When it is over, all of them have seen
   the commit of the step, and nobody needs a sum of it any more;
2. all compute the micro-batch in question once more, and say what has come out, in another round;
3. those that are right ask the head to end the ones that are wrong, meet in the next generation, and do the whole step
   again. Nothing was updated, so nothing of the wrong values is left.

A loss at any of these points is survived as in all rounds. A member that has seen the commit of the step and is ahead
tells those that sum again without a lost member that there is a difference (`StepTelemetry.disputed`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from unisono.decisions.audits import NOTHING, Part, Record, Verdict, judge, judge_states, parts
from unisono.decisions.plan import Plan
from unisono.errors import DivergenceError, PeerLost
from unisono.microbatch.folding import Fingerprint
from unisono.rounds.life import Rounds
from unisono.rounds.members import Members
from unisono.rounds.talking import TalkRound
from unisono.spec import AuditThen
from unisono.telemetry import NOT_COMPARED, StepTelemetry
from unisono.words import count, listed

__all__ = ["COPIES_DIFFER", "Audits", "Conviction", "Repeats"]

COPIES_DIFFER: Final = (
    "{first} and {second} hold copies of {what} that differ. Both have computed them from the same gradients with the "
    "same arithmetic, so one of the machines computes or stores wrong values: its memory, its processor or its GPU is "
    "probably faulty. Go on without that machine, from a checkpoint from before that; the journal says what ran where"
)
MOST_VAIN: Final = 5
_COPY: Final = "its copy of an optimizer's state"
AGAIN_WITHIN: Final = 100
"""So many steps after a worker was found to be wrong another one is not believed to be: the script is the cause."""


@dataclass(frozen=True)
class Conviction:
    """What the head is told: these workers are wrong."""

    worker_ids: tuple[str, ...]
    step: int
    """Of the run, in which they were found."""
    honest_until: int
    """The last step of the run at which they were known to be right; -1: at none."""
    sound: int
    """A checkpoint of more steps may hold wrong values."""
    goes_back: bool
    """The run is to go back to a state from before the steps that are to be doubted."""
    what: str
    """What they have computed wrongly, in words: "micro-batch 3" or "its state"."""
    is_lasting: bool
    """They were wrong each time, and not once."""


class Repeats(Protocol):
    """A round of a step, as an audit needs it (`unisono.rounds.gradient.GradientRound`)."""

    @property
    def number(self) -> int:
        """Number of the step within the run."""

    def compute_apart(self, leaf: int) -> Iterator[Any]:
        """Yield a micro-batch to the script, of which nothing is summed."""

    def fingerprint(self, leaf: int) -> Fingerprint:
        """Return the fingerprint of that micro-batch."""


class _Testimony(msgspec.Struct, frozen=True):
    """What a member knows of the step."""

    worker: str
    arithmetic: int
    leaves: dict[int, int]
    """The digests of the micro-batches that it has computed and another member as well."""
    state: int | None
    """The digest of its state before the step, if it has taken one."""
    honest: dict[str, int]
    """What it knows of the members (`Record.honest`)."""
    begins: int
    held: dict[str, dict[int, int]] = {}
    """By sharded optimizer, the digests of the states that it holds, by the numbers of their tensors."""


class _Result(msgspec.Struct, frozen=True):
    """What has come out when a member has computed a micro-batch again."""

    worker: str
    arithmetic: int
    digest: int


class _Trial(TalkRound):
    """All members compute one micro-batch again, and say what has come out."""

    def __init__(self, rounds: Rounds, round_: Repeats, leaf: int) -> None:
        super().__init__(rounds, f"the trial of micro-batch {leaf} of step {round_.number}", self._said)
        self._round = round_
        self._leaf = leaf
        self._digest: int | None = None

    def compute(self, plan: Plan) -> Iterator[object]:
        if self._digest is None:
            yield from self._round.compute_apart(self._leaf)
            self._digest = self._round.fingerprint(self._leaf).digest

    def _said(self) -> bytes:
        assert self._digest is not None
        own = self._members.worker_ids[self._members.rank]
        return msgspec.msgpack.encode(_Result(own, self._members.arithmetic, self._digest))


class Audits:
    """This member's part in the audits of a run.

    Args:
        share: of the micro-batches that a second member computes as well.
        convict: tells the head; None: there is none, and the run ends.

    Attributes:
        then: what the run does when a member is wrong.
        record: since when the members are known to be right.
    """

    def __init__(
        self, *, share: float, then: AuditThen, seed: int, convict: Callable[[Conviction], None] | None
    ) -> None:
        self.record = Record()
        self._share = share
        self.then = then
        self._seed = seed
        self._convict = convict
        self._arithmetics: tuple[int, tuple[int, ...]] = (0, ())  # (generation, by rank)
        self._is_disputed = False
        self._last: tuple[int, tuple[str, ...], frozenset[str]] | None = None  # (step, who was wrong, their hosts)
        self._digests: dict[str, str] = {}
        self._vain = (-1, 0)  # (step, how often nothing was found in it)

    # -- a step --------------------------------------------------------------------------------------

    def part(self, plan: Plan, members: Members, step: int, turn: int) -> Part:
        """Return this member's part in the audit of a step. Local.

        Args:
            plan: of the step, in which nothing is computed yet.
            step: of the run.
            turn: pass over its global batch.
        """
        if members.size < 2 or len(plan.ranges) != members.size or any(plan.kept):
            return NOTHING
        generation, arithmetics = self._arithmetics
        if generation != members.team.generation:
            arithmetics = (0,) * members.size
        found = parts(plan, members.team.hosts, arithmetics, share=self._share, seed=self._seed, step=step, turn=turn)
        return found[members.rank]

    def compare(
        self, telemetry: Sequence[StepTelemetry], members: Members, step: int, turn: int, *, states_differ: bool
    ) -> bool:
        """Compare what the members have sent with the sums of a step. Local, and the same on all members.

        Args:
            telemetry: by rank.
            turn: pass over the global batch of the step.
            states_differ: the digests of the members' states do.

        Returns:
            Whether something differs, so that `settle` has to find out who is wrong.
        """
        ids = members.worker_ids
        self._arithmetics = members.team.generation, tuple(each.arithmetic for each in telemetry)
        self._is_disputed = states_differ or any(each.disputed for each in telemetry)
        if turn == 0:
            self._digests = {}
        self.record.seen(step, ids)
        owners = {each.own_leaf: rank for rank, each in enumerate(telemetry) if each.own_leaf != NOT_COMPARED}
        right: list[tuple[str, str]] = []
        for rank, helper in enumerate(telemetry):
            owner = owners.get(helper.other_leaf, rank)
            if owner == rank or telemetry[owner].arithmetic != helper.arithmetic:
                continue
            if telemetry[owner].own_digest != helper.other_digest:
                self._is_disputed = True
                continue
            right.append((ids[owner], ids[rank]))
            if turn == 0:
                self._digests[str(helper.other_leaf)] = f"{helper.other_digest:016x}"
        if not self._is_disputed:
            for pair in right:
                self.record.right(step, pair, 1)
        return self._is_disputed

    @property
    def is_disputed(self) -> bool:
        """Whether members have computed different values in the step that was summed last."""
        return self._is_disputed

    def take_digests(self) -> dict[str, str]:
        """Return, once, the digests of the micro-batches that were audited in the first pass of the last step, by their
        numbers.
        """
        found, self._digests = self._digests, {}
        return dict(sorted(found.items(), key=lambda item: int(item[0])))

    # -- who is wrong --------------------------------------------------------------------------------

    def settle(
        self, rounds: Rounds, round_: Repeats, leaves: Sequence[Fingerprint], state: int | None
    ) -> Generator[Any, None, bool]:
        """Find out who is wrong, if members have computed different values, and go on without them. Collective then.

        Yields micro-batches to the script.

        Args:
            round_: of the step, which is committed, and whose result is not in force.
            leaves: what this member has computed in it and another member as well.
            state: the digest of this member's state, if it has taken one.

        Returns:
            Whether the result of the round counts; False: the step is to be done again.

        Raises:
            DivergenceError: nobody can say who is wrong. RunStopped: the run goes back.
        """
        if not self._is_disputed:
            return True
        self._is_disputed = False
        members = rounds.members.worker_ids
        said = yield from self._testimonies(rounds, round_, leaves, state)
        for one in said:
            self.record.learn(one.honest, one.begins)
        if (verdict := _of_states(said, rounds)) is not None:
            what = "its state"
        elif (verdict := _of_copies(said, round_.number, self.record)) is not None:
            what = _COPY
        else:
            leaf, first = _first_difference(said)
            if leaf is None:
                self._check_vain(round_.number)
                return False
            trial = _Trial(rounds, round_, leaf)
            yield from rounds.play(trial)
            results = [msgspec.msgpack.decode(each, type=_Result) for each in trial.values]
            arithmetic = next(one.arithmetic for one in said if one.worker in first)
            verdict = judge(first, {one.worker: one.digest for one in results if one.arithmetic == arithmetic})
            what = f"micro-batch {leaf}"
            if verdict.kind != "convicted":
                doubt = self._doubt(members, round_.number)
                raise DivergenceError(
                    _undecided(verdict, leaf, round_.number, sorted(first), doubt), sound=self.record.sound(members)
                )
        self._act(rounds, verdict, round_.number, what)
        return False

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
                sound=self.record.sound(self.record.honest),
            )

    def settle_states(self, rounds: Rounds, digest: int, step: int) -> bool:
        """Find out whose state is wrong, after a comparison between two steps, and go on without them. Collective.

        Returns whether somebody was found.

        Args:
            digest: of this member's state.
            step: the next one of the run.

        Raises:
            RunStopped: the run goes back.
        """
        members = rounds.members

        def own() -> bytes:
            return msgspec.msgpack.encode(
                _Testimony(
                    members.worker_ids[members.rank],
                    members.arithmetic,
                    {},
                    digest,
                    dict(self.record.honest),
                    self.record.begins,
                )
            )

        asked = TalkRound(rounds, f"the comparison of states before step {step}", own)
        for _ in rounds.play(asked):
            pass
        said = [msgspec.msgpack.decode(each, type=_Testimony) for each in asked.values]
        for one in said:
            self.record.learn(one.honest, one.begins)
        verdict = _of_states(said, rounds)
        if verdict is not None:
            self._act(rounds, verdict, step, "its state")
        return verdict is not None

    def _testimonies(
        self, rounds: Rounds, round_: Repeats, leaves: Sequence[Fingerprint], state: int | None
    ) -> Generator[Any, None, list[_Testimony]]:
        members = rounds.members

        def own() -> bytes:
            known = {one.leaf: one.digest for one in leaves}
            worker = members.worker_ids[members.rank]
            return msgspec.msgpack.encode(
                _Testimony(
                    worker,
                    members.arithmetic,
                    known,
                    state,
                    dict(self.record.honest),
                    self.record.begins,
                    rounds.tracked.held_digests(),
                )
            )

        asked = TalkRound(rounds, f"the audit of step {round_.number}", own)
        yield from rounds.play(asked)
        return [msgspec.msgpack.decode(each, type=_Testimony) for each in asked.values]

    def _doubt(self, workers: Sequence[str], step: int) -> str:
        """Return in words what is to be doubted where the run ends because one of these members is wrong at a step."""
        first, sound = self.record.doubtful_from(workers), count(self.record.sound(workers), "step")
        doubtful = f"step {first}" if first == step - 1 else f"the steps {first} to {step - 1}"
        what = f"what they have computed in {doubtful} is" if first < step else "their states are"
        return (
            f"Nothing was updated in step {step}, but {what} to be doubted: test the machines, and go on from a "
            f"checkpoint of at most {sound}"
        )

    def _act(self, rounds: Rounds, verdict: Verdict, step: int, what: str) -> None:
        """Go on without the members that are wrong. Collective."""
        wrong = verdict.wrong
        members = rounds.members
        place = dict(zip(members.worker_ids, members.team.hosts, strict=True))
        hosts = frozenset(place[one] for one in wrong if one in place)
        is_elsewhere = self._last is not None and not (hosts <= self._last[2] and len(set(place.values())) > 1)
        if self._last is not None and wrong and is_elsewhere and step - self._last[0] < AGAIN_WITHIN:
            before = listed(list(self._last[1]))
            raise DivergenceError(
                f"{listed(list(wrong))} has other bits in {what} of step {step} than most members, as {before} had in "
                f"step {self._last[0]}. Two machines that fail so soon after each other are unlikely: the script "
                f"probably decides by the worker. {_CAUSES}",
                sound=self.record.sound([*wrong, *self._last[1]]),
            )
        if not wrong:
            return
        first, sound = self.record.doubtful_from(wrong), self.record.sound(wrong)
        if what == _COPY:  # whose gradients do not show it
            first = sound = max(min(self.record.compared, sound), self.record.begins)
        honest_until = first - 1
        conviction = Conviction(
            worker_ids=wrong,
            step=step,
            honest_until=honest_until,
            sound=sound,
            goes_back=self.then == "go-back" and honest_until < step - 1,
            what=what,
            is_lasting=verdict.is_lasting,
        )
        if self._convict is None:
            raise DivergenceError(
                f"{listed(list(wrong))} computes wrong values: {what} of step {step} has other bits there than on most "
                f"members. {self._doubt(wrong, step)}",
                sound=conviction.sound,
            )
        if not conviction.goes_back and not set(wrong) & set(members.worker_ids):
            return  # lost meanwhile
        self._last = step, wrong, hosts
        if members.worker_ids[members.rank] not in wrong:
            self._convict(conviction)
        rounds.regroup(PeerLost(f"{listed(list(wrong))} computes wrong values, and is to be ended", wrong))


def _of_states(said: Sequence[_Testimony], rounds: Rounds) -> Verdict | None:
    """Return who has another state than most; None: all have the same, or nobody has the majority."""
    for group in rounds.members.state_layout().alike():
        known = [one for one in said if one.worker in group and one.state is not None]
        for arithmetic in dict.fromkeys(one.arithmetic for one in known):
            states = {one.worker: one.state for one in known if one.arithmetic == arithmetic and one.state is not None}
            if len(set(states.values())) > 1 and (verdict := judge_states(states)).kind == "convicted":
                return verdict
    return None


def _of_copies(said: Sequence[_Testimony], step: int, record: Record) -> Verdict | None:
    """Return who has another copy of a sharded optimizer's state than most holders; None: all copies are equal.

    Raises:
        DivergenceError: two holders have different copies, and no third can say who is wrong.
    """
    copies: dict[tuple[int, str, int], dict[str, int]] = {}
    for one in said:
        for name, states in one.held.items():
            for number, digest in states.items():
                copies.setdefault((one.arithmetic, name, number), {})[one.worker] = digest
    for (_, name, _), digests in copies.items():
        if len(set(digests.values())) > 1:
            verdict = judge_states(digests)
            if verdict.kind != "convicted":
                first, second = sorted(digests, key=lambda worker: digests[worker])[:: len(digests) - 1]
                raise DivergenceError(
                    f"at step {step} {COPIES_DIFFER.format(first=first, second=second, what=f'a state of {name}')}",
                    sound=max(record.compared, record.begins),
                )
            return verdict
    return None


def _first_difference(said: Sequence[_Testimony]) -> tuple[int | None, dict[str, int]]:
    """Return the first micro-batch that members of equal arithmetic have computed differently, and their digests."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for one in said:
        for leaf, digest in one.leaves.items():
            found.setdefault((leaf, one.arithmetic), {})[one.worker] = digest
    for (leaf, _), digests in sorted(found.items(), key=lambda item: item[0]):
        if len(set(digests.values())) > 1:
            return leaf, digests
    return None, {}


_CAUSES: Final = (
    "Look for whatever the inner loop, the model, its hooks or the dataset remember of other batches, or take from "
    "elsewhere: a counter, a generator of the script's own, a cache, the clock, run.rank; docs/guarantees.md has what "
    "a micro-batch may depend on"
)


def _undecided(verdict: Verdict, leaf: int, step: int, first: Sequence[str], doubt: str) -> str:
    what = f"micro-batch {leaf} of step {step} was computed by {listed(first)}, and its gradient is not the same"
    if verdict.kind == "many":
        return (
            f"{what}; when all workers computed it again, there were so many results that not one machine is wrong: "
            f"the micro-batch is not deterministic. Nothing was updated. {_CAUSES}"
        )
    hint = (
        f"{verdict.wrong[0]} has got two results for it, and the other worker one, so the machine of "
        f"{verdict.wrong[0]} is probably faulty"
        if len(verdict.wrong) == 1
        else "Each gets its own again: a machine is faulty, or the script decides by the worker"
    )
    return f"{what}; with two workers nobody can say who is wrong (a third one would decide). {hint}. {doubt}"
