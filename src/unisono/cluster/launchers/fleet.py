"""Fleet: the agents on other machines that the launcher of a run has started."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from unisono.cluster.launchers.protocol import AgentCommand, Handle, Launcher, Machine
from unisono.cluster.machine.agent import Machines
from unisono.cluster.machine.children import TERMINATE_S, Listener
from unisono.cluster.trust.invitation import Invitation
from unisono.core.errors import UsageError
from unisono.core.words import exit_words, listed

__all__ = ["FIRST_S", "LIVED_S", "MOST_S", "Attempts", "Fleet"]

FIRST_S: Final = 5.0
MOST_S: Final = 300.0
LIVED_S: Final = 60.0


class Attempts(msgspec.Struct, frozen=True, kw_only=True):
    """The starts of one machine's agent. Times in seconds, of one clock.

    A lost agent is started again after a pause: `FIRST_S` after the first end, twice as long after each further one,
    and `MOST_S` at most. An agent that has lived for `LIVED_S` has not failed: after its end the pauses begin anew.
    """

    started_at: float
    """The last start."""
    ended_at: float | None = None
    """The end of the agent that was started then; None: it has not ended."""
    num_failed: int = 0
    """Agents in a row that have ended before `LIVED_S`."""

    def ended(self, now: float) -> Attempts:
        """Return the attempts after the end of the agent."""
        failed = self.num_failed + 1 if now - self.started_at < LIVED_S else 0
        return Attempts(started_at=self.started_at, ended_at=now, num_failed=failed)

    def started(self, now: float) -> Attempts:
        """Return the attempts after another start."""
        return Attempts(started_at=now, num_failed=self.num_failed)

    @property
    def pause_s(self) -> float:
        """The time from the end of an agent to the next start."""
        return min(FIRST_S * 2.0 ** max(self.num_failed - 1, 0), MOST_S)

    def is_due(self, now: float) -> bool:
        """Return whether the agent has ended, and the pause is over."""
        return self.ended_at is not None and now >= self.ended_at + self.pause_s


VERDICT_S: Final = 2.0  # after the end of an agent, for the head to say that the run is over
LOOK_S: Final = 2.0  # between two comparisons of what is wanted with what is there
LAST_LINES: Final = 5


class _Agent:
    """The newest agent that was started on a machine."""

    def __init__(self, machine: Machine, handle: Handle, attempts: Attempts) -> None:
        self.machine = machine
        self.name = machine.name
        self.handle = handle
        self.attempts = attempts
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.ended = asyncio.Event()

    @property
    def exit_code(self) -> int | None:
        return self.handle.exit_code


class Fleet(Machines):
    """Starts an agent on each machine, shows the agents' output, starts lost ones again, ends them.

    What is wanted is compared with what is there every few seconds, and at every change (`_keep_machines`), for every
    launcher in the same way. The head knows which machines are there: an agent whose ssh has ended may go on.

    Args:
        url: the head's address, with its fingerprint.
        token: the run's token.
    """

    def __init__(self, launcher: Launcher, machines: Sequence[Machine], url: str, token: str) -> None:
        self._launcher = launcher
        self._machines = machines
        self._url = url
        self._token = token
        self._agents: dict[str, _Agent] = {}  # by the machine's name
        self._is_closing = False
        self._is_hurried = asyncio.Event()
        self._is_changed = asyncio.Event()
        self._wanted: int | None = None  # None: the head has not said it yet
        self._present: frozenset[str] = frozenset()
        self._ended: set[str] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._listener: Listener
        self._on_lost: Callable[[str], None]
        self._on_gone: Callable[[Collection[str]], None]

    def start(
        self, listener: Listener, on_lost: Callable[[str], None], on_gone: Callable[[Collection[str]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._on_lost, self._on_gone = listener, on_lost, on_gone
        for machine in self._machines:
            self._start(machine)
        self._keeping = self._loop.create_task(self._keep_machines())

    def _start(self, machine: Machine) -> None:
        known, now = self._agents.get(machine.name), time.monotonic()
        attempts = known.attempts.started(now) if known is not None else Attempts(started_at=now)
        agent = _Agent(machine, self._launcher.start(machine, self._command(machine)), attempts)
        self._agents[machine.name] = agent
        agent.handle.follow(partial(self._on_line, agent), partial(self._on_end, agent))

    # -- what is wanted, and what is there -----------------------------------------------------------

    def keep(self, num_workers: int, present: Collection[str]) -> None:
        self._wanted, self._present = num_workers, frozenset(present)
        self._is_changed.set()

    async def _keep_machines(self) -> None:
        """Start agents where the launcher says so: its cluster may have room later, and machines may be lost."""
        said = ""
        while not self._is_closing:
            self._is_changed.clear()
            try:
                if self._wanted is not None or not self._launcher.is_elastic:
                    await self._compare()
                said = ""
            except Exception as error:  # of a launcher: the run goes on with the machines that it has
                text = f"no machine can be requested or released: {type(error).__name__}: {error}"
                if text != said and not self._is_closing:
                    self._listener.on_notice(text)
                said = text
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._is_changed.wait()

    async def _compare(self) -> None:
        now = time.monotonic()
        lost = [agent.machine for agent in self._agents.values() if self._is_lost(agent) and agent.attempts.is_due(now)]
        for machine in await asyncio.to_thread(self._launcher.ensure, self._wanted or 0, lost):
            if self._is_closing:
                return
            if (before := self._agents.get(machine.name)) is None:
                self._start(machine)
            else:
                self._start_again(before)

    def _start_again(self, lost: _Agent) -> None:
        words = f"{lost.name} is lost: restarting its agent after {lost.attempts.pause_s:.0f} s"
        self._listener.on_notice(words)
        try:
            self._start(lost.machine)
        except UsageError as error:
            lost.attempts = lost.attempts.started(time.monotonic()).ended(time.monotonic())
            self._listener.on_notice(f"the agent of {lost.name} could not be started: {error}")

    def _is_lost(self, agent: _Agent) -> bool:
        """Return whether a machine needs another agent. One that has ended with exit code 0 was not needed any more."""
        return bool(agent.exit_code) and agent.name not in self._present

    # -- the end -------------------------------------------------------------------------------------

    def hurry(self) -> None:
        self._is_hurried.set()

    async def close(self, patience_s: float) -> None:
        self._is_closing = True
        if self._keeping is not None:
            self._is_changed.set()
            await asyncio.wait([self._keeping], timeout=TERMINATE_S)
        if not await self._ended_within(patience_s):
            for agent in self._agents.values():
                if agent.exit_code is None:
                    agent.handle.terminate()
            await self._ended_within(TERMINATE_S)
        await asyncio.gather(*(agent.handle.close() for agent in self._agents.values()))
        self._launcher.close()
        await self._ended_within(TERMINATE_S)

    async def _ended_within(self, seconds: float) -> bool:
        ends: asyncio.Future[Any] = asyncio.ensure_future(self._all_ended())
        hurried: asyncio.Future[Any] = asyncio.ensure_future(self._is_hurried.wait())
        await asyncio.wait([ends, hurried], timeout=seconds, return_when="FIRST_COMPLETED")
        ends.cancel()
        hurried.cancel()
        return all(agent.ended.is_set() for agent in self._agents.values())

    async def _all_ended(self) -> None:
        for agent in list(self._agents.values()):
            await agent.ended.wait()

    def _command(self, machine: Machine) -> AgentCommand:
        join = ["join", "-", "--launched", machine.name, "--workers", str(machine.num_workers)]
        invitation = Invitation(self._url, self._token)
        return AgentCommand(words=(sys.executable, "-P", "-m", "unisono", *join), secret=invitation.line)

    def _on_line(self, agent: _Agent, text: str) -> None:
        agent.last_lines.append(text)
        self._listener.on_line(agent.name, text, False)

    def _on_end(self, agent: _Agent, exit_code: int) -> None:
        agent.attempts = agent.attempts.ended(time.monotonic())
        agent.ended.set()
        self._ended.add(agent.name)
        if not self._is_closing:
            self._on_gone(self._ended)
        self._loop.call_later(VERDICT_S, self._report, agent)

    def _report(self, agent: _Agent) -> None:
        if self._is_closing:
            return  # the run is over, and that has ended the agent
        is_last = all(other.ended.is_set() for other in self._agents.values())
        if agent.exit_code:
            is_back = not self._launcher.is_elastic and self._is_lost(agent)
            again = f"; restarting it after {agent.attempts.pause_s:.0f} s" if is_back and not is_last else ""
            self._listener.on_notice(_how_it_ended(agent) + again)
        if is_last:
            failures = listed([_how_it_ended(other) for other in self._agents.values()])
            self._on_lost(f"no machine is left: {failures}")


def _how_it_ended(agent: _Agent) -> str:
    if known := agent.handle.explain(agent.exit_code or 0, tuple(agent.last_lines)):
        return f"the agent of {agent.name} {known}"
    words = f": {agent.last_lines[-1]}" if agent.last_lines else ""
    return f"the agent of {agent.name} {exit_words(agent.exit_code or 0)}{words}"
