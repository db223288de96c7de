"""What the head does when something goes wrong: says it once, asks everybody what they are doing, keeps the evidence.

The sentence goes to all machines at once. The evidence follows when all have answered, or after a few seconds; nobody
waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from unisono.cluster.head.connections import ConnectionsByName
from unisono.cluster.head.directory import Directory, in_thread
from unisono.cluster.head.table import Table
from unisono.core.events import Announcement, Event, Problem, StepFinished
from unisono.core.messages import Ailing, Holds, Inquire, Statement, WriteEvidence
from unisono.core.spec import RunSpec
from unisono.core.words import shown_bytes
from unisono.membership.roster import ALIVE
from unisono.record.problems import evidence as files
from unisono.record.problems.evidence import Witness, redacted, shown_environment
from unisono.record.problems.evidence_files import FOLDER, stamp, write
from unisono.record.problems.fit import FitSetting, Held, advice, table
from unisono.record.problems.kinds import Trouble, file_name, text
from unisono.record.problems.limits import NEAR
from unisono.record.problems.witness import versions

__all__ = ["Troubles"]

ANSWER_S: Final = 3.0
"""So long the head waits for answers; a worker whose interpreter is held by native code gives none."""
AFTER_LOSS_S: Final = 0.25
"""The others are asked so long after the loss of a process: by then they have taken the next generation."""
AILING_S: Final = 0.5
MOST_FILES: Final = 20
MOST_ASKED: Final = 64
LAST_EVENTS: Final = 40
LAST_STEPS: Final = 3
END_S: Final = 2.0


@dataclass(eq=False)
class _Inquiry:
    """One file of evidence that is being put together."""

    name: str
    trouble: Trouble
    number: int
    asked: list[str]
    facts: dict[str, str]
    events: list[str]
    heard: dict[str, Statement] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Troubles:
    """The troubles of one head.

    Args:
        token: must not get into a file.
        tell: tells an event to all machines.
    """

    def __init__(
        self,
        table: Table,
        lines: ConnectionsByName,
        directory: Directory,
        run_id: str,
        spec: RunSpec,
        token: str,
        tell: Callable[[Event], None],
    ) -> None:
        self._table = table
        self._lines = lines
        self._directory = directory
        self._run_id = run_id
        self._spec = spec
        self._secrets = (token,)
        self._tell = tell
        self._number = 0
        self._names: list[str] = []
        self._said: set[tuple[str, str, int]] = set()
        self._inquiries: dict[int, _Inquiry] = {}
        self._waiting: list[_Inquiry] = []  # nobody is asked yet
        self._ailing: dict[str, Ailing] = {}
        self._held: dict[str, Holds] = {}
        self._late: dict[str, Statement] = {}  # what workers have said when they were late
        self._recent: deque[tuple[float, Event]] = deque(maxlen=LAST_EVENTS)
        self._steps: deque[tuple[float, Event]] = deque(maxlen=LAST_STEPS)
        self.tasks: set[asyncio.Task[None]] = set()
        """One for each file that is being put together."""
        self._is_ending = False

    def note(self, event: Event) -> None:
        """Remember an event, for the next file. Cheap."""
        (self._steps if isinstance(event, StepFinished) else self._recent).append((time.time(), event))

    def heard(self, name: str, message: Statement) -> None:
        """Receive an answer."""
        if message.number < 0:
            self._late[name] = message
            return
        inquiry = self._inquiries.get(message.number)
        if inquiry is not None:
            inquiry.heard[name] = message
            self._look(inquiry)

    def ails(self, worker_id: str, message: Ailing) -> None:
        """Receive what a worker has found in a gradient that is not finite; all that have, find it at about a time."""
        if not self._ailing:
            asyncio.get_running_loop().call_later(AILING_S, self._say_ailing)
        self._ailing[worker_id] = message

    def _say_ailing(self) -> None:
        found, self._ailing = self._ailing, {}
        if not found:
            return
        first_step = min(each.step for each in found.values())
        known = {name: each for name, each in found.items() if each.step == first_step}
        guilty = {name: each for name, each in known.items() if each.microbatch >= 0}
        name, first = min(guilty.items() or known.items(), key=lambda item: item[1].microbatch)
        host = self._host_of(name)
        name = name if guilty else ""
        self.take(Trouble.of_gradient(first.step, first.microbatch, first.samples, first.detail, name, host))

    def holds(self, worker_id: str, message: Holds) -> None:
        """Keep what a worker says about its memory."""
        self._held[worker_id] = message

    def _with_memory(self, trouble: Trouble) -> Trouble:
        """Add what a worker that the kernel has killed for its memory has said before."""
        known = self._held.get(trouble.worker_id)
        if known is None or not trouble.killed_for or not trouble.peak_bytes:
            return trouble
        workers = self._table.state.workers.values()
        others = sum(self._host_of(each.worker_id) == trouble.host for each in workers if each.state in ALIVE)
        if _has_filled(known.limit_bytes, trouble):  # a control group of its own
            others, why = 0, f"its control group ran out of memory ({shown_bytes(known.limit_bytes)})"
            trouble = msgspec.structs.replace(
                trouble, killed_for=f"the kernel killed it because {why}", limit_bytes=known.limit_bytes
            )
        if not known.kinds:
            return trouble
        held = Held(
            kinds=known.kinds,
            used=trouble.peak_bytes,
            limit=trouble.peak_bytes,  # all was used when it was killed
            shared=trouble.limit_bytes,
        )
        setting = FitSetting(batch_size=known.batch_size, microbatches=known.microbatches, num_workers=others + 1)
        return msgspec.structs.replace(trouble, detail=table(held), advice=advice(held, setting))

    def gone(self, name: str) -> None:
        """Note that a worker or an agent has gone: it answers nothing any more."""
        for inquiry in self._inquiries.values():
            if name in inquiry.asked and name not in inquiry.heard:
                inquiry.heard[name] = Statement(number=-1, text="")
                self._look(inquiry)

    def take(self, trouble: Trouble) -> None:
        """Say what has gone wrong, once, and put the evidence together."""
        key = (trouble.kind, trouble.worker_id, -1 if trouble.kind == "nan" else trouble.step)
        if key in self._said:
            return
        self._said.add(key)
        late = self._late.get(trouble.worker_id)
        if late is not None and trouble.kind == "hang":
            trouble = msgspec.structs.replace(trouble, place=late.place)
        trouble = self._with_memory(trouble)
        name = ""
        if self._folder() and len(self._names) < MOST_FILES:
            name = file_name(trouble.kind, trouble.step, stamp(time.time()), self._names)
            self._names.append(name)
        self.say(trouble, f"{FOLDER}/{name}" if name else "")
        if not name:
            return
        self._number += 1
        inquiry = _Inquiry(name, trouble, self._number, [], self._facts(), self._last_events())
        if trouble.ends_run or trouble.kind == "hang":
            self._ask(inquiry)  # before what follows: the culprit may be ended at once
            delay_s = 0.0
        else:
            delay_s = AFTER_LOSS_S
            self._waiting.append(inquiry)
        if trouble.ends_run and not self._sees_directory():  # whoever sees it ends with the run
            self._hand_over(name, self._content(self._found(inquiry)))
            return
        task = asyncio.create_task(self._follow(inquiry, delay_s))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def say(self, trouble: Trouble, evidence: str = "") -> None:
        """Say what has gone wrong, without a file of evidence, or with one that will be there in a moment."""
        problem = Problem(
            time=time.time(),
            problem=trouble.kind,
            text=redacted(text(trouble), self._secrets),
            worker_id=trouble.worker_id,
            step=trouble.step,
            evidence=evidence,
            ends_run=trouble.ends_run,
        )
        self._tell(problem)

    def hurry(self) -> None:
        """Say and ask all that was put off: the run is over, and all end in a moment."""
        if self._ailing:
            self._say_ailing()
        for inquiry in self._waiting:
            self._ask(inquiry)
        self._waiting.clear()

    async def end(self) -> None:
        """Write what is being put together, and wait for that."""
        self._is_ending = True
        for inquiry in self._inquiries.values():
            inquiry.done.set()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=END_S)

    # -- inside --------------------------------------------------------------------------------------

    def _ask(self, inquiry: _Inquiry) -> None:
        connected = [name for name in self._lines if name in self._table.state.workers]
        workers = sorted(connected, key=lambda name: name != inquiry.trouble.worker_id)
        inquiry.asked = [*workers[:MOST_ASKED], *list(self._agents())[:MOST_ASKED]]
        self._inquiries[inquiry.number] = inquiry
        self._lines.send_all(inquiry.asked, Inquire(number=inquiry.number, about=inquiry.trouble.worker_id))

    def _look(self, inquiry: _Inquiry) -> None:
        if all(name in inquiry.heard for name in inquiry.asked):
            inquiry.done.set()

    async def _follow(self, inquiry: _Inquiry, delay_s: float) -> None:
        if delay_s and not self._is_ending:
            await asyncio.sleep(delay_s)
        if inquiry in self._waiting:
            self._waiting.remove(inquiry)
            self._ask(inquiry)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self._is_ending else ANSWER_S):
                await inquiry.done.wait()
        found = self._found(inquiry)
        self._inquiries.pop(inquiry.number, None)
        sees, directory = self._sees_directory(), Path(self._folder())

        def work() -> str:
            content = self._content(found)
            if sees:
                write(directory, self._run_id, inquiry.name, content)
            return content

        try:
            content = await in_thread(work)
        except OSError as error:
            words = f"{FOLDER}/{inquiry.name} could not be written: {error.strerror}"
            self._tell(Announcement(time=time.time(), text=words))
            return
        if not sees:
            self._hand_over(inquiry.name, content)

    def _content(self, found: files.Evidence) -> str:
        return files.shown(msgspec.structs.replace(found, versions=versions()), self._secrets)

    def _found(self, inquiry: _Inquiry) -> files.Evidence:
        hosts = self._agents()
        silent = f"nothing within {ANSWER_S:.0f} s: its process has ended, or native code holds its interpreter"
        workers: list[Witness] = []
        machines: list[Witness] = []
        for name in inquiry.asked:
            answer = inquiry.heard.get(name)
            missing = silent if answer is None else "it has ended meanwhile"
            said = answer.text if answer is not None else ""
            if not said and name in self._late:
                said = f"(when it was late)\n{self._late[name].text}"
            witness = Witness(name=hosts.get(name, name), text=said, missing=missing)
            (machines if name in hosts or name.startswith("agent") else workers).append(witness)
        environment = next((each.environment for each in inquiry.heard.values() if each.environment), None)
        return files.Evidence(
            trouble=inquiry.trouble,
            facts=inquiry.facts,
            workers=workers,
            machines=machines,
            events=inquiry.events,
            environment=environment or shown_environment(os.environ),
            settings=json.dumps(msgspec.to_builtins(self._spec), indent=1),
            recipe=self._directory.facts,
        )

    def _host_of(self, worker_id: str) -> str:
        """Return the host of a worker; "": it is not known."""
        worker = self._table.state.workers.get(worker_id)
        return worker.info.host if worker is not None and worker.info is not None else ""

    def _agents(self) -> dict[str, str]:
        """Return the agents that are connected, with their hosts."""
        agents = self._table.state.agents
        return {name: agents[name].host for name in self._lines if name in agents}

    def _folder(self) -> str:
        """Return the run's directory; "": there is none that anybody sees."""
        return self._directory.path if self._sees_directory() or self._directory.seers else ""

    def _sees_directory(self) -> bool:
        """Return whether this process may write into it."""
        return bool(self._directory.path) and self._directory.may_write and self._directory.is_held

    def _hand_over(self, name: str, content: str) -> None:
        """Let a machine that sees the directory write a file of evidence."""
        seers = [agent_id for agent_id in self._directory.seers if agent_id in self._lines]
        self._lines.send_all(seers[:1], WriteEvidence(directory=self._directory.path, name=name, text=content))

    def _facts(self) -> dict[str, str]:
        """Return what is to be said about the run, in words, by name."""
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

    def _last_events(self) -> list[str]:
        known = sorted([*self._recent, *self._steps], key=lambda item: item[0])
        return [f"{time.strftime('%H:%M:%S', time.localtime(when))}  {_line(event)}" for when, event in known]


def _has_filled(limit: int, trouble: Trouble) -> bool:
    """Return whether a worker has had as much memory as its own control group may have, which is less than the limit
    that its agent knows of.
    """
    is_own = 0 < limit < (trouble.limit_bytes or limit + 1)
    return is_own and trouble.peak_bytes >= NEAR * limit


def _line(event: Event) -> str:
    if isinstance(event, StepFinished):
        return f"step {event.step} finished: loss {event.loss!r}, {event.seconds.total():.3f} s"
    if isinstance(event, Announcement):
        return event.text[:600]
    known = {name: getattr(event, name) for name in event.__struct_fields__ if name != "time"}
    kind = str(event.__struct_config__.tag)
    words = ", ".join(f"{name}={value!r}" for name, value in known.items() if value not in ("", -1, 0.0))
    return f"{kind}: {words}"[:600]
