"""Replay: compute a run again up to a step, compare each step with the journal, and look into micro-batches."""

from __future__ import annotations

import bdb
import json
import math
import pdb
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import torch

from unisono.core.errors import StopInspection
from unisono.core.events import StepResult
from unisono.core.fingerprints import other_arithmetic
from unisono.core.replay_rules import (
    LEFT,
    Replay,
    audited_with,
    compare_audits,
    find_difference,
    seconds_left,
)
from unisono.core.words import count, duration, listed
from unisono.engine.rounds.taps import Computed, Loop, Place
from unisono.record.journal import Line, read
from unisono.record.journal.lines import plain
from unisono.script.inspecting import Inspector
from unisono.system import accelerators
from unisono.system.fingerprint import fingerprint
from unisono.system.process import tell
from unisono.system.stacks import frame_outside
from unisono.tools.replay.hunting import Hunt

__all__ = ["Against", "Replaying"]

TELL_EVERY_S: Final = 5.0
DIFFERS: Final = 1
"""Exit code where a step is not that of the journal."""
NOT_THERE: Final = 2
"""Exit code where the run has no such step or micro-batch."""


class Replaying(Inspector):
    """Compares the steps of a run with the journal, and looks into the micro-batches of one.

    Args:
        settings: a `Replay` as JSON.
    """

    def __init__(self, settings: str) -> None:
        self._asked = msgspec.json.decode(settings, type=Replay)
        self._against = Against(Path(self._asked.run))
        self._digests: dict[int, int] = {}  # of the micro-batches that are looked at, as an audit has them
        self._beside = self._audited_with()
        self._loop: Loop | None = None
        self._first = -1
        self._began = self._told = time.monotonic()
        self._other_arithmetic: list[str] = []
        self._differs = ""
        self._before: dict[str, Any] = {}
        self._batch: Any = None
        self._generators: dict[str, torch.Tensor] = {}
        self._has_looked = False
        self._num_leaves = 0  # of the step that is looked into, as far as they have come
        self._hunt: Hunt | None = None
        self._unread: list[str] = []  # what was found in a micro-batch that nobody has asked for
        self._place: Place | None = None  # the newest micro-batch of the pass that is looked into
        self._is_over = False

    # -- on the way ----------------------------------------------------------------------------------

    def before_loop(self, loop: Loop) -> None:
        self._loop = loop
        if self._asked.step in loop.steps:
            self._check(loop)
        if self._first >= 0:
            return
        self._first = loop.steps.start
        self._began = self._told = time.monotonic()
        self._other_arithmetic = other_arithmetic(self._asked.fingerprint, fingerprint(str(loop.device)))
        if self._other_arithmetic:
            tell(
                f"unisono: this machine's arithmetic differs from the run's: {'; '.join(self._other_arithmetic)}. So "
                "the bits may differ: values can be inspected, but do not expect equal digests"
            )
        tell(f"unisono: recomputing {_steps(self._first, self._asked.step)} again")

    def _check(self, loop: Loop) -> None:
        """Raise StopInspection if the step has no such micro-batch or replica."""
        asked, replicas = self._asked, _number(loop, "replicas", 0)
        if not replicas and (asked.replica >= 0 or asked.inner >= 0):
            raise StopInspection(f"step {asked.step} is no round of local steps: it has no replicas", NOT_THERE)
        for name, value, number in (
            ("micro-batches", asked.leaf, _number(loop, "microbatches", 1) // max(1, replicas)),
            ("replicas", asked.replica, replicas),
            ("inner steps", asked.inner, _number(loop, "inner_steps", 0)),
        ):
            if value >= max(1, number):
                raise StopInspection(f"the {name} of step {asked.step} are 0 to {number - 1}; got {value}", NOT_THERE)

    def after_step(self, result: StepResult) -> None:
        line, difference = self._against.compare(result)
        if difference:
            self._note_difference(difference)
        if result.step >= self._asked.step:
            self._is_over = True
            raise self._end(result, line)
        if (now := time.monotonic()) - self._told >= TELL_EVERY_S:
            self._told = now
            self._tell_progress(result.step + 1, now)

    def _note_difference(self, difference: str) -> None:
        if self._differs:
            return
        self._differs = difference
        if not self._other_arithmetic and not self._asked.looks:
            raise StopInspection(f"{self._differs}\n{self._equal_words()}\n{self._causes()}", DIFFERS)
        tell(f"unisono: {self._differs}")

    def _tell_progress(self, done: int, now: float) -> None:
        total = self._asked.step + 1 - self._first
        left = seconds_left(done - self._first, total, now - self._began)
        more = f", {duration(left)} left" if left is not None else ""
        tell(f"unisono: {count(done - self._first, 'step')} of {total} computed again{more}")

    # -- the micro-batches that are looked at ---------------------------------------------------------

    def _audited_with(self) -> tuple[int, ...]:
        """Return the micro-batches whose digests the run has together with that of the wanted one."""
        asked = self._asked
        if not asked.looks or asked.leaf < 0 or asked.turn or asked.replica >= 0:
            return ()
        line = Against(Path(asked.run)).line_of(asked.step)
        return audited_with(_audits_of(line), asked.leaf)

    def _is_beside(self, place: Place) -> bool:
        at = (self._asked.step, 0, -1)
        return place.leaf in self._beside and (place.step, place.turn, place.replica) == at

    def looks_at(self, place: Place) -> bool:
        if place.step == self._asked.step and place.turn == self._asked.turn:
            self._num_leaves = max(self._num_leaves, place.leaf + 1)
            self._place = place
        if place.aside:
            return False
        is_before = self._asked.anomaly and self._is_before(place)
        return self._is_wanted(place) or self._is_beside(place) or is_before

    def _is_wanted(self, place: Place) -> bool:
        return self._asked.is_wanted(
            step=place.step, turn=place.turn, leaf=place.leaf, replica=place.replica, inner=place.inner
        )

    def _is_before(self, place: Place) -> bool:
        """Return whether a micro-batch comes before the wanted one of its step, which is not reached if it fails."""
        wanted = msgspec.structs.replace(place, leaf=self._asked.leaf)
        return place.leaf < self._asked.leaf and self._is_wanted(wanted)

    def before_microbatch(self, place: Place, batch: Any) -> None:
        asked = self._asked
        if not self._is_wanted(place):
            if asked.anomaly and self._is_before(place):
                assert self._loop is not None
                self._hunt = Hunt(self._loop.tracked.modules, self._unread.append)
            return
        self._has_looked = True
        if asked.save:
            self._keep(batch)
        if asked.anomaly:
            assert self._loop is not None
            self._hunt = Hunt(self._loop.tracked.modules, tell)
        if asked.debugger and batch is not None:
            tell(f"unisono: before {_named(place)}")
            _stop_in_script(self._left)

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        asked = self._asked
        self._stop_hunting()
        self._unread.clear()
        if place.turn == 0 and place.replica < 0:
            self._digests[place.leaf] = computed.fingerprint.digest
        if not self._is_wanted(place):
            return
        print(f"{_named(place)}: {_described(computed)}", flush=True)
        if asked.save:
            print(f"{_named(place)}: written to {self._save(place, computed)}", flush=True)

    def _stop_hunting(self) -> None:
        if self._hunt is not None:
            self._hunt.stop()
            self._hunt = None

    def close(self) -> None:
        self._stop_hunting()
        place, asked = self._place, self._asked
        if self._is_over or self._has_looked or place is None or not asked.looks:
            return
        for words in self._unread:
            tell(words)
        what = f"micro-batch {asked.leaf}" if asked.leaf >= 0 else "what was asked for"
        tell(f"unisono: the script has ended in {_named(place)}, before {what} was reached")

    def _left(self) -> StopInspection:
        """Return how a replay ends whose user leaves the debugger."""
        self._is_over = True
        where = f" in {_named(self._place)}" if self._place is not None else ""
        return StopInspection(f"left{where}\n{self._equal_words()}", LEFT)

    def _keep(self, batch: Any) -> None:
        """Keep what a micro-batch begins with, until its gradients are there."""
        assert self._loop is not None
        modules = self._loop.tracked.modules.items()
        self._before = {
            name: {key: _copied(value) for key, value in module.state_dict().items()} for name, module in modules
        }
        self._batch = _copied(batch)
        self._generators = {"cpu": torch.get_rng_state(), **accelerators.generators()}

    def _save(self, place: Place, computed: Computed) -> Path:
        folder = Path(self._asked.save)
        parts = [("step", place.step), ("pass", place.turn or -1), ("replica", place.replica)]
        parts += [("inner", place.inner), ("microbatch", place.leaf)]
        file = folder / ("-".join(f"{name}-{number}" for name, number in parts if number >= 0) + ".pt")
        content = {
            "place": msgspec.structs.asdict(place),
            "batch": self._batch,
            "models": self._before,
            "generators": self._generators,
            "loss": computed.loss,
            "weight": computed.weight,
            "factor": computed.factor,
            "gradients": {name: one.clone() for name, one in computed.gradients.items()},
            "digest": f"{computed.fingerprint.digest:016x}",
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(content, file)
        except (OSError, RuntimeError) as error:
            raise StopInspection(f"{file} cannot be written: {error}", NOT_THERE) from error
        return file

    # -- the end -------------------------------------------------------------------------------------

    def _end(self, result: StepResult, line: Line | None) -> StopInspection:
        if self._asked.looks and not self._has_looked:
            return StopInspection(f"step {result.step} {self._lacks()}", NOT_THERE)
        audits, is_wrong = self._audits(line)
        here = f"{audits}step {result.step}: loss {result.loss:.6g}, digest {result.digest}"
        if self._differs and self._other_arithmetic:
            there = f"; in the journal loss {line.get('loss')}, digest {line.get('digest')}" if line is not None else ""
            return StopInspection(
                f"{here}{there}\n{self._equal_words()}, which is expected: {'; '.join(self._other_arithmetic)}. A "
                "loss that is far off would not be",
                DIFFERS,
            )
        if self._differs or (is_wrong and not self._other_arithmetic):
            words = (here, self._differs, self._equal_words(), self._causes())
            return StopInspection("\n".join(filter(None, words)), DIFFERS)
        if line is None:
            return StopInspection(f"{here}\nthe journal has no line of this step to compare. {self._equal_words()}")
        return StopInspection(f"{here}, as in the journal\n{self._equal_words()}")

    def _lacks(self) -> str:
        """Return what the step does not have, of what was asked for."""
        if not self._num_leaves:
            return f"has no pass {self._asked.turn}"
        return f"has the micro-batches 0 to {self._num_leaves - 1}, and not {self._asked.leaf}"

    def _audits(self, line: Line | None) -> tuple[str, bool]:
        """Compare the micro-batches that were looked at with those that the run has audited; returns words, and whether
        one differs.
        """
        compared = compare_audits(_audits_of(line), self._digests)
        words = "".join(
            f"{_listed(leaves)}: digest {here}, and "
            f"{'the run has audited the same' if here == there else f'the run has audited {there}'}\n"
            for leaves, there, here in compared
        )
        return words, any(here != there for _, there, here in compared)

    def _causes(self) -> str:
        if not self._first:
            return CAUSES
        return f"{CAUSES}. {FROM_CHECKPOINT}"

    def _equal_words(self) -> str:
        number = self._against.num_compared
        return (
            f"{count(number, 'step')} {'was' if number == 1 else 'were'} computed again and compared with the journal: "
            f"{self._against.num_equal} equal"
        )

    def at_end(self) -> None:
        end = self._loop.steps.stop if self._loop is not None else 0
        raise StopInspection(
            f"the script ended without doing step {self._asked.step}"
            + (f": its steps are 0 to {end - 1}" if end else ": it has called no run.steps"),
            NOT_THERE,
        )


CAUSES: Final = (
    "with equal arithmetic this has one of these causes: the script or its data have changed; the script depends on "
    "something that is not tracked (docs/guarantees.md); the journal was altered; or a machine of the run computed "
    "wrong values"
)


class Against:
    """Compares steps, in their order, with the journal of a run.

    Attributes:
        num_compared: steps that both have.
        num_equal: those that are equal.
    """

    def __init__(self, run: Path) -> None:
        self._lines = (line for line in read(run) if line["kind"] == "step")
        self._newest: Line | None = {"step": -1}
        self.num_compared = self.num_equal = 0

    def compare(self, result: StepResult) -> tuple[Line | None, str]:
        """Return the journal's line of a step, None if it has none, and what differs, in words; "" if nothing does.

        Raises:
            StopInspection: the journal cannot be read.
        """
        line = self.line_of(result.step)
        if line is None:
            return None, ""
        self.num_compared += 1
        found: dict[str, Any] = json.loads(json.dumps(plain(msgspec.structs.asdict(result))))
        name = find_difference(line, found)
        if not name:
            self.num_equal += 1
            return line, ""
        words = (
            f"step {result.step} is the first that does not match the journal: {name} is {found.get(name)} here, and"
        )
        return line, f"{words} {line[name]} there"

    def line_of(self, step: int) -> Line | None:
        """Return the journal's line of a step, which is not before one that was asked for; None if it has none.

        Raises:
            StopInspection: the journal cannot be read.
        """
        try:
            while self._newest is not None and self._newest["step"] < step:
                self._newest = next(self._lines, None)
        except (ValueError, OSError) as error:
            raise StopInspection(f"the journal cannot be read: {error}", NOT_THERE) from error
        return self._newest if self._newest is not None and self._newest["step"] == step else None


def _audits_of(line: Line | None) -> dict[str, str]:
    audits = line.get("audits") if line is not None else None
    return audits if isinstance(audits, dict) else {}


def _listed(leaves: Sequence[int]) -> str:
    """Return ``micro-batch 3``, or ``micro-batches 3 and 7 together``."""
    if len(leaves) == 1:
        return f"micro-batch {leaves[0]}"
    return f"micro-batches {listed([str(leaf) for leaf in leaves])} together"


FROM_CHECKPOINT: Final = (
    "This replay began at a checkpoint: if --from-beginning gives the journal's bits, the script has state that is not "
    "tracked"
)


def _number(loop: Loop, name: str, default: int) -> int:
    """Return a number of the recipe of a loop."""
    value = loop.recipe.get(name, default)
    return value if isinstance(value, int) else default


def _steps(first: int, last: int) -> str:
    return f"step {last}" if first == last else f"the steps {first} to {last}"


def _named(place: Place) -> str:
    """Return ``micro-batch 3 of step 17``, or ``micro-batch 1 of inner step 4 of replica 0 of round 17``."""
    return f"{place.name} of {'round' if place.replica >= 0 else 'step'} {place.step}"


def _described(computed: Computed) -> str:
    """Return the loss, the weight and the digest of a micro-batch, and which of its gradients are not finite."""
    gradients = computed.gradients
    broken = [name for name, one in gradients.items() if not bool(torch.isfinite(one).all())]
    largest = max(((float(one.abs().max()), name) for name, one in gradients.items() if one.numel()), default=None)
    words = f"loss {computed.loss:.8g}, weight {computed.weight:g}, digest {computed.fingerprint.digest:016x}"
    if broken:
        more = f" and {len(broken) - 8} more" if len(broken) > 8 else ""
        return f"{words}; not finite: the gradient of {listed(broken[:8])}{more}"
    if largest is not None and computed.factor and math.isfinite(largest[0]):
        return f"{words}; largest value of a gradient {largest[0] / computed.factor:.3g}, of {largest[1]}"
    return words


def _copied(value: Any) -> Any:
    """Return a batch with tensors of its own, which the script cannot change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return value


class _Debugger(pdb.Pdb):
    """Ends the replay when the user quits.

    Args:
        left: returns how it ends.
    """

    def __init__(self, left: Callable[[], StopInspection]) -> None:
        super().__init__(nosigint=True)
        self._left = left

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            return super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            raise self._left() from None


def _stop_in_script(left: Callable[[], StopInspection]) -> None:
    """Begin a debugger that stops at the next line of the script.

    Args:
        left: returns how the replay ends if the user quits.
    """
    frame = outer = frame_outside()
    if frame is None:
        return
    debugger = _Debugger(left)
    debugger.reset()
    while outer is not None:
        outer.f_trace = debugger.trace_dispatch
        debugger.botframe = outer
        outer = outer.f_back
    debugger.set_next(frame)
    sys.settrace(debugger.trace_dispatch)
