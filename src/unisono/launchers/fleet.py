"""Fleet: the agents on other machines that the launcher of a run has started."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from unisono.launchers.protocol import AgentCommand, Handle, Launcher, Machine
from unisono.machine.children import TERMINATE_S, Listener
from unisono.spec import RunSpec
from unisono.words import exit_words, listed

__all__ = ["Fleet"]

VERDICT_S: Final = 2.0  # after the end of an agent, for the head to say that the run is over
LAST_LINES: Final = 5


class _Agent:
    """An agent that was started, seen from the event loop."""

    def __init__(self, name: str, handle: Handle) -> None:
        self.name = name
        self.handle = handle
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.exit_code: int | None = None
        self.ended = asyncio.Event()


class Fleet:
    """Starts an agent on each machine, shows the agents' output, ends them.

    Args:
        url: the head's address.
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

    def start(self, listener: Listener, on_lost: Callable[[str], None]) -> None:
        """Start the agents. ``on_lost`` receives why none is left, while the run may not be over.

        Raises:
            UsageError: one of them cannot be started.
        """
        loop = asyncio.get_running_loop()

        def post(callback: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is interested any more
                loop.call_soon_threadsafe(callback, *arguments)

        def follow(agent: _Agent) -> None:
            code = 1
            try:
                for line in agent.handle.stdout or ():
                    post(self._on_line, listener, agent, line.rstrip("\n"))
                code = agent.handle.wait()
            except Exception as error:  # of a launcher: the machine counts as lost
                post(self._on_line, listener, agent, f"{type(error).__name__}: {error}")
            post(self._on_end, listener, on_lost, agent, code)

        for machine in self._machines:
            agent = _Agent(machine.name, self._launcher.start(machine, self._command(machine)))
            self._agents.append(agent)
            threading.Thread(target=follow, args=(agent,), name=f"unisono-machine-{machine.name}", daemon=True).start()

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
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(agent.ended.wait() for agent in self._agents))
        except TimeoutError:
            return False
        return True

    def _command(self, machine: Machine) -> AgentCommand:
        options = ["--workers", str(machine.num_workers), "--head-away-s", str(self._run.head_away_s)]
        join = ["join", self._url, "--token-file", "-", "--launched", *options]
        return AgentCommand(words=(sys.executable, "-P", "-m", "unisono", *join), secret=self._token)

    def _on_line(self, listener: Listener, agent: _Agent, text: str) -> None:
        agent.last_lines.append(text)
        listener.on_line(agent.name, text, False)

    def _on_end(self, listener: Listener, on_lost: Callable[[str], None], agent: _Agent, exit_code: int) -> None:
        agent.exit_code = exit_code
        agent.ended.set()
        if exit_code:
            asyncio.get_running_loop().call_later(VERDICT_S, self._report, listener, on_lost, agent)

    def _report(self, listener: Listener, on_lost: Callable[[str], None], agent: _Agent) -> None:
        if self._is_closing:
            return  # the run is over, and that has ended the agent
        listener.on_notice(_how_it_ended(agent))
        if all(other.ended.is_set() for other in self._agents):
            failures = listed([_how_it_ended(other) for other in self._agents if other.exit_code])
            on_lost(f"no machine is left: {failures}")


def _how_it_ended(agent: _Agent) -> str:
    words = f": {agent.last_lines[-1]}" if agent.last_lines else ""
    code = agent.exit_code or 0
    return f"the agent of {agent.name} {exit_words(code) if code < 0 else f'ended with exit code {code}'}{words}"
