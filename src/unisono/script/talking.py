"""What the workers of a run say to each other: barriers, values, the order in which they run a block of the script.

A call is made in one of three places:

====================================  ==========================================================================
before the first step of ``run.steps``  no worker has joined yet: the head decides (`membership.talk_rules`), and
                                        keeps the result for workers that come later
within a training loop                  the members exchange, in a round; workers that come later begin at a later
                                        step and do not make the call
after a training loop                   the members exchange; a worker that comes later skips that loop and makes
                                        the call, so the result is a part of the run's state
====================================  ==========================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch.distributed as dist

from unisono.cluster.worker import member as members
from unisono.core.errors import StepError, UsageError
from unisono.core.messages import TalkAnswer
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.gathering import BlockRound, GroupRound, TalkRound
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.engine.state.tracked import Tracked

__all__ = ["CallPlace", "Talk", "at_once"]

T = TypeVar("T")

ONCE: Final = "the function of run.once"

MAX_EARLY_BYTES: Final = 1 << 20
"""Of a value that is sent before the training, through the head."""


@dataclass(frozen=True, kw_only=True)
class CallPlace:
    """Place of a call in the script."""

    rounds: Rounds
    phases: int
    """Number of training loops that have begun."""
    step: int | None
    """The place of the iteration within the run, in a training loop; None: outside of one."""
    has_joined: bool

    @property
    def is_early(self) -> bool:
        """Whether it is before the training."""
        return not self.has_joined and self.phases == 0

    @property
    def is_skipped(self) -> bool:
        """Whether the run is in a later loop already, and this worker only follows."""
        return not self.has_joined and self.phases > 0


@dataclass(frozen=True)
class _Call:
    """One call, at its place."""

    kind: str
    place: CallPlace
    number: int
    """From 0, of the calls at this place."""

    @property
    def title(self) -> str:
        where = "after a training loop" if self.place.step is None else "of the step"
        return f"{self.kind} (call {self.number + 1} {where})"


class _Log:
    """The results of the calls after training loops: a part of the run's state."""

    def __init__(self) -> None:
        self._results: dict[int, list[tuple[str, bytes]]] = {}
        """By the number of loops that had begun: (kind, result) of each call."""

    def find(self, call: _Call) -> bytes | None:
        """Return the result of a call that was made before; None: this is the first time.

        Raises:
            StepError: another call was made at this place.
        """
        known = self._results.get(call.place.phases, [])
        if call.number >= len(known):
            return None
        kind, result = known[call.number]
        if kind != call.kind:
            raise StepError(
                f"this worker's script is at {call.title}, where the run has called {kind}: all workers, and a script "
                "that resumes from a checkpoint, must make the same calls"
            )
        return result

    def num_after(self, phases: int) -> int:
        """Return how many calls were made when so many loops had begun."""
        return len(self._results.get(phases, []))

    def add(self, call: _Call, result: bytes) -> None:
        self._results.setdefault(call.place.phases, []).append((call.kind, result))

    def state_dict(self) -> Any:
        return [(phases, kind, result) for phases, known in self._results.items() for kind, result in known]

    def load_state_dict(self, state: Any) -> None:
        self._results = {}
        for phases, kind, result in state:
            kind = "run.all_gather" if kind == "run.gather" else kind  # its name before 0.3
            self._results.setdefault(phases, []).append((kind, result))


class Talk:
    """This worker's part of what the workers say to each other. The methods are collective.

    Args:
        seed: of the run.
    """

    def __init__(self, tracked: Tracked, seed: int) -> None:
        self._seed = seed
        self._log = _Log()
        tracked.own("talk", self._log)
        self._where: tuple[int, int | None] | None = None
        self._num_here = 0
        self._num_early = 0
        self._block = ""
        """The call whose block or function the script is in; "": it is in none."""
        self._then: Callable[[], None] | None = None

    @property
    def keeps(self) -> bool:
        """Whether the script is in the function of ``run.once``, whose result is kept."""
        return self._block == ONCE

    def repeats(self, phases: int) -> bool:
        """Return whether the run has made calls after the last of so many loops. Local."""
        return self._log.num_after(phases) > 0

    def when_repeated(self, then: Callable[[], None]) -> None:
        """Call this once, when the script has repeated the last of the calls that the run has made. Local."""
        self._then = then

    def check_repeated(self) -> None:
        """Check, where the next loop begins, that the script has repeated these calls.

        Raises:
            StepError: it has not.
        """
        if self._then is not None:
            raise StepError(
                "the run resumed from a checkpoint that was written after a training loop (by run.save, or by run.log "
                "with the figure of keep_best), and this script did not come to that call before its next run.steps: a "
                "script that resumes from a checkpoint must make the same calls"
            )

    def barrier(self, place: CallPlace) -> None:
        self._say(self._call("run.barrier", place), bytes)

    def broadcast(self, place: CallPlace, value: Any) -> Any:
        call = self._call("run.broadcast", place)

        def value_of_main() -> bytes:  # asked again after a loss, when this worker may have become the first one
            is_main = place.is_early or place.rounds.members.rank == 0
            return _encoded(value, call) if is_main else b""

        return from_bytes(self._say(call, value_of_main, num_kept=1)[0])

    def computed(self, place: CallPlace, function: Callable[[], Any]) -> Any:
        """Return what the function returns on the main worker, or has returned when the run was here."""
        call = self._call("run.once", place)
        if not place.is_early and self._is_over(call):
            return from_bytes(self._find(call)[0])
        with self._within(ONCE):
            own = _encoded(function(), call)
        return from_bytes(self._say(call, lambda: own, num_kept=1)[0])

    def all_gather(self, place: CallPlace, value: Any) -> list[Any]:
        call = self._call("run.all_gather", place)
        own = _encoded(value, call)
        return [from_bytes(one) for one in self._say(call, lambda: own)]

    @contextmanager
    def main_first(self, find_place: Callable[[], CallPlace]) -> Iterator[bool]:
        place = find_place()
        call = self._call("run.main_first", place)
        with self._within("`with run.main_first()`"):
            if place.is_early:
                yield from self._early_block(call)
            elif self._is_over(call):
                self._find(call)
                yield False
            else:
                yield from self._first_block(call)
        # The first worker may have drawn numbers, e.g. for data that the others find made.
        seed_at(self._seed, "main_first", place.phases, -1 if place.step is None else place.step, call.number)

    def process_group(self, place: CallPlace) -> dist.ProcessGroup:
        call = self._call("run.process_group", place)
        if place.step is None:
            raise UsageError(
                "run.process_group connects the workers that take part in the training; call it inside run.steps, "
                "before or after `for batch in step`"
            )
        round_ = GroupRound(place.rounds, call.title)
        for _ in place.rounds.play(round_):
            pass
        assert round_.group is not None
        return round_.group

    def once(self, place: CallPlace, kind: str, make: Callable[[], Generator[Any, None, T]]) -> Generator[Any, None, T]:
        """Yield what ``make`` yields, and return what it returns or has returned when the run was here.

        Args:
            make: returns plain data and tensors. Called where there is no such result.
        """
        call = self._call(kind, place)
        if place.is_early or place.step is not None:
            return (yield from make())
        if (known := self._known(call)) is not None:
            found: T = from_bytes(known)
            return found
        result = yield from make()
        if place.has_joined:
            self._log.add(call, to_bytes(result))
        return result

    # -- inside --------------------------------------------------------------------------------------

    def _call(self, kind: str, place: CallPlace) -> _Call:
        """Count a call."""
        if self._block:
            raise UsageError(
                f"{kind} was called inside {self._block}, where other workers wait or are elsewhere: call it after that"
            )
        where = (place.phases, place.step)
        if where != self._where:
            self._where, self._num_here = where, 0
        self._num_here += 1
        return _Call(kind, place, self._num_here - 1)

    def _say(self, call: _Call, value: Callable[[], bytes], num_kept: int | None = None) -> list[bytes]:
        """Return the values of all workers, or the first ones of them."""
        place = call.place
        if place.is_early:
            return self._say_early(call, value())
        if self._is_over(call):
            return self._find(call)
        round_ = TalkRound(place.rounds, call.title, value)
        for _ in place.rounds.play(round_):
            pass
        return self._keep(call, round_.values[:num_kept])

    @contextmanager
    def _within(self, block: str) -> Iterator[None]:
        """Return a context in which no call may be made."""
        self._block = block
        try:
            yield
        finally:
            self._block = ""

    def _is_over(self, call: _Call) -> bool:
        """Return whether the run has made this call, which is not an early one."""
        place = call.place
        return place.step is None and (place.is_skipped or self._known(call) is not None)

    def _known(self, call: _Call) -> bytes | None:
        """Return the result of a call that the run has made before; None: this is the first time."""
        known = self._log.find(call)
        if self._then is not None and call.number + 1 >= self._log.num_after(call.place.phases):
            then, self._then = self._then, None
            then()
        return known

    def _find(self, call: _Call) -> list[bytes]:
        """Return the result of a call that the run has made before."""
        known = self._log.find(call)
        if known is None:
            raise StepError(
                f"this worker's script is at {call.title}, and the run has made no such call there: all workers, and a "
                "script that resumes from a checkpoint, must make the same calls"
            )
        found: list[bytes] = from_bytes(known)
        return found

    def _keep(self, call: _Call, values: Sequence[bytes]) -> list[bytes]:
        """Keep a result for workers that come to this call later."""
        kept = list(values)
        if call.place.step is None:
            self._log.add(call, to_bytes(kept))
        return kept

    def _say_early(self, call: _Call, value: bytes) -> list[bytes]:
        if len(value) > MAX_EARLY_BYTES:
            raise UsageError(
                f"{call.kind} was given {len(value):,} bytes; before the first step of run.steps values go through the "
                f"head, and may have {MAX_EARLY_BYTES:,}: write large data to a file, or call it within run.steps"
            )
        if members.current() is None:
            return [value]
        return self._ask(call, value)[1].values

    def _ask(self, call: _Call, value: bytes = b"") -> tuple[int, TalkAnswer]:
        """Make a call before the training; returns its number and the head's answer."""
        member, number = members.current(), self._num_early
        assert member is not None
        self._num_early += 1
        with call.place.rounds.team.waiting():
            answer = member.call_others(number, call.kind, value)
        if answer.error:
            raise StepError(answer.error)
        return number, answer

    def _early_block(self, call: _Call) -> Iterator[bool]:
        member = members.current()
        if member is None:
            yield True
            return
        number, answer = self._ask(call)
        try:
            yield answer.is_first
        except BaseException:
            if answer.is_first:
                member.was_first(number, ok=False)
            raise
        if answer.is_first:
            member.was_first(number, ok=True)
        self._ask(dataclasses.replace(call, kind=f"the end of {call.kind}"))

    def _first_block(self, call: _Call) -> Iterator[bool]:
        rounds = call.place.rounds
        playing = rounds.play(BlockRound(rounds, call.title))
        is_first = next(playing, self) is not self
        try:
            with rounds.team.waiting():  # a download may take long, and is nobody's fault
                yield is_first
        except BaseException:
            playing.close()
            raise
        if is_first:
            for _ in playing:
                pass
        for _ in rounds.play(TalkRound(rounds, f"the end of {call.title}", bytes)):
            pass
        self._keep(call, [])


def at_once(make: Callable[[], T]) -> Generator[Any, None, T]:
    """Return what ``make`` returns, as a generator that yields nothing, for `Talk.once`."""
    yield from ()
    return make()


def _encoded(value: Any, call: _Call) -> bytes:
    return to_bytes(value, f"the value of {call.kind}")
