"""What the head does when something goes wrong: says it once, asks everybody what they are doing, keeps the evidence.

The sentence goes to all machines at once. The evidence follows when all have answered, or after a few seconds; nobody
waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from unisono.cluster.head.disk import in_thread
from unisono.core.events import Announcement, Event, Problem, StepFinished
from unisono.core.messages import Ailing, Holds, Inquire, Statement
from unisono.record.problems import evidence as files
from unisono.record.problems.evidence import Witness, redacted, shown_environment
from unisono.record.problems.evidence_files import FOLDER, stamp, write
from unisono.record.problems.fit import FitSetting, Held, advice, table
from unisono.record.problems.kinds import Trouble, file_name, text
from unisono.record.problems.witness import versions

__all__ = ["House", "Troubles"]

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


class House(Protocol):
    """The head, as `Troubles` needs it."""

    def tell(self, problem: Problem) -> None:
        """Give the event to the sinks of all machines."""

    def ask(self, names: Iterable[str], question: Inquire) -> None:
        """Send a question to workers and agents."""

    def workers(self) -> Sequence[str]:
        """Return the workers that are connected."""

    def host_of(self, worker_id: str) -> str:
        """Return the host of a worker; "": it is not known."""

    def num_workers_on(self, host: str) -> int:
        """Return how many workers live on a host."""

    def agents(self) -> Mapping[str, str]:
        """Return the agents that are connected, with their hosts."""

    def directory(self) -> str:
        """Return the run's directory; "": there is none that anybody sees."""

    def sees_directory(self) -> bool:
        """Return whether this process may write into it."""

    def announce(self, text: str) -> None:
        """Show a sentence on all machines."""

    def hand_over(self, name: str, content: str) -> None:
        """Let a machine that sees the directory write a file of evidence."""

    def facts(self) -> dict[str, str]:
        """Return what is to be said about the run, in words, by name."""

    def settings(self) -> str:
        """Return the settings of the run."""

    def recipe(self) -> str:
        """Return the recipe of the run, as far as it is known."""


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
        secrets: words that must not get into a file.
    """

    def __init__(self, house: House, run_id: str, secrets: Collection[str]) -> None:
        self._house = house
        self._run_id = run_id
        self._secrets = tuple(secrets)
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
        host = self._house.host_of(name)
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
        others = self._house.num_workers_on(trouble.host)
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
        if self._house.directory() and len(self._names) < MOST_FILES:
            name = file_name(trouble.kind, trouble.step, stamp(time.time()), self._names)
            self._names.append(name)
        self.say(trouble, f"{FOLDER}/{name}" if name else "")
        if not name:
            return
        self._number += 1
        inquiry = _Inquiry(name, trouble, self._number, [], self._house.facts(), self._last_events())
        if trouble.ends_run or trouble.kind == "hang":
            self._ask(inquiry)  # before what follows: the culprit may be ended at once
            delay_s = 0.0
        else:
            delay_s = AFTER_LOSS_S
            self._waiting.append(inquiry)
        if trouble.ends_run and not self._house.sees_directory():  # whoever sees it ends with the run
            self._house.hand_over(name, self._content(self._found(inquiry)))
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
        self._house.tell(problem)

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
        workers = sorted(self._house.workers(), key=lambda name: name != inquiry.trouble.worker_id)
        inquiry.asked = [*workers[:MOST_ASKED], *list(self._house.agents())[:MOST_ASKED]]
        self._inquiries[inquiry.number] = inquiry
        self._house.ask(inquiry.asked, Inquire(number=inquiry.number, about=inquiry.trouble.worker_id))

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
        sees, directory = self._house.sees_directory(), Path(self._house.directory())

        def work() -> str:
            content = self._content(found)
            if sees:
                write(directory, self._run_id, inquiry.name, content)
            return content

        try:
            content = await in_thread(work)
        except OSError as error:
            self._house.announce(f"{FOLDER}/{inquiry.name} could not be written: {error.strerror}")
            return
        if not sees:
            self._house.hand_over(inquiry.name, content)

    def _content(self, found: files.Evidence) -> str:
        return files.shown(msgspec.structs.replace(found, versions=versions()), self._secrets)

    def _found(self, inquiry: _Inquiry) -> files.Evidence:
        hosts = self._house.agents()
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
            settings=self._house.settings(),
            recipe=self._house.recipe(),
        )

    def _last_events(self) -> list[str]:
        known = sorted([*self._recent, *self._steps], key=lambda item: item[0])
        return [f"{time.strftime('%H:%M:%S', time.localtime(when))}  {_line(event)}" for when, event in known]


def _line(event: Event) -> str:
    if isinstance(event, StepFinished):
        return f"step {event.step} finished: loss {event.loss!r}, {event.seconds.total():.3f} s"
    if isinstance(event, Announcement):
        return event.text[:600]
    known = {name: getattr(event, name) for name in event.__struct_fields__ if name != "time"}
    kind = str(event.__struct_config__.tag)
    words = ", ".join(f"{name}={value!r}" for name, value in known.items() if value not in ("", -1, 0.0))
    return f"{kind}: {words}"[:600]
