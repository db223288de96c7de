"""Questions about a run's past, which a process of its own answers from the run's directory
(`unisono.views.page.reader`).

The head never waits for a disk: it hands a question on, and says so where no answer comes in time. The process has a
low priority, is started at the first question, and ends when nobody has asked for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from unisono.record.history.machines import times_of, use_of
from unisono.record.overview import CurvePoint, Overview, Past
from unisono.record.rundir import PRIVATE
from unisono.system.lifetime import PARENT
from unisono.views.page.answers import MOST_BYTES, answer

__all__ = ["Present", "Reading"]

DEADLINE_S: Final = 20.0
IDLE_S: Final = 60.0
FRESH_S: Final = 1.0
"""For so long an answer counts for the same question of somebody else."""
MOST_WAITING: Final = 100
MOST_CACHED: Final = 200
LINE_BYTES: Final = MOST_BYTES + 1024
PAUSE_S: Final = 5.0
"""Between two starts of the process."""
SLOWEST: Final = 20
"""Answers from the head's memory may take one part in so many of its time."""
ABSENT: Final = b"{}\n"
"""The process does not see the run's directory."""


class Unanswered(Exception):
    """No answer comes; says why."""


class Present:
    """A run of which only the present is known, with its loss: `unisono.views.page.answers.Readable`.

    Args:
        overview: returns the run as it is now.
        past: returns who took part until now.
    """

    def __init__(self, overview: Callable[[], Overview], past: Callable[[], Past]) -> None:
        self.overview, self.past = overview, past
        self.directory = ""
        self.described = ""
        """`facts`, as JSON."""

    @property
    def notes(self) -> list[str]:
        where = f" {self.directory}" if self.directory else ""
        return [
            f"the head's machine does not see the run's directory{where}: only the current state and the loss are "
            f"shown; `unisono watch --web{where}` on a machine that sees the directory shows the whole run"
        ]

    def facts(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            return {key: value for key, value in json.loads(self.described or "{}").items() if key not in PRIVATE}
        return {}

    def names(self) -> list[str]:
        return ["loss"] if self.overview().curve else []

    def span(self) -> tuple[int, int]:
        found = self.overview()
        return (found.curve[0].step, found.step) if found.curve else (0, -1)

    def series(
        self, names: Sequence[str], first: int = 0, last: int = -1, points: int = 1000
    ) -> dict[str, dict[str, Any]]:
        curve = [each for each in self.overview().curve if each.step >= first and (last < 0 or each.step <= last)]
        curve = curve[:: math.ceil(len(curve) / points) or 1]
        columns = {name: [getattr(each, name) for each in curve] for name in CurvePoint.__struct_fields__}
        return {name: {**columns, "time": [0.0] * len(curve)} for name in names}

    def times(self, first: int = 0, last: int = -1, points: int = 200) -> dict[str, Any]:
        return times_of([], last, points)

    def events(self, after: int = 0, most: int = 500) -> dict[str, Any]:
        return {"events": [], "next": 0}

    def use(self, points: int = 500) -> dict[str, Any]:
        return use_of([], points)


class Reading:
    """Answers questions, from the run's directory or from what the head knows of the present.

    Args:
        present: names the directory, and answers where this machine does not see it.
    """

    def __init__(self, run_id: str, present: Present) -> None:
        self._run_id = run_id
        self._present = present
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._waiting: dict[bytes, asyncio.Task[bytes]] = {}
        self._fresh: dict[bytes, tuple[float, bytes]] = {}
        self._started_at = -PAUSE_S
        self._busy_until = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[int]] = set()

    async def answer(self, question: dict[str, Any]) -> bytes:
        """Return the answer to a question as JSON. Says in it what is wrong."""
        try:
            return await self._ask(question)
        except Unanswered as error:
            return msgspec.json.encode({"error": str(error)})

    async def overview(self) -> bytes:
        """Return the overview as the run's directory has it, as JSON; b"": it is not there."""
        with contextlib.suppress(Unanswered, msgspec.DecodeError, KeyError):
            found = msgspec.json.decode(await self._ask({"get": "overview"}), type=dict[str, msgspec.Raw])
            return bytes(found["overview"])
        return b""

    async def _ask(self, question: dict[str, Any]) -> bytes:
        key = msgspec.json.encode(question, order="sorted")
        if (fresh := self._fresh.get(key)) is not None and time.monotonic() - fresh[0] < FRESH_S:
            return fresh[1]
        task = self._waiting.get(key)
        if task is None:
            if len(self._waiting) >= MOST_WAITING:
                raise Unanswered(f"{MOST_WAITING} questions are waiting already; ask again in a few seconds")
            task = self._waiting[key] = asyncio.create_task(self._find(key, question))
        return await asyncio.shield(task)

    async def _find(self, key: bytes, question: dict[str, Any]) -> bytes:
        try:
            found = await self._from_process(key) if self._present.directory else ABSENT
            if found == ABSENT:
                found = await self._from_memory(question)
            if len(self._fresh) >= MOST_CACHED:
                self._fresh.clear()
            self._fresh[key] = time.monotonic(), found
            return found
        finally:
            del self._waiting[key]

    async def _from_memory(self, question: dict[str, Any]) -> bytes:
        """Answer in the event loop, but not all the time: members' messages come first."""
        async with self._lock:
            await asyncio.sleep(max(0.0, self._busy_until - time.monotonic()))
            since = time.monotonic()
            found = msgspec.json.encode(answer([self._present], question))
            now = time.monotonic()
            self._busy_until = now + SLOWEST * (now - since)
            return found

    # -- the process ---------------------------------------------------------------------------------

    async def _from_process(self, question: bytes) -> bytes:
        """Have the process answer: one question after the other, each within its time."""
        async with self._lock:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(DEADLINE_S):
                    process.stdin.write(b"[%b,%b]\n" % (msgspec.json.encode(self._present.directory), question))
                    await process.stdin.drain()
                    found = await process.stdout.readline()
            except TimeoutError:
                self._drop()
                raise Unanswered(
                    f"there is no answer within {DEADLINE_S:.0f} s: the disk of the run's directory may be slow; ask "
                    "for less, or again"
                ) from None
            except (OSError, ValueError) as error:
                self._drop()
                raise Unanswered(f"the run's directory cannot be read at the moment: {error}") from error
            if not found.endswith(b"\n"):
                self._drop()
                raise Unanswered("the process that reads the run's directory has ended; ask again in a few seconds")
            self._set_idle()
            return found

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if time.monotonic() - self._started_at < PAUSE_S:
            raise Unanswered("the process that reads the run's directory has ended; ask again in a few seconds")
        self._started_at = time.monotonic()
        command = (sys.executable, "-P", "-m", "unisono.views.page.reader", self._run_id)
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, PARENT: str(os.getpid())}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env=environment, limit=LINE_BYTES
            )
        except OSError as error:
            raise Unanswered(f"the process that reads the run's directory cannot be started: {error}") from error
        return self._process

    def _set_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._rest)

    def _rest(self) -> None:
        """End the process, because nobody asks."""
        self._started_at = -PAUSE_S
        self._drop()

    def _drop(self) -> None:
        """End the process; another one answers the next question."""
        process, self._process = self._process, None
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        task = asyncio.create_task(process.wait())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def end(self) -> None:
        """End the process. No question follows."""
        self._drop()
        for task in self._waiting.values():
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*self._ending, *self._waiting.values(), return_exceptions=True)
