"""Evaluations that were begun with ``wait=False``: what the script holds of one, and the run's state of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from unisono.engine.rounds.evaluation import Totals

__all__ = ["Begun", "BegunEvaluation", "Evaluation"]


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
        self.count = state["count"]
        self.entries = {entry["number"]: BegunEvaluation(**entry) for entry in state["entries"]}
