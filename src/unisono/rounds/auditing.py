"""Audits: what follows when two members have computed different values. `unisono.decisions.audits` has the rules.

The digests travel with the sums of a step, so all members see the same difference after the commit, before anything is
updated. Then, in a step where there is one:

1. all members say which digests they have (`unisono.rounds.testimony`), in a round of its own. When it is over, all of
   them have seen the commit of the step, and nobody needs a sum of it any more;
2. all compute the micro-batch in question once more, and some others, and say what has come out, in another round;
3. those that are right ask the head to end the ones that are wrong, meet in the next generation, and do the whole step
   again. Nothing was updated, so nothing of the wrong values is left.

A loss at any of these points is survived as in all rounds. A member that has seen the commit of the step and is ahead
tells those that sum again without a lost member that there is a difference (`StepTelemetry.disputed`). A wrong member
that is lost is named as well: by what it has told with the sums.

With a delay (`unisono.rounds.pipeline`) the same happens when the gradient is about to be applied, and all steps whose
sums are made since then are done again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import msgspec

from unisono.decisions.audits import NOTHING, Part, Record, Verdict, digest_of, judge, key_of, parts, tried
from unisono.decisions.plan import Plan
from unisono.errors import DivergenceError, PeerLost
from unisono.messages import Convicted
from unisono.rounds.life import Rounds
from unisono.rounds.members import Members
from unisono.rounds.talking import TalkRound
from unisono.rounds.testimony import (
    CAUSES,
    Repeats,
    Testimony,
    Told,
    Trial,
    first_difference,
    named,
    of_copies,
    of_lost,
    of_states,
    pairs_of,
    told_of,
    undecided,
)
from unisono.spec import AuditThen
from unisono.telemetry import StepTelemetry
from unisono.words import count, listed

__all__ = ["Audits"]

MOST_VAIN: Final = 5
"""So often nobody may remember what differed in one step, before the memory of a machine is taken for faulty."""
AGAIN_WITHIN: Final = 100
"""So many steps after a worker was found to be wrong another one is not believed to be: the script is the cause."""


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
        self._told = Told()
        self._is_disputed = False
        self._last: tuple[int, tuple[str, ...], frozenset[str]] | None = None  # (step, who was wrong, their hosts)
        self._digests: dict[str, str] = {}
        self._vain = (-1, 0)  # (step, how often nothing was found in it)

    # -- a step --------------------------------------------------------------------------------------

    def begin(self, plan: Plan, members: Members, step: int, turn: int) -> Part:
        """Return this member's part in the audit of a step that begins. Local.

        Args:
            plan: of the step, in which nothing is computed yet.
            step: of the run.
            turn: pass over its global batch.
        """
        found = self._parts(plan, members, step, turn)
        self._begun = {at: known for at, known in self._begun.items() if at[0] + self.record.lag >= step - 1}
        self._begun[step, turn] = {key_of(one.own): one.own for one in found if one.own}
        return found[members.rank]

    def is_audited(self, step: int, turn: int) -> bool:
        """Return whether a step that has begun has an audit. Local."""
        return bool(self._begun.get((step, turn)))

    def expected(self, plan: Plan, members: Members, step: int) -> Part:
        """Return this member's part in the audit of a coming step, whose plan is a forecast. Local."""
        return self._parts(plan, members, step, 0)[members.rank]

    def _parts(self, plan: Plan, members: Members, step: int, turn: int) -> Sequence[Part]:
        if members.size < 2 or len(plan.ranges) != members.size or any(plan.kept):
            return (NOTHING,) * members.size
        generation, arithmetics = self._arithmetics
        if generation != members.team.generation:
            arithmetics = (0,) * members.size
        return parts(plan, members.team.hosts, arithmetics, share=self._share, seed=self._seed, step=step, turn=turn)

    def told(self, telemetry: Mapping[str, StepTelemetry], members: Members, step: int, turn: int) -> Told:
        """Return what differs of what the members have sent with the sums of a step. Local, and the same on all.

        Args:
            telemetry: by worker, of those that have summed it.
        """
        groups = members.state_layout(tuple(telemetry)).alike()
        return told_of(telemetry, groups, self._begun.get((step, turn), {}))

    def compare(
        self, telemetry: Mapping[str, StepTelemetry], members: Members, step: int, turn: int, *, copies_differ: bool
    ) -> bool:
        """Compare what the members have sent with the sums of a step. Local, and the same on all members.

        Args:
            telemetry: by worker, of those that have summed it.
            turn: pass over the global batch of the step.
            copies_differ: those of states of sharded optimizers do.

        Returns:
            Whether something differs, so that `settle` has to find out who is wrong.
        """
        if tuple(telemetry) == members.worker_ids:
            self._arithmetics = members.team.generation, tuple(each.arithmetic for each in telemetry.values())
            self._hosts.update(zip(members.worker_ids, members.team.hosts, strict=True))
        self._told = self.told(telemetry, members, step, turn)
        self._is_disputed = (
            copies_differ
            or bool(self._told.pairs or self._told.odd)
            or any(each.disputed for each in telemetry.values())
        )
        if turn == 0:
            self._digests = {}
        self.record.seen(step, {worker: self._hosts.get(worker, "") for worker in telemetry})
        leaves = self._begun.pop((step, turn), {})
        for pair in pairs_of(telemetry):
            if not pair.is_equal:
                continue
            of_pair = leaves.get(pair.key, (pair.key,))
            if turn == 0:
                self._digests[",".join(map(str, of_pair))] = f"{next(iter(pair.digests.values())):016x}"
            if not self._is_disputed:
                self.record.right(step, pair.digests, len(of_pair))
        return self._is_disputed

    @property
    def is_disputed(self) -> bool:
        """Whether members have computed different values in the step that was summed last."""
        return self._is_disputed

    def take_digests(self) -> dict[str, str]:
        """Return, once, the digests of the micro-batches that were audited in the first pass of the last step, by their
        numbers: "3", or "3,7" where a worker had several.
        """
        found, self._digests = self._digests, {}
        return dict(sorted(found.items(), key=lambda item: [int(leaf) for leaf in item[0].split(",")]))

    # -- who is wrong --------------------------------------------------------------------------------

    def settle(
        self, rounds: Rounds, round_: Repeats, leaves: Mapping[int, int], state: int | None
    ) -> Generator[Any, None, bool]:
        """Find out who is wrong, if members have computed different values, and go on without them. Collective then.

        Yields micro-batches to the script.

        Args:
            round_: of the step, which is committed, and whose result is not in force.
            leaves: the digests of what this member has computed in it and another member as well.
            state: the digest of this member's state, if it has taken one.

        Returns:
            Whether the result of the round counts; False: the step is to be done again.

        Raises:
            DivergenceError: nobody can say who is wrong. RunStopped: the run goes back.
        """
        if not self._is_disputed:
            return True
        self._is_disputed = False
        told, self._told = self._told, Told()
        is_found = yield from self.find(rounds, round_, leaves, state, told if told.pairs or told.odd else None)
        if not is_found:
            self._check_vain(round_.number)
            _redo(rounds)
        return False

    def find(
        self, rounds: Rounds, round_: Repeats, leaves: Mapping[int, int], state: int | None, told: Told | None = None
    ) -> Generator[Any, None, bool]:
        """Find out who is wrong, because members have computed different values, and go on without them. Collective.

        The arguments are those of `settle`; ``told`` is what differed of what all were told with the sums. Yields
        micro-batches to the script. Returns whether anything differs of what the members remember.

        Raises:
            DivergenceError: nobody can say who is wrong. RunStopped: the run goes back.
        """
        members = rounds.members.worker_ids
        said = yield from self._ask(rounds, f"the audit of step {round_.number}", leaves, state, told)
        if (verdict := of_states(said, rounds)) is not None:
            what = "its state"
        elif (verdict := of_copies(said, round_.number, self.record)) is not None:
            what = "its copy of an optimizer's state"
        elif (verdict := of_lost(said)) is not None:
            what = "its state"
        elif (difference := first_difference(said)) is not None:
            disputed, pair = difference
            trial = Trial(rounds, round_, tried(disputed, round_.num_leaves))
            yield from rounds.play(trial)
            digests = {one.worker: one.digests for one in trial.results if one.arithmetic == pair.arithmetic}
            number = len(disputed)
            again = {worker: digest_of(each[:number]) for worker, each in digests.items()}
            others = [
                dict(zip(digests, each, strict=True)) for each in list(zip(*digests.values(), strict=True))[number:]
            ]
            verdict = judge(pair.digests, again, others)
            what = named(disputed, round_.unit)
            if verdict.kind != "convicted":
                workers = [*members, *pair.digests]
                first = self.record.doubtful_from(workers, is_lasting=verdict.is_lasting)
                sound = self.record.sound(workers, is_lasting=verdict.is_lasting)
                lost = [one for one in pair.digests if one not in again]
                doubt = _doubt(first, sound, round_.number)
                raise DivergenceError(undecided(verdict, what, round_.number, pair, lost, doubt), sound=sound)
        else:
            return False
        self._act(rounds, verdict, round_.number, what)
        return True

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

    def _ask(
        self, rounds: Rounds, title: str, leaves: Mapping[int, int], state: int | None, told: Told | None
    ) -> Generator[Any, None, list[Testimony]]:
        """Return what all members know, and learn what they know of each other. Collective."""
        members = rounds.members

        def own() -> bytes:
            return msgspec.msgpack.encode(
                Testimony(
                    members.worker_ids[members.rank],
                    members.arithmetic,
                    dict(leaves),
                    state,
                    dict(self.record.passed),
                    self.record.begins,
                    self.record.compared,
                    rounds.tracked.held_digests(),
                    told,
                )
            )

        asked = TalkRound(rounds, title, own)
        yield from rounds.play(asked)
        said = [msgspec.msgpack.decode(each, type=Testimony) for each in asked.values]
        for one in said:
            self.record.learn(one.passed, one.begins, one.compared)
        return said

    def _act(self, rounds: Rounds, verdict: Verdict, step: int, what: str) -> None:
        """Go on without the members that are wrong. Collective."""
        _redo(rounds)  # before the members meet, and report what they have of it
        wrong = verdict.wrong
        if not wrong:
            return
        present = set(rounds.members.worker_ids)
        hosts = frozenset(self._hosts.get(one, "") for one in wrong)
        self._check_first(wrong, hosts, step, what)
        if verdict.is_of_state:
            first = sound = self.record.alike
        else:
            first = self.record.doubtful_from(wrong, is_lasting=verdict.is_lasting)
            sound = self.record.sound(wrong, is_lasting=verdict.is_lasting)
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


def _doubt(first: int, sound: int, step: int) -> str:
    """Return in words what is to be doubted where the run ends because members are wrong at a step."""
    doubtful = f"step {first}" if first == step - 1 else f"the steps {first} to {step - 1}"
    what = f"what they have computed in {doubtful} is" if first < step else "their states are"
    return (
        f"Nothing was updated in step {step}, but {what} to be doubted: test the machines, and go on from a checkpoint "
        f"of at most {count(sound, 'step')}"
    )


def _redo(rounds: Rounds) -> None:
    """Let sums that are made and not applied be made again. Local."""
    if rounds.ahead is not None:
        rounds.ahead.redo()
