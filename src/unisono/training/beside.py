"""How the members have an evaluator compute totals beside the training, and compute them themselves where it is lost.

Rank 0 asks the head for an evaluator (`unisono.decisions.membership.evaluators`); if there is one, each member keeps a
copy of the models, and rank 0 gives it to the evaluator. Each decision is one that all members take together, by the
results of a round, so it does not matter who has heard of what first:

* whether an evaluator computes the totals is the answer that rank 0 has got;
* the totals are those of whoever has heard of them; if nobody has, the members compute them from their copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from unisono import member as members
from unisono.decisions.plan import Plan
from unisono.errors import StepError
from unisono.faults import point
from unisono.messages import EvaluationWanted
from unisono.rounds.handover import Handover
from unisono.rounds.life import CHECKPOINT, GIVEN_UP, Rounds
from unisono.rounds.talking import TalkRound
from unisono.secret import key_for
from unisono.state.kept import Kept
from unisono.state.packing import pack, to_bytes
from unisono.state.tracked import Tracked
from unisono.training.begun import Begun
from unisono.training.requests import Request

__all__ = ["BESIDE", "NAME", "SECRET", "Beside", "outcome"]

SECRET: Final = "models for an evaluator"
"""What the key of `unisono.rounds.handover` is derived for."""
NAME: Final = "evaluations"
"""Of `Begun` in the run's state."""
TOLD: Final = ("sums", "talk", NAME)
"""What an evaluator gets besides the models: what has happened in the loops that its script skips."""
MOST_UNDER_WAY: Final = 4
"""Evaluations under way; the next call of ``run.evaluate`` waits for the oldest. Each costs a copy of the models."""
BESIDE: Final = "run.evaluate(wait=False)"
NOBODY: Final = "the evaluations that no evaluator does"


def outcome(number: int) -> bytes | None:
    """Return what this member has heard of an evaluation; see `unisono.evaluationcalls.EvaluationCalls.outcome`."""
    member = members.current()
    return member.evaluations.outcome(number) if member is not None else b""


@dataclass
class _UnderWay:
    """What this member needs of an evaluation that an evaluator computes."""

    request: Request
    kept: Kept
    handover: Handover | None = None


class Beside:
    """This member's part in the evaluations that are computed beside the training.

    It is the `unisono.training.keeping.Awaited` of the run's checkpoints.

    Args:
        apart: returns a context for work that is no part of the script's update.
    """

    def __init__(self, tracked: Tracked, begun: Begun, apart: Callable[[], AbstractContextManager[None]]) -> None:
        self._tracked = tracked
        self._begun = begun
        self._apart = apart
        self._under_way: dict[int, _UnderWay] = {}
        self.has_begun = False
        """An evaluation has begun since the newest reports of all members. Equal on all of them."""

    def close(self) -> None:
        """Give back what is held, whatever happened."""
        for under_way in self._under_way.values():
            if under_way.handover is not None:
                under_way.handover.close()
        self._under_way.clear()

    # -- the beginning -------------------------------------------------------------------------------

    def make_room(self, rounds: Rounds) -> None:
        """Wait for the oldest evaluations, where too many are under way. Collective."""
        if unsettled := self._begun.unsettled:
            given_up = self._given_up(rounds)
            oldest = unsettled[: max(0, len(unsettled) - MOST_UNDER_WAY + 1)]
            self.settle_some(rounds, [one for one in unsettled if one in given_up or one in oldest])

    def begin(self, rounds: Rounds, wanted: EvaluationWanted, request: Request) -> bool:
        """Ask for an evaluator, and get ready for what it needs; False: there is none. Collective."""
        member = members.current()
        if member is None:
            return False
        handover: Handover | None = None

        def ask() -> bytes:  # again after a loss, when this worker may have become the first one
            nonlocal handover
            if rounds.members.rank != 0:
                return b""
            point("evaluation.asked")
            if handover is None:
                secret = key_for(member.spec.token, SECRET)
                try:
                    handover = Handover(member.info.address, secret, member.spec.run.timeout_s)
                except OSError:
                    return b""  # no port can be had here
            question = msgspec.structs.replace(wanted, address=member.info.address, port=handover.port)
            with rounds.members.waiting():
                return b"taken" if member.evaluations.ask(question) else b""

        round_ = TalkRound(rounds, BESIDE, ask)
        is_taken = False
        try:
            for _ in rounds.play(round_):
                pass
            is_taken = any(round_.values)
        finally:
            if handover is not None and not is_taken:
                handover.close()
        if not is_taken:
            return False
        kept = Kept(self._tracked)
        if handover is not None:
            handover.give(kept.packed, pack(self._tracked.own_state(TOLD)).copied())
        self._under_way[wanted.number] = _UnderWay(request, kept, handover)
        self.has_begun = True
        return True

    # -- the end -------------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether this member lacks totals, so that a checkpoint has to wait. Local, and not equal on all."""
        return any(not outcome(number) for number in self._under_way)

    @property
    def is_given_up(self) -> bool:
        """Whether this member has heard of an evaluation that no evaluator does it any more. Local."""
        return bool(self._heard_given_up())

    def settle(self, rounds: Rounds) -> None:
        """Wait for all evaluations that are under way, so that the state of the run has their totals. Collective."""
        self.settle_some(rounds, self._begun.unsettled, CHECKPOINT)

    def settle_given_up(self, rounds: Rounds) -> None:
        """Compute the evaluations that no evaluator does any more, as far as a member has heard of it. Collective."""
        with self._apart():
            self.settle_some(rounds, self._given_up(rounds, GIVEN_UP))

    def settle_some(self, rounds: Rounds, numbers: Sequence[int], kind: str = "talk") -> None:
        """Make the totals of evaluations known to all members, and wait for them. Collective.

        Raises:
            StepError: nobody computes one of them any more, and this member has no copy of the models.
        """
        if not numbers:
            return
        round_ = _SettleRound(rounds, numbers, partial(self._hear, rounds), kind)
        for _ in rounds.play(round_):
            pass
        known = round_.known
        for number in numbers:
            self._conclude(number, known.get(number) or self._compute(rounds, number))
        if (member := members.current()) is not None:
            member.evaluations_open(self._begun.unsettled, below=self._begun.count)

    # -- inside --------------------------------------------------------------------------------------

    def _heard_given_up(self) -> list[int]:
        """Return the evaluations of which this member has heard that no evaluator does them. Local."""
        return [one for one in self._begun.unsettled if outcome(one) == b""]

    def _given_up(self, rounds: Rounds, kind: str = "talk") -> list[int]:
        """Return the evaluations of which a member has heard that no evaluator does them. Collective."""
        round_ = TalkRound(rounds, NOBODY, lambda: msgspec.msgpack.encode(self._heard_given_up()))
        round_.kind = kind
        for _ in rounds.play(round_):
            pass
        return sorted({one for value in round_.values for one in msgspec.msgpack.decode(value, type=list[int])})

    def _hear(self, rounds: Rounds, number: int) -> bytes:
        """Return the totals of an evaluation, when an evaluator has sent them; empty: none does it any more."""
        entry, member = self._begun.entries[number], members.current()
        if entry.totals or number not in self._under_way or member is None:
            return entry.totals
        return member.evaluations.wait(number, rounds.team.check)

    def _compute(self, rounds: Rounds, number: int) -> bytes:
        """Compute an evaluation that no evaluator does. Collective."""
        under_way = self._under_way.get(number)
        if under_way is None:
            raise StepError(
                f"the evaluation of step {self._begun.entries[number].step} was lost with its evaluator, and this "
                "worker has come later and lacks the models of that step"
            )
        with under_way.kept.in_place():
            return to_bytes(under_way.request.compute(rounds, self._begun.num_done))

    def _conclude(self, number: int, totals: bytes) -> None:
        entry = self._begun.entries[number]
        entry.totals, entry.is_settled = totals, True
        under_way = self._under_way.pop(number, None)
        if under_way is not None and under_way.handover is not None:
            under_way.handover.close()
        if (member := members.current()) is not None:
            member.evaluations.forget(number)


class _SettleRound(TalkRound):
    """Makes known to all members the totals that one of them has; before that, each waits until it has heard."""

    def __init__(self, rounds: Rounds, numbers: Collection[int], hear: Callable[[int], bytes], kind: str) -> None:
        def heard() -> bytes:
            return msgspec.msgpack.encode({number: hear(number) for number in numbers})

        super().__init__(rounds, f"the result of evaluation {', '.join(map(str, numbers))}", heard)
        self.kind = kind
        self._hear = hear
        self._numbers = numbers

    def compute(self, plan: Plan) -> Iterator[object]:
        point("in_talk")
        with self._members.waiting():
            for number in self._numbers:
                self._hear(number)
        yield from ()

    @property
    def known(self) -> dict[int, bytes]:
        """The totals that a member has, by number; those that no member has are left out."""
        found: dict[int, bytes] = {}
        for value in self.values:
            heard = msgspec.msgpack.decode(value, type=dict[int, bytes])
            found.update({number: totals for number, totals in heard.items() if totals})
        return found
