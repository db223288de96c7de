"""How the workers leave evaluations to evaluators: by snapshots in the run's directory.

Rank 0 writes a snapshot of the models (`unisono.engine.checkpoint.evaluations`), an evaluator finds it there, and
leaves the totals beside it. Each decision is one that all members take together, by the results of a round, so it does
not matter who has seen what first:

* whether an evaluation is left to evaluators is what rank 0 says, when it has written the snapshot;
* the totals are those of whoever sees them; where somebody sees that no evaluator computes them any more, the members
  compute them, with the models of the snapshot.

An evaluation whose totals not all members have is **under way**. No checkpoint is taken meanwhile, and newcomers come
when its totals are there: so whoever holds the run's state has made the call, and can compute the totals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from unisono.core.errors import CheckpointError, StepError
from unisono.core.plan import Plan
from unisono.engine.checkpoint.evaluations import EvaluationOrder, Snapshots
from unisono.engine.checkpoint.loading import read
from unisono.engine.checkpoint.snapshot import write_whole
from unisono.engine.rounds.evaluation import Totals
from unisono.engine.rounds.gathering import TalkRound
from unisono.engine.rounds.life import CHECKPOINT, EVALUATED, Rounds
from unisono.engine.state.packing import pack, to_bytes, unpack
from unisono.engine.state.tracked import Tracked
from unisono.strategies.evaluators.requests import EvaluationRequest
from unisono.system.faults import point
from unisono.system.fingerprint import fingerprint
from unisono.system.process import tell

__all__ = ["BESIDE", "NAME", "Begun", "BegunEvaluation", "Beside", "Evaluation"]

NAME: Final = "evaluations"
"""Of `Begun` in the run's state."""
TOLD: Final = ("sums", "talk", NAME)
"""What a snapshot has besides the models: what has happened in the loops that the script of an evaluator skips."""
MOST_UNDER_WAY: Final = 4
"""Evaluations under way: each is a copy of the models on the disk. What comes beyond is computed by the workers."""
BESIDE: Final = "run.evaluate(wait=False)"
ROUND_S: Final = 1.0
"""Workers that wait for totals talk so often: an exchange has a timeout."""
LOOK_S: Final = 0.05


class Beside:
    """This member's part in the evaluations that evaluators compute.

    Args:
        directory: of the run; None: it has none, so there are no evaluators.
        patience_s: after so long without progress of an evaluator, the members compute its evaluation.
        reaches: returns whether this member sees the run's directory.
        all_reach: returns whether all of these workers do.
        apart: returns a context for work that is no part of the script's update.
    """

    def __init__(
        self,
        tracked: Tracked,
        begun: Begun,
        directory: Path | None,
        *,
        device: torch.device,
        patience_s: float,
        reaches: Callable[[], bool],
        all_reach: Callable[[Sequence[str]], bool],
        apart: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._tracked = tracked
        self._begun = begun
        self._snapshots = Snapshots(directory, patience_s) if directory is not None else None
        self._device = device
        self._reaches = reaches
        self._all_reach = all_reach
        self._apart = apart
        self._requests: dict[int, EvaluationRequest] = {}  # of the evaluations under way
        self._has_warned = False
        self._looks_at = 0.0
        self._sees_end = False

    # -- the beginning -------------------------------------------------------------------------------

    def begin(self, rounds: Rounds, order: EvaluationOrder, request: EvaluationRequest) -> bool:
        """Leave an evaluation to the evaluators; False: there is none, or they have enough to do. Collective."""
        if self._snapshots is None or rounds.team.num_parts > 1:  # a worker has a part of the models only
            return False
        if len(self._begun.unsettled) > MOST_UNDER_WAY:
            if rounds.members.rank == 0 and not self._has_warned:
                self._has_warned = True
                tell(
                    f"unisono: {MOST_UNDER_WAY} evaluations are waiting for evaluators, so the workers compute that of "
                    f"{order.place} themselves. Use more evaluators (unisono run --evaluators, unisono evaluate) or "
                    "evaluate less often; this is reported once"
                )
            return False
        round_ = _Working(rounds, BESIDE, partial(self._put, rounds, order))
        for _ in rounds.play(round_):
            pass
        if not round_.values[0]:
            return False
        self._requests[order.number] = request
        return True

    def _put(self, rounds: Rounds, order: EvaluationOrder) -> bytes:
        """Write the snapshot, on rank 0; empty: there is none."""
        members = rounds.members
        if members.rank != 0 or self._snapshots is None:
            return b""
        point("evaluation.asked")
        if not self._all_reach(members.worker_ids) or not self._snapshots.has_evaluators():
            return b""
        state = {**self._tracked.seen(), **self._tracked.own_state(TOLD)}
        try:
            self._snapshots.put(
                order,
                lambda folder, more: write_whole(folder, state, rounds.position, fingerprint(str(self._device)), more),
            )
        except OSError as error:
            tell(
                f"unisono: the snapshot for the evaluation of {order.place} cannot be written "
                f"({error.strerror or error}); the workers compute it"
            )
            return b""
        return b"waits"

    # -- the end -------------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether the members wait for totals. Equal on all of them."""
        return bool(self._begun.unsettled)

    def sees_end(self) -> bool:
        """Return whether this member sees that an evaluation under way has come to its end. Local, and cheap."""
        if not self._begun.unsettled or not self._reaches():
            return False
        if (now := time.monotonic()) >= self._looks_at:
            self._looks_at = now + LOOK_S
            self._sees_end = any(self.outcome(number) is not None for number in self._begun.unsettled)
        return self._sees_end

    def outcome(self, number: int) -> bytes | None:
        """Return what this member sees of an evaluation: its totals; empty: no evaluator computes them any more; None:
        they are on the way. Local.
        """
        return self._snapshots.outcome(number) if self._snapshots is not None else b""

    def settle(self, rounds: Rounds) -> None:
        """Wait for all evaluations that are under way, so that the state of the run has their totals. Collective."""
        self.settle_some(rounds, self._begun.unsettled, CHECKPOINT)

    def collect(self, rounds: Rounds) -> None:
        """Take the totals that are there, or wait for all where newcomers come. Collective."""
        with self._apart():
            unsettled, all_are_wanted = self._begun.unsettled, rounds.changes()
            round_ = _Working(rounds, BESIDE, partial(self._hear, unsettled, 0.0, all_are_wanted), EVALUATED)
            for _ in rounds.play(round_):
                pass
            self._conclude(rounds, round_.known)
            if round_.wants_all:  # as all have heard: a member that was behind does not see it by itself
                self.settle_some(rounds, self._begun.unsettled, EVALUATED)

    def settle_some(self, rounds: Rounds, numbers: Sequence[int], kind: str = "talk") -> None:
        """Make the totals of evaluations known to all members, and wait for them. Collective.

        Raises:
            StepError: neither an evaluator nor the members can compute them.
        """
        left = list(numbers)
        while left:
            title = f"the result of evaluation {', '.join(map(str, left))}"
            round_ = _Working(rounds, title, partial(self._hear, left, ROUND_S), kind)
            for _ in rounds.play(round_):
                pass
            if not any(each.reaches for each in round_.seen):
                raise StepError(f"no worker sees the run's directory any longer, so {title} is unknown. {self._advice}")
            self._conclude(rounds, round_.known)
            left = [number for number in left if not self._begun.entries[number].is_settled]

    # -- inside --------------------------------------------------------------------------------------

    def _hear(self, numbers: Sequence[int], wait_s: float, wants_all: bool = False) -> bytes:
        """Wait a while for evaluations; return what this member sees of those that have come to their end. Local."""
        if not self._reaches():
            return msgspec.msgpack.encode(_Seen(False, wants_all))
        deadline = time.monotonic() + wait_s
        while True:
            seen = {number: totals for number in numbers if (totals := self.outcome(number)) is not None}
            if len(seen) == len(numbers) or time.monotonic() >= deadline:
                return msgspec.msgpack.encode(_Seen(True, wants_all, seen))
            time.sleep(LOOK_S)

    def _conclude(self, rounds: Rounds, known: dict[int, bytes]) -> None:
        """Note the totals of evaluations, and compute those that no evaluator does. Collective."""
        for number in sorted(known):
            entry = self._begun.entries[number]
            entry.totals, entry.is_settled = known[number] or self._compute(rounds, number), True
            self._requests.pop(number, None)
            if self._snapshots is not None:
                self._snapshots.remove(number)
        self._sees_end = False

    def _compute(self, rounds: Rounds, number: int) -> bytes:
        """Compute an evaluation that no evaluator does. Collective."""
        snapshots, step = self._snapshots, self._begun.entries[number].step
        assert snapshots is not None
        if rounds.members.rank == 0:
            tell(f"unisono: the workers compute the evaluation of step {step}: {snapshots.why(number)}")
        try:
            _, state = read(snapshots.path(number))
        except CheckpointError as error:
            raise StepError(f"the evaluation of step {step} cannot be computed: {error}. {self._advice}") from error
        with self._in_place(state):
            return to_bytes(self._requests[number].compute(rounds, self._begun.num_done, of_snapshot=True))

    @property
    def _advice(self) -> str:
        return "The run can resume from its newest checkpoint, which is from before that evaluation (--resume)"

    @contextmanager
    def _in_place(self, state: dict[str, Any]) -> Iterator[None]:
        """Have the tracked objects as a snapshot has them, and after the block as they are now, bit by bit."""
        now = pack(self._tracked.seen(), "tracked").copied()
        self._load(state)
        try:
            yield
        finally:
            self._load(unpack(now.skeleton, now.tensors))

    def _load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self._tracked.load_seen(state)


class Evaluation:
    """Totals that are computed beside the training: what ``run.evaluate(..., wait=False)`` returns."""

    def __init__(self, step: int, ask: Callable[[], Totals], known: Callable[[], bool]) -> None:
        self._step = step
        self._ask = ask
        self._known = known
        self._totals: Totals | None = None

    @property
    def step(self) -> int:
        """Number of the step of the run (`Step.number`, from 0) in which the call stands; after a training loop, of the
        step that would come next.
        """
        return self._step

    @property
    def done(self) -> bool:
        """Whether `result` gives the totals at once. It becomes true at different times on different workers: for
        printing, never for deciding.
        """
        return self._totals is not None or self._known()

    def result(self) -> Totals:
        """Return the totals by name; waits for them. Collective: all workers ask at the same place of the script.

        The bits are those of ``run.evaluate(...)`` at the same step, whoever has computed them. If no evaluator does
        so any more, the workers compute them now, with the models of the snapshot.

        Raises:
            UsageError: called within the inner loop.
        """
        if self._totals is None:
            self._totals = self._ask()
        return dict(self._totals)

    def __repr__(self) -> str:
        return f"<evaluation of step {self._step}: {'done' if self.done else 'under way'}>"


class BegunEvaluation(msgspec.Struct, kw_only=True):
    """One evaluation: a part of the run's state."""

    number: int
    step: int
    """Steps of the run that were done at the call."""
    totals: bytes = b""
    """As `to_bytes` gives them; empty: this member does not know them."""
    is_settled: bool = False
    """All members know the totals."""
    is_asked: bool = False
    """The script has asked for the result."""
    stays: bool = False
    """It was begun after a training loop: a worker that comes later makes the same call, and gets the same totals."""


class Begun:
    """The evaluations of a run: a part of its state."""

    def __init__(self) -> None:
        self.entries: dict[int, BegunEvaluation] = {}
        self.count = 0
        self.num_done = 0
        """Calls of ``run.evaluate`` that this worker has taken part in, for rehearsals. Not in the state."""

    def add(self, step: int, *, stays: bool) -> BegunEvaluation:
        """Begin an evaluation; it has the next number."""
        entry = BegunEvaluation(number=self.count, step=step, stays=stays)
        self.entries[entry.number] = entry
        self.count += 1
        return entry

    @property
    def unsettled(self) -> list[int]:
        """Numbers of the evaluations whose totals not all members know, the oldest first."""
        return [number for number, entry in self.entries.items() if not entry.is_settled]

    def state_dict(self) -> Any:
        return {"count": self.count, "entries": [msgspec.structs.asdict(entry) for entry in self.entries.values()]}

    def load_state_dict(self, state: Any) -> None:
        known, self.entries, self.count = self.entries, {}, state["count"]
        for facts in state["entries"]:
            entry = known.get(facts["number"]) or BegunEvaluation(**facts)
            for name, value in facts.items():  # the script may have a handle of it
                setattr(entry, name, value)
            self.entries[entry.number] = entry


class _Seen(msgspec.Struct, frozen=True):
    """What a member says of evaluations."""

    reaches: bool
    """It sees the run's directory."""
    wants_all: bool = False
    """It is about to admit newcomers, and first needs the totals of all."""
    ended: dict[int, bytes] = {}
    """By number, those that have come to their end, as `Beside.outcome` returns them."""


class _Working(TalkRound):
    """Each member does something that may take a while, and says what has come of it."""

    def __init__(self, rounds: Rounds, title: str, work: Callable[[], bytes], kind: str = "talk") -> None:
        super().__init__(rounds, title, lambda: self._said, kind)
        self._work = work
        self._said = b""

    def compute(self, plan: Plan) -> Iterator[object]:
        point("in_talk")
        with self._members.waiting():
            self._said = self._work()
        yield from ()

    @property
    def seen(self) -> list[_Seen]:
        """What the members have seen of evaluations."""
        return [msgspec.msgpack.decode(value, type=_Seen) for value in self.values]

    @property
    def known(self) -> dict[int, bytes]:
        """The evaluations that have come to their end: totals that one has seen count more than that there are none."""
        found: dict[int, bytes] = {}
        for each in self.seen:
            for number, totals in each.ended.items():
                found[number] = found.get(number) or totals
        return found

    @property
    def wants_all(self) -> bool:
        """Whether a member needs the totals of all evaluations."""
        return any(each.wants_all for each in self.seen)
