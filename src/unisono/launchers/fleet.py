"""Fleet: the agents on other machines that the launcher of a run has started."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from unisono.invitation import Invitation
from unisono.launchers.protocol import AgentCommand, Explained, Handle, Launcher, Machine
from unisono.machine.children import TERMINATE_S, Listener, leave_to_others, reaped_by_others
from unisono.spec import RunSpec
from unisono.words import exit_words, listed

__all__ = ["Fleet"]

VERDICT_S: Final = 2.0  # after the end of an agent, for the head to say that the run is over
LAST_LINES: Final = 5
MAX_WAITING_LINES: Final = 1000  # of one agent; then its output waits in the pipe
LAST_LINES_S: Final = 0.5  # after the end of an agent, for what it has printed last


class _Agent:
    """An agent that was started, seen from the event loop."""

    def __init__(self, name: str, handle: Handle) -> None:
        self.name = name
        self.handle = handle
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.pid: int = getattr(handle, "pid", 0)  # 0: it is no process of this machine
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self.room = threading.BoundedSemaphore(MAX_WAITING_LINES)


class Fleet:
    """Starts an agent on each machine, shows the agents' output, ends them.

    Args:
        url: the head's address, with its fingerprint.
        token: the run's token.
    """

    def __init__(self, launcher: Launcher, machines: Sequence[Machine], run: RunSpec, url: str, token: str) -> None:
        self._launcher = launcher
        self._machines = machines
        self._run = run
        self._url = url
        self._token = token
        self._agents: list[_Agent] = []
        self._is_closing = False
        self._is_hurried = asyncio.Event()

    def start(self, listener: Listener, on_lost: Callable[[str], None], on_gone: Callable[[int], None]) -> None:
        """Start the agents.

        Args:
            on_lost: receives why none is left, while the run may not be over.
            on_gone: receives how many have ended, whenever one does.

        Raises:
            UsageError: one of them cannot be started.
        """
        loop = asyncio.get_running_loop()

        def post(callback: Callable[..., None], *arguments: Any) -> bool:
            try:
                loop.call_soon_threadsafe(callback, *arguments)
            except RuntimeError:  # the loop is closed: nobody is interested any more
                return False
            return True

        def show(agent: _Agent, text: str) -> bool:
            agent.room.acquire()
            return post(self._on_line, listener, agent, text)

        def read(agent: _Agent) -> None:
            with contextlib.suppress(ValueError):  # the launcher has closed it
                for line in agent.handle.stdout or ():
                    if not show(agent, line.rstrip("\n")):
                        return

        def follow(agent: _Agent, reader: threading.Thread) -> None:
            code = 1
            try:
                code = agent.handle.wait()
            except Exception as error:  # of a launcher: the machine counts as lost
                show(agent, f"{type(error).__name__}: {error}")
            finally:
                reaped_by_others(agent.pid)
            reader.join(LAST_LINES_S)  # not for long: another process may hold the pipe
            post(self._on_end, listener, on_lost, on_gone, agent, code)

        for machine in self._machines:
            agent = _Agent(machine.name, self._launcher.start(machine, self._command(machine)))
            self._agents.append(agent)
            leave_to_others(agent.pid)
            reader = threading.Thread(target=read, args=(agent,), name=f"unisono-output-{machine.name}", daemon=True)
            waiter = threading.Thread(
                target=follow, args=(agent, reader), name=f"unisono-machine-{machine.name}", daemon=True
            )
            reader.start()
            waiter.start()

    def hurry(self) -> None:
        """Wait no longer for agents that end by themselves."""
        self._is_hurried.set()

    async def close(self, patience_s: float) -> None:
        """Wait for the agents to end by themselves, then end them."""
        self._is_closing = True
        if not await self._ended_within(patience_s):
            for agent in self._agents:
                if agent.handle.poll() is None:
                    agent.handle.terminate()
            await self._ended_within(TERMINATE_S)
        self._launcher.close()
        await self._ended_within(TERMINATE_S)

    async def _ended_within(self, seconds: float) -> bool:
        ends = [asyncio.ensure_future(agent.ended.wait()) for agent in self._agents]
        hurried = asyncio.ensure_future(self._is_hurried.wait())
        try:
            async with asyncio.timeout(seconds):
                while not all(end.done() for end in ends) and not hurried.done():
                    await asyncio.wait(
                        [*(end for end in ends if not end.done()), hurried], return_when="FIRST_COMPLETED"
                    )
        except TimeoutError:
            pass
        finally:
            for waiting in (*ends, hurried):
                waiting.cancel()
        return all(agent.ended.is_set() for agent in self._agents)

    def _command(self, machine: Machine) -> AgentCommand:
        options = ["--workers", str(machine.num_workers), "--head-away-s", str(self._run.head_away_s)]
        join = ["join", "-", "--launched", *options]
        invitation = Invitation(self._url, self._token)
        return AgentCommand(words=(sys.executable, "-P", "-m", "unisono", *join), secret=invitation.line)

    def _on_line(self, listener: Listener, agent: _Agent, text: str) -> None:
        agent.room.release()
        agent.last_lines.append(text)
        listener.on_line(agent.name, text, False)

    def _on_end(
        self,
        listener: Listener,
        on_lost: Callable[[str], None],
        on_gone: Callable[[int], None],
        agent: _Agent,
        exit_code: int,
    ) -> None:
        agent.exit_code = exit_code
        agent.ended.set()
        if not self._is_closing:
            on_gone(sum(other.ended.is_set() for other in self._agents))
        asyncio.get_running_loop().call_later(VERDICT_S, self._report, listener, on_lost, agent)

    def _report(self, listener: Listener, on_lost: Callable[[str], None], agent: _Agent) -> None:
        if self._is_closing:
            return  # the run is over, and that has ended the agent
        if agent.exit_code:
            listener.on_notice(_how_it_ended(agent))
        if all(other.ended.is_set() for other in self._agents):
            failures = listed([_how_it_ended(other) for other in self._agents])
            on_lost(f"no machine is left: {failures}")


def _how_it_ended(agent: _Agent) -> str:
    if isinstance(agent.handle, Explained) and (
        known := agent.handle.explain(agent.exit_code or 0, tuple(agent.last_lines))
    ):
        return f"the agent of {agent.name} {known}"
    words = f": {agent.last_lines[-1]}" if agent.last_lines else ""
    code = agent.exit_code or 0
    return f"the agent of {agent.name} {exit_words(code) if code < 0 else f'ended with exit code {code}'}{words}"
