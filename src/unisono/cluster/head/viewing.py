"""The run as those who look at it see it: the overview, which the head folds from the events, and what happens.

`unisono.views.page.viewers` tells it to them. Questions are answered by a process of its own
(`unisono.cluster.head.past_reader`).
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Final

import msgspec

from unisono.cluster.head.door import Allowance, Caller, most_connections
from unisono.cluster.head.past_reader import Present, Reading
from unisono.core.events import Event, MachineUsed, StepFinished, WorkerOutput
from unisono.record.overview import Overview, OverviewBuilder, with_sentence
from unisono.views.page.viewers import Feed, Viewers

__all__ = ["Viewing"]

FRESH_S: Final = 0.5
"""For so long an overview counts as the present."""
QUESTIONS_BYTES: Final = 32_768
"""So much of a viewer is read at once; in the mean `QUESTION_BYTES_PER_S`, and of all together `ALL_BYTES_PER_S`."""
QUESTION_BYTES_PER_S: Final = 8_192.0
ALL_BYTES_PER_S: Final = 131_072.0
FEWEST_VIEWERS: Final = 32


class Viewing:
    """Keeps those who look at the run, and what they are to see.

    Args:
        overviews: folds the run that is shown.
        is_first: this head has seen the whole run; else what its viewers are told is read from the run's directory, if
            that can be seen here.
    """

    def __init__(self, overviews: OverviewBuilder, run_id: str, *, is_first: bool) -> None:
        self._run_id = run_id
        self._overviews = overviews
        self._is_whole = is_first
        self._present = Present(self.overview, overviews.past)
        self._reading = Reading(run_id, self._present)
        self._feed = Feed()
        self._viewers = Viewers([self._feed], self._refresh, self._reading.answer)
        self._most = most_connections(FEWEST_VIEWERS)
        self._overview: Overview | None = None
        self._has_failed = False

    # -- what happens --------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Count an event of the run. Called for each, so it only notes it.

        An error in what shows the run is no error of the run: it is printed once.
        """
        try:
            self._overviews.take(event)
        except Exception:
            self._fail()
        if not isinstance(event, StepFinished | MachineUsed | WorkerOutput):
            self._feed.add(msgspec.json.encode(with_sentence(event)))

    def _fail(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            print("unisono: what is shown of the run may be wrong from here on; the run continues", file=sys.stderr)
            traceback.print_exc()

    def reads_from(self, run_dir: str, facts: str) -> None:
        """Note the run's directory, and its description (JSON)."""
        self._present.directory = run_dir
        self._present.described = facts

    def overview(self, *, is_fresh: bool = False) -> Overview:
        """Return the run as it is now; put together at most once a second, or for each call if it has to be fresh."""
        now, known = time.time(), self._overview
        if known is not None and not is_fresh and 0 <= now - known.time < FRESH_S:
            return known
        try:
            found = self._overviews.overview(now)
        except Exception:
            self._fail()
            found = known or Overview(run_id=self._run_id, time=now)
        self._overview = msgspec.structs.replace(found, run_dir=found.run_dir or self._present.directory)
        return self._overview

    # -- viewers -------------------------------------------------------------------------------------

    def why_not(self) -> str:
        """Return why nobody else may watch now; "": somebody may."""
        if len(self._viewers) < self._most:
            return ""
        return (
            f"{self._most} are watching this run already, which is the limit; the limit is a quarter of `ulimit -n`, "
            "at most 4096"
        )

    async def serve(self, connection: Caller) -> None:
        """Talk to a viewer until it goes."""
        connection.slow_down(Allowance(QUESTIONS_BYTES, self._bytes_per_s, time.monotonic))
        await self._viewers.serve(connection)

    def _bytes_per_s(self) -> float:
        return min(QUESTION_BYTES_PER_S, ALL_BYTES_PER_S / max(1, len(self._viewers)))

    async def _refresh(self) -> None:
        found = b"" if self._is_whole else await self._reading.overview()
        self._feed.show(b'"overview":%b' % (found or msgspec.json.encode(self.overview())))

    async def end(self) -> None:
        """Tell all viewers what was the last, as far as they listen, and stop."""
        self._overview = self._overview and msgspec.structs.replace(self._overview, time=0.0)
        self._feed.show(b'"overview":%b' % msgspec.json.encode(self.overview()))
        self._viewers.end()
        await self._reading.end()
