"""What the head tells: to the machines that show or write the run, to its viewers, and into files of evidence.

Nothing is decided here: this receives what workers report and what the table has decided.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shlex
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from unisono.cluster.head.directory import Directory
from unisono.cluster.head.lines import Lines
from unisono.cluster.head.story import Story, Uses
from unisono.cluster.head.table import Table
from unisono.cluster.head.troubles import Troubles
from unisono.cluster.head.viewing import Viewing
from unisono.cluster.trust.invitation import HeadUrl
from unisono.core import events
from unisono.core.events import MachineUsed, StepFinished
from unisono.core.following import MAX_HEIRS
from unisono.core.messages import Evidence, Happened, Inquire, Steps, Told
from unisono.core.spec import RunSpec
from unisono.membership.roster import ALIVE
from unisono.record.problems.kinds import Trouble
from unisono.system.interfaces import is_local

__all__ = ["Telling", "how_to_join"]

TOGETHER_S: Final = 0.2
"""In which what several machines use is told together."""


class Telling:
    """What one head tells, and to whom. It is the `unisono.cluster.head.troubles.House` of its troubles.

    Args:
        spec: settings of the run.
        token: must not get into a file.
        directory: of the run.
        story: that is told.
        viewing: those who look at the run.
    """

    def __init__(
        self,
        table: Table,
        lines: Lines,
        run_id: str,
        spec: RunSpec,
        token: str,
        *,
        directory: Directory,
        story: Story,
        viewing: Viewing,
    ) -> None:
        self._table = table
        self._lines = lines
        self._run_id = run_id
        self._spec = spec
        self._directory = directory
        self._story = story
        self._viewing = viewing
        self._waiting: asyncio.TimerHandle | None = None
        self._told_uses_at = -math.inf
        self.last: StepFinished | None = None
        """The newest step."""
        self.uses = Uses()
        self.troubles = Troubles(self, run_id, [token])

    def pass_on(self, message: Happened) -> None:
        """Give an event to the sinks of all machines that have some."""
        event = message.event
        if isinstance(event, StepFinished):
            self._take_step(event)
            self._lines.send_all(self._listeners(), message)
            return
        self._viewing.take(event)
        self.troubles.note(event)
        self._story.take_other(event)
        self._lines.send_all(self._audience(), message)

    def pass_on_steps(self, message: Steps) -> None:
        """Give the steps to the sinks of all machines that show them."""
        for each in message.steps:
            if isinstance(each.event, StepFinished):
                self._take_step(each.event)
        self._lines.send_all(self._listeners(), message)

    def _take_step(self, event: StepFinished) -> None:
        self._viewing.take(event)
        self.troubles.note(event)
        # A worker that connects again repeats its last step.
        if self.last is None or event.step >= self.last.step:
            is_new = self.last is None or event.step > self.last.step
            self.last = event
            if is_new and (told := self._story.take_step(event)):
                self._table.send_when_held(Told(events=told))

    def _listeners(self) -> list[str]:
        return [agent_id for agent_id, agent in self._table.state.agents.items() if not agent.launched]

    def _audience(self) -> list[str]:
        """Return who hears the story: who shows it, and who may write it."""
        writers = [*self._table.state.heirs, *itertools.islice(self._directory.seers, MAX_HEIRS)]
        return list(dict.fromkeys([*self._listeners(), *writers]))

    def announce(self, text: str) -> None:
        """Tell a sentence that follows from no decision of the table."""
        self.tell_story(self._story.announce(text))

    def tell_story(self, happened: list[events.Event]) -> None:
        """Tell a part of the story."""
        for event in happened:
            self._viewing.take(event)
            self.troubles.note(event)
        self._lines.send_all(self._audience(), Told(events=happened))

    # -- what machines use -----------------------------------------------------------------------------

    def take_use(self, agent_id: str, use: MachineUsed) -> None:
        """Receive what a machine uses, from one of its agents; told together with that of others."""
        self.uses.add(agent_id, use)
        if self._waiting is None:
            due = self._told_uses_at + self.uses.wait_s(len(self._audience()))
            delay = max(TOGETHER_S, due - time.monotonic())
            self._waiting = asyncio.get_running_loop().call_later(delay, self._tell_uses)

    def _tell_uses(self) -> None:
        self._waiting, self._told_uses_at = None, time.monotonic()
        self.uses.keep(self._table.state.agents.keys())
        if self.uses.has_news:
            used = self.uses.take()
            for event in used:
                self._viewing.take(event)
            self._lines.send_all(self._audience(), Told(events=used))

    # -- what goes wrong (`unisono.cluster.head.troubles.House`) ----------------------------------------------

    def take_trouble(self, trouble: Trouble) -> None:
        """Say what has gone wrong, and put the evidence together."""
        try:
            self.troubles.take(trouble)
        except Exception:  # a bug of this library: what is decided counts all the same
            traceback.print_exc()

    def tell(self, problem: events.Problem) -> None:
        self.pass_on(Happened(event=problem))

    def ask(self, names: Iterable[str], question: Inquire) -> None:
        self._lines.send_all(names, question)

    def workers(self) -> Sequence[str]:
        return [name for name in self._lines if name in self._table.state.workers]

    def host_of(self, worker_id: str) -> str:
        worker = self._table.state.workers.get(worker_id)
        return worker.info.host if worker is not None and worker.info is not None else ""

    def num_workers_on(self, host: str) -> int:
        return sum(self.host_of(w.worker_id) == host for w in self._table.state.workers.values() if w.state in ALIVE)

    def agents(self) -> dict[str, str]:
        agents = self._table.state.agents
        return {name: agents[name].host for name in self._lines if name in agents}

    def directory(self) -> str:
        return self._directory.path if self.sees_directory() or self._directory.seers else ""

    def sees_directory(self) -> bool:
        return bool(self._directory.path) and self._directory.may_write and self._directory.is_held

    def hand_over(self, name: str, content: str) -> None:
        seers = [agent_id for agent_id in self._directory.seers if agent_id in self._lines]
        self._lines.send_all(seers[:1], Evidence(directory=self._directory.path, name=name, text=content))

    def facts(self) -> dict[str, str]:
        state = self._table.state
        return {
            "run": self._run_id,
            "directory": self._directory.path,
            "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "last step": str(state.committed) if state.committed >= 0 else "none",
            "generation": str(state.generation),
            "members": ", ".join(state.members),
            "hosts": ", ".join(sorted({agent.host for agent in state.agents.values()})),
        }

    def settings(self) -> str:
        return json.dumps(msgspec.to_builtins(self._spec), indent=1)

    def recipe(self) -> str:
        return self._directory.facts


def how_to_join(url: str, directory: str) -> str:
    """Return the sentence that says how another machine joins.

    Args:
        url: of the head.
        directory: of the run; "": it is not known.
    """
    status = shlex.join(["unisono", "watch", "--once", directory]) if directory else "unisono watch --once RUN"
    line = f"with the line that `{status}` shows"
    if is_local(HeadUrl.parse(url).host):
        return (
            f"more workers join, on this machine, {line}; other machines cannot reach the head: start the run with "
            "--bind and an address of this machine that they reach, or with --bind 0.0.0.0"
        )
    return f"other machines join {line}"
