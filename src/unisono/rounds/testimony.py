"""What members say when some have computed different values, and who is wrong by that.

`unisono.rounds.auditing` asks for it. A member that is wrong may be lost before it is asked: then what all were told
with the sums of the step (`Told`) decides, as far as it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from unisono.decisions.audits import Record, Verdict, judge_states, odd_states
from unisono.decisions.plan import Plan
from unisono.errors import DivergenceError
from unisono.rounds.life import Rounds
from unisono.rounds.talking import TalkRound
from unisono.telemetry import NOT_COMPARED, StepTelemetry
from unisono.words import NAMES_THE_LINE, listed

__all__ = [
    "CAUSES",
    "COPIES_DIFFER",
    "Pair",
    "Repeats",
    "Result",
    "Testimony",
    "Told",
    "Trial",
    "first_difference",
    "named",
    "of_copies",
    "of_lost",
    "of_states",
    "pairs_of",
    "told_of",
    "undecided",
]

COPIES_DIFFER: Final = (
    "{first} and {second} hold copies of {what} that differ. Both have computed them from the same gradients with the "
    "same arithmetic, so one of the machines computes or stores wrong values: its memory, its processor or its GPU is "
    "probably faulty. Go on without that machine, from a checkpoint from before that; the journal says what ran where"
)


class Repeats(Protocol):
    """A round of a step, as an audit needs it (`unisono.rounds.gradient.GradientRound`)."""

    @property
    def unit(self) -> str:
        """What is computed again: "micro-batch"."""

    @property
    def number(self) -> int:
        """Number of the step within the run."""

    @property
    def num_leaves(self) -> int:
        """Of the round."""

    def compute_apart(self, leaf: int) -> Generator[Any, None, int]:
        """Yield a micro-batch to the script, of which nothing is summed; return its digest."""


# -- what all were told with the sums of a step -------------------------------------------------------


class Pair(msgspec.Struct, frozen=True):
    """Two members of equal arithmetic that have computed the same micro-batches."""

    key: int
    """Of the micro-batches (`unisono.decisions.audits.key_of`)."""
    arithmetic: int
    digests: dict[str, int]
    """By worker, of all these micro-batches together: of the one that has summed them, and of its helper."""

    @property
    def is_equal(self) -> bool:
        return len(set(self.digests.values())) == 1


class Told(msgspec.Struct, frozen=True):
    """What differs of what the members have told each other with the sums of a step."""

    pairs: list[Pair] = []
    odd: list[str] = []
    """The workers whose state was not that of most."""
    leaves: dict[int, list[int]] = {}
    """The micro-batches of each pair, by its key."""


def pairs_of(telemetry: Mapping[str, StepTelemetry]) -> list[Pair]:
    """Return the pairs of members that have computed the same micro-batches.

    Args:
        telemetry: of a step, by worker.
    """
    owners = {each.own_leaf: worker for worker, each in telemetry.items() if each.own_leaf != NOT_COMPARED}
    found = []
    for helper, each in telemetry.items():
        owner = owners.get(each.other_leaf, helper)
        if owner != helper and telemetry[owner].arithmetic == each.arithmetic:
            digests = {owner: telemetry[owner].own_digest, helper: each.other_digest}
            found.append(Pair(each.other_leaf, each.arithmetic, digests))
    return found


def told_of(
    telemetry: Mapping[str, StepTelemetry], groups: Sequence[Collection[str]], leaves: Mapping[int, Sequence[int]]
) -> Told:
    """Return what differs.

    Args:
        telemetry: of a step, by worker.
        groups: of workers that must have the same state.
        leaves: by key, the micro-batches of pairs that have computed several.
    """
    pairs = [pair for pair in pairs_of(telemetry) if not pair.is_equal]
    odd: list[str] = []
    for group in groups:
        known = {one: each for one, each in telemetry.items() if one in group and each.compared_step != NOT_COMPARED}
        for arithmetic in dict.fromkeys(each.arithmetic for each in known.values()):
            alike = {one: each.state_digest for one, each in known.items() if each.arithmetic == arithmetic}
            odd += odd_states(alike)
    return Told(pairs, odd, {pair.key: list(leaves.get(pair.key, [pair.key])) for pair in pairs})


# -- what they say when they are asked ----------------------------------------------------------------


class Testimony(msgspec.Struct, frozen=True):
    """What a member knows of a step."""

    worker: str
    arithmetic: int
    leaves: dict[int, int]
    """The digests of the micro-batches that it has computed and another member as well."""
    state: int | None
    """The digest of its state before the step, if it has taken one."""
    passed: dict[str, list[int]]
    """What it knows of the members (`Record.passed`)."""
    begins: int
    compared: int
    held: dict[str, dict[int, int]] = {}
    """By sharded optimizer, the digests of the states that it holds, by the numbers of their tensors."""
    told: Told | None = None
    """None: it has not seen the sums of the step."""


class Result(msgspec.Struct, frozen=True):
    """What has come out when a member has computed micro-batches again."""

    worker: str
    arithmetic: int
    digests: list[int]
    """In the order in which they were asked for."""


class Trial(TalkRound):
    """All members compute micro-batches again, and say what has come out."""

    def __init__(self, rounds: Rounds, round_: Repeats, leaves: Sequence[int]) -> None:
        super().__init__(rounds, f"the trial of {named(leaves, round_.unit)} of step {round_.number}", self._said)
        self._round = round_
        self._leaves = leaves
        self._digests: list[int] = []

    @property
    def results(self) -> list[Result]:
        """Of all members, once the round is over."""
        return [msgspec.msgpack.decode(each, type=Result) for each in self.values]

    def compute(self, plan: Plan) -> Iterator[object]:
        for leaf in self._leaves[len(self._digests) :]:
            digest = yield from self._round.compute_apart(leaf)
            self._digests.append(digest)

    def _said(self) -> bytes:
        own = self._members.worker_ids[self._members.rank]
        return msgspec.msgpack.encode(Result(own, self._members.arithmetic, self._digests))


# -- what follows from it -----------------------------------------------------------------------------


def of_states(said: Sequence[Testimony], rounds: Rounds) -> Verdict | None:
    """Return who has another state than most; None: all have the same, or nobody has the majority.

    The same on all members, also where some have met again since, without a member that has spoken.
    """
    for group in rounds.members.state_layout([one.worker for one in said]).alike():
        known = [one for one in said if one.worker in group and one.state is not None]
        for arithmetic in dict.fromkeys(one.arithmetic for one in known):
            states = {one.worker: one.state for one in known if one.arithmetic == arithmetic and one.state is not None}
            if len(set(states.values())) > 1 and (verdict := judge_states(states)).kind == "convicted":
                return verdict
    return None


def of_copies(said: Sequence[Testimony], step: int, record: Record) -> Verdict | None:
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
                    sound=record.alike,
                )
            return verdict
    return None


def of_lost(said: Sequence[Testimony]) -> Verdict | None:
    """Return who of those that are lost meanwhile had another state than most; None: nobody."""
    told, present = _told(said), {one.worker for one in said}
    lost = tuple(one for one in told.odd if one not in present)
    return Verdict("convicted", lost, True, True) if lost else None


def first_difference(said: Sequence[Testimony]) -> tuple[list[int], Pair] | None:
    """Return the first micro-batch that members of equal arithmetic have computed differently, and their digests.

    Where one of the two is lost, these may be several micro-batches, of which one differs. None: nobody knows of any.
    """
    found: dict[tuple[int, int], dict[str, int]] = {}
    for one in said:
        for leaf, digest in one.leaves.items():
            found.setdefault((leaf, one.arithmetic), {})[one.worker] = digest
    for (leaf, arithmetic), digests in sorted(found.items(), key=lambda item: item[0]):
        if len(set(digests.values())) > 1:
            return [leaf], Pair(leaf, arithmetic, digests)
    told, present = _told(said), {one.worker for one in said}
    for pair in told.pairs:
        if not pair.digests.keys() <= present:
            return told.leaves[pair.key], pair
    return None


def _told(said: Sequence[Testimony]) -> Told:
    return next((one.told for one in said if one.told is not None), Told())


def named(leaves: Sequence[int], unit: str = "micro-batch") -> str:
    """Return in words which micro-batch differs, which is one of these."""
    if len(leaves) == 1:
        return f"{unit} {leaves[0]}"
    return f"{unit} {' or '.join(str(leaf) for leaf in leaves)}"


CAUSES: Final = (
    "Look for whatever the inner loop, the model, its hooks or the dataset remember of other batches, or take from "
    "elsewhere: a counter, a generator of the script's own, a cache, the clock, run.rank; docs/guarantees.md has what "
    f"a micro-batch may depend on. {NAMES_THE_LINE}"
)


def undecided(verdict: Verdict, disputed: str, step: int, pair: Pair, lost: Sequence[str], doubt: str) -> str:
    """Return in words that nobody can say who is wrong.

    Args:
        disputed: the micro-batch, in words.
        lost: members that are lost meanwhile.
        doubt: what is to be doubted.
    """
    first = sorted(pair.digests)
    what = f"{disputed} of step {step} was computed by {listed(first)}, and its gradient is not the same"
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
