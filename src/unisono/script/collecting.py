"""``run.collect`` and ``run.collected``: rows of the samples of an evaluation.

Rows belong to the place of the script where they were collected. Those collected within a step are gone with it. Those
collected after a training loop are a part of the run's state until the next loop begins, so a run that resumes from a
checkpoint of that place has them. A worker that skips the place (it came later) has not: it has what `Talk` keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from unisono.core.errors import StepError, UsageError
from unisono.engine.rounds.evaluation import BatchSums
from unisono.engine.state.rows import join
from unisono.engine.state.tracked import Tracked
from unisono.script.talking import CallPlace, Talk

__all__ = ["Collecting"]

NAME: Final = "rows"
WAY_OUT: Final = 'f1 = run.once(lambda: f1_score(run.collected("labels"), run.collected("found")))'


class Collecting:
    """The rows that this worker has.

    Attributes:
        is_guarded: the script asks whether it is at a part of the run that is over.
    """

    def __init__(self, tracked: Tracked, talk: Talk) -> None:
        self._talk = talk
        tracked.own(NAME, self)
        self._sums: BatchSums | None = None  # of the evaluation that is under way
        self._at: tuple[int, int | None] = (0, None)  # phases and step of the rows
        self._rows: dict[str, list[Tensor]] = {}  # by name and batch, packed
        self._skipped_at: tuple[int, int | None] | None = None
        self._unkept: set[str] = set()  # names that were read where a worker that comes later cannot read them
        self.is_guarded = False

    @contextmanager
    def under_way(self, sums: BatchSums, place: CallPlace) -> Iterator[None]:
        """Return a context in which an evaluation takes what is collected; at its end the rows of all are here."""
        self._sums = sums
        try:
            yield
        finally:
            self._sums = None
        if self._at != (place.phases, place.step):
            self._rows, self._at = {}, (place.phases, place.step)
        self._rows |= sums.collected

    def skips(self, place: CallPlace) -> None:
        """Note that an evaluation of the run is not repeated here."""
        self._skipped_at = (place.phases, place.step)

    def collect(self, rows: Mapping[str, Any]) -> None:
        """Take rows of the batch in hand. Local."""
        if self._sums is None:
            raise StepError(
                "run.collect(...) stands outside of an evaluation: collect rows within `for batch in "
                "run.batches(...)`, or in the function of run.evaluate(dataset, function), without wait=False"
            )
        self._sums.collect(rows)

    def collected(self, name: str, place: CallPlace) -> Any:
        """Return the rows of all samples. Local."""
        if self._sums is not None:
            raise StepError(
                f"run.collected({name!r}) was called inside an evaluation, whose rows are known after its last batch: "
                "call it after that"
            )
        here = (place.phases, place.step)
        known = self._rows if self._at == here else {}
        if name in known:
            if place.step is None and not place.is_early and not self._talk.keeps:
                self._unkept.add(name)
            return join(name, known[name])
        if self._skipped_at == here:
            raise StepError(
                f"run.collected({name!r}) was called in a part of the run that is over, by a worker that came later "
                "or a run that resumed, and no rows are kept there. What is computed of them is kept by run.once: "
                f"{WAY_OUT}"
            )
        raise UsageError(
            f"run.collected({name!r}): no evaluation after the newest training loop (or in this step) has collected "
            f"such rows; there are {sorted(known) or 'none'}. run.collect({name}=...) collects them"
        )

    def begin_loop(self, *, is_watched: bool) -> None:
        """Forget the rows, where a training loop begins. Local.

        Args:
            is_watched: a worker may come later, or the run may resume.
        """
        if self._unkept and is_watched and not self.is_guarded:
            warnings.warn(
                f"run.collected({min(self._unkept)!r}) was called between two training loops, outside of run.once: a "
                "worker that comes later, and a run that resumes later, would end there with an error, because rows "
                f"are not kept. What is computed of them is kept by run.once: {WAY_OUT}",
                stacklevel=4,
            )
        self._rows, self._skipped_at, self._unkept, self.is_guarded = {}, None, set(), False

    # -- a part of the state -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        phases, step = self._at
        return {"phases": phases, "rows": dict(self._rows)} if self._rows and step is None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = (state.get("phases", 0), None)
        self._rows = {name: [one.cpu() for one in batches] for name, batches in state.get("rows", {}).items()}
