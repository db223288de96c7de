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
from unisono.launchers.protocol import AgentCommand, Elastic, Explained, Handle, Launcher, Machine
from unisono.machine.children import TERMINATE_S, Listener, leave_to_others, reaped_by_others
from unisono.spec import RunSpec
from unisono.words import exit_words, listed

__all__ = ["Fleet"]

VERDICT_S: Final = 2.0  # after the end of an agent, for the head to say that the run is over
RESIZE_S: Final = 5.0  # between two questions to the launcher
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
        self._is_changed = asyncio.Event()
        self._wanted = 0
        self._resizing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._listener: Listener
        self._on_lost: Callable[[str], None]
        self._on_gone: Callable[[int], None]

    def start(self, listener: Listener, on_lost: Callable[[str], None], on_gone: Callable[[int], None]) -> None:
        """Start the agents.

        Args:
            on_lost: receives why none is left, while the run may not be over.
            on_gone: receives how many have ended, whenever one does.

        Raises:
            UsageError: one of them cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        self._listener, self._on_lost, self._on_gone = listener, on_lost, on_gone
        for machine in self._machines:
            self._start(machine)

    def _start(self, machine: Machine) -> None:
        agent = _Agent(machine.name, self._launcher.start(machine, self._command(machine)))
        self._agents.append(agent)
        leave_to_others(agent.pid)
        reader = threading.Thread(target=self._read, args=(agent,), name=f"unisono-output-{machine.name}", daemon=True)
        waiter = threading.Thread(
            target=self._follow, args=(agent, reader), name=f"unisono-machine-{machine.name}", daemon=True
        )
        reader.start()
        waiter.start()

    # -- more and fewer machines ---------------------------------------------------------------------

    def resize(self, num_workers: int) -> None:
        """Have machines for so many workers in all, now and whenever the launcher can get them."""
        self._wanted = num_workers
        if isinstance(self._launcher, Elastic) and self._resizing is None:
            self._resizing = asyncio.get_running_loop().create_task(self._keep_size(self._launcher))
        self._is_changed.set()

    async def _keep_size(self, launcher: Elastic) -> None:
        """Ask the launcher again and again: its cluster may have room later, and machines may be lost."""
        said = ""
        while not self._is_closing:
            self._is_changed.clear()
            try:
                for machine in await asyncio.to_thread(launcher.resize, self._wanted):
                    if self._is_closing:
                        return
                    self._start(machine)
                said = ""
            except Exception as error:  # of a launcher: the run goes on with the machines that it has
                text = f"no machine can be got or given back: {type(error).__name__}: {error}"
                if text != said and not self._is_closing:
                    self._listener.on_notice(text)
                said = text
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESIZE_S):
                    await self._is_changed.wait()

    # -- threads of an agent -------------------------------------------------------------------------

    def _post(self, callback: Callable[..., None], *arguments: Any) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: nobody is interested any more
            return False
        return True

    def _show(self, agent: _Agent, text: str) -> bool:
        agent.room.acquire()
        return self._post(self._on_line, agent, text)

    def _read(self, agent: _Agent) -> None:
        with contextlib.suppress(ValueError):  # the launcher has closed it
            for line in agent.handle.stdout or ():
                if not self._show(agent, line.rstrip("\n")):
                    return

    def _follow(self, agent: _Agent, reader: threading.Thread) -> None:
        code = 1
        try:
            code = agent.handle.wait()
        except Exception as error:  # of a launcher: the machine counts as lost
            self._show(agent, f"{type(error).__name__}: {error}")
        finally:
            reaped_by_others(agent.pid)
        reader.join(LAST_LINES_S)  # not for long: another process may hold the pipe
        self._post(self._on_end, agent, code)

    # -- the end -------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Wait no longer for agents that end by themselves."""
        self._is_hurried.set()

    async def close(self, patience_s: float) -> None:
        """Wait for the agents to end by themselves, then end them."""
        self._is_closing = True
        if self._resizing is not None:
            self._is_changed.set()
            await asyncio.wait([self._resizing], timeout=TERMINATE_S)
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

    def _on_line(self, agent: _Agent, text: str) -> None:
        agent.room.release()
        agent.last_lines.append(text)
        self._listener.on_line(agent.name, text, False)

    def _on_end(self, agent: _Agent, exit_code: int) -> None:
        agent.exit_code = exit_code
        agent.ended.set()
        if not self._is_closing:
            self._on_gone(sum(other.ended.is_set() for other in self._agents))
        self._loop.call_later(VERDICT_S, self._report, agent)

    def _report(self, agent: _Agent) -> None:
        if self._is_closing:
            return  # the run is over, and that has ended the agent
        if agent.exit_code:
            self._listener.on_notice(_how_it_ended(agent))
        if all(other.ended.is_set() for other in self._agents):
            failures = listed([_how_it_ended(other) for other in self._agents])
            self._on_lost(f"no machine is left: {failures}")


def _how_it_ended(agent: _Agent) -> str:
    if isinstance(agent.handle, Explained) and (
        known := agent.handle.explain(agent.exit_code or 0, tuple(agent.last_lines))
    ):
        return f"the agent of {agent.name} {known}"
    words = f": {agent.last_lines[-1]}" if agent.last_lines else ""
    code = agent.exit_code or 0
    return f"the agent of {agent.name} {exit_words(code) if code < 0 else f'ended with exit code {code}'}{words}"
