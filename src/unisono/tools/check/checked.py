"""The inspector of ``unisono check``: each worker writes down what it computes (`unisono.tools.check`)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.cluster.worker import member as members
from unisono.core.errors import DeadlineExceeded, StopInspection
from unisono.core.events import StepResult
from unisono.engine.microbatch.doubts import Doubt
from unisono.engine.rounds.taps import Computed, Loop, Place
from unisono.engine.state.packing import described, digest_of_tensor
from unisono.engine.state.tracked import Tracked
from unisono.script.inspecting import Inspector
from unisono.tools.check.records import (
    Changed,
    DoubtRecord,
    LeafRecord,
    Record,
    Section,
    StatementEvent,
    StateRecord,
    Sum,
    Where,
)
from unisono.tools.check.tracing import Tracer
from unisono.tools.check.value_texts import text_of

__all__ = ["Checked", "TrialSettings"]

WAIT_S: Final = 60.0


class TrialSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one trial.

    Attributes:
        folder: where each worker writes its file of records.
        steps: how many of the run are done.
        traces: write down the statements of the script as well.
        watches: of these, look after each one within a micro-batch whether it has changed a parameter.
        members: how many workers there are to be before the second step, where one joins.
    """

    folder: str
    steps: int
    traces: bool = False
    watches: bool = False
    members: int = 1


class Checked(Inspector):
    """Writes down what one worker of a trial computes.

    Args:
        settings: `TrialSettings` as JSON.
    """

    def __init__(self, settings: str) -> None:
        self._settings = asked = msgspec.json.decode(settings, type=TrialSettings)
        member = members.current()
        worker = member.worker_id if member is not None else "w0"
        self._file = (Path(asked.folder) / f"{worker}.jsonl").open("ab")
        self._tracked: Tracked | None = None
        self._where = Where(-1, "setup")
        self._is_aside = False
        self._tracer = Tracer() if asked.traces else None
        if self._tracer is not None:
            self._tracer.start()

    def before_loop(self, loop: Loop) -> None:
        self._tracked = loop.tracked
        if loop.phase == 0 and loop.steps.start == 0:
            self._add_state(0)
        self._enter(Where(loop.steps.start, "head"))

    def before_step(self, step: int) -> None:
        if step >= self._settings.steps:
            self._enter(Where(step, "head"))
            raise StopInspection("")
        if step > 0:
            self._wait_for_others()

    def looks_at(self, place: Place) -> bool:
        return True

    def before_microbatch(self, place: Place, batch: Any) -> None:
        self._enter_leaf(place)
        if self._settings.watches and self._tracer is not None and self._tracked is not None:
            self._tracer.watch(_Watch(self._tracked).changed)

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        where = _at("leaf", place)
        if self._tracer is not None:
            self._tracer.watch(None)
        self._add(LeafRecord(where, repr(computed.loss), dict(computed.fingerprint.parts), place.aside))
        self._enter(_at("between", place))

    def after_sum(self, place: Place, result: StepResult) -> None:
        totals = {name: text_of(value) for name, value in result.totals.items()}
        self._add(Sum(_at("sum", place), result.digest, totals))
        self._enter(_at("update", place))

    def after_step(self, result: StepResult) -> None:
        self._enter(Where(result.step + 1, "head"))
        self._add_state(result.step + 1)

    def doubted(self, doubt: Doubt) -> None:
        self._add(DoubtRecord(*doubt))

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.stop()
        self._enter(self._where)
        self._file.close()

    # -- inside --------------------------------------------------------------------------------------

    def _add(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()  # on its way to the disk now: a kill loses no record

    def _add_state(self, step: int) -> None:
        assert self._tracked is not None
        parts: dict[str, str] = {}
        for name, value in self._tracked.compared().items():
            parts |= described(value, name)
        shared = tuple(f"{name}[" for name in self._tracked.sharded)  # of which each worker holds a part of its own
        told = {path: text for path, text in parts.items() if not path.startswith(shared) or "['param_groups']" in path}
        self._add(StateRecord(step, told))

    def _enter(self, where: Where) -> None:
        """Begin a section, and write down the one that ends."""
        if self._tracer is not None:
            for name, file, statement in self._tracer.take_changes():
                self._add(Changed(self._where, name, file, statement.line, statement.text))
            events, is_cut = self._tracer.take()
            self._add_section(self._where, events, is_cut=is_cut)
            self._is_aside = False  # only micro-batches are computed aside
            for batch, evaluated in sorted(self._tracer.take_evaluated().items()):
                self._add_section(Where(self._where.step, "evaluation", leaf=batch), evaluated, is_cut=is_cut)
        self._where, self._is_aside = where, False

    def _enter_leaf(self, place: Place) -> None:
        """Begin the section of a micro-batch. What has run since the one before was the script's own, up to the head
        of its inner loop, and below that the dataset.
        """
        if self._tracer is not None:
            depth = self._tracer.depth
            events, is_cut = self._tracer.take()
            self._add_section(self._where, [each for each in events if each.depth <= depth], is_cut=is_cut)
            self._is_aside = place.aside
            fetched = [each for each in events if each.depth > depth]
            self._add_section(_at("fetch", place), fetched, is_cut=is_cut)
        self._where, self._is_aside = _at("leaf", place), place.aside

    def _add_section(self, where: Where, events: list[StatementEvent], *, is_cut: bool) -> None:
        if events:
            self._add(Section(where, events, self._is_aside, is_cut))

    def _wait_for_others(self) -> None:
        """Block until a worker that has come instead of a lost one is about to be admitted, so that it takes part."""
        member = members.current()
        if member is None or self._settings.members < 2:
            return
        deadline, notice = time.monotonic() + WAIT_S, member.latest()
        with contextlib.suppress(DeadlineExceeded):
            while notice is not None and len(notice.members) < self._settings.members:
                notice = member.wait_notice(notice.generation, deadline - time.monotonic())


class _Watch:
    """Looks at the bits of all parameters."""

    def __init__(self, tracked: Tracked) -> None:
        self._named = list(tracked.named_parameters())
        self._digests = self._now()

    def changed(self) -> str:
        """Return the first parameter that has changed since the last call; "" if none has."""
        before, self._digests = self._digests, self._now()
        pairs = zip(self._named, before, self._digests, strict=True)
        return next((name for (name, _), then, now in pairs if then != now), "")

    def _now(self) -> list[int]:
        return [digest_of_tensor(parameter) for _, parameter in self._named]


def _at(stage: str, place: Place) -> Where:
    return Where(place.step, stage, place.turn, place.replica, place.inner, place.leaf)
