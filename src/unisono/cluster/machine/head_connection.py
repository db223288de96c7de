"""Connection of an agent to the head of its run, made again while the head is away, and the newest state of the head.

However a head has ended, the same follows: another one is started with the newest state of an heir and a term that is
one higher, and all agents and workers connect to that. As long as the machine of the head lives, its agent starts the
next one at once (`Followed.is_successor`); where that machine is lost, or out of reach, another heir does
(`Followed.may_start`). Workers follow their agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from functools import partial
from typing import Final, Protocol

import msgspec

from unisono.cluster.machine.children import NOT_STARTED, Child, Listener
from unisono.cluster.machine.headprocess import MAX_HEADS, HeadProcess
from unisono.cluster.trust.invitation import shown
from unisono.cluster.worker.link import Link, Refused, open_link
from unisono.core.events import StepFinished
from unisono.core.following import GONE_S, MAX_HEIRS, SUPERSEDED, TURN_S, Absence, StaleHead, is_majority
from unisono.core.messages import (
    AgentHello,
    Ended,
    Foreign,
    Happened,
    Heads,
    HeadSnapshot,
    MachineInfo,
    Message,
    Moved,
    Welcome,
    WorkerExit,
    decode,
    encode,
)
from unisono.core.settings import Partition
from unisono.core.sides import Allegiance
from unisono.core.words import silent_exit_words

__all__ = ["Following", "Owner"]

OPEN_S: Final = 10.0
ELSEWHERE_S: Final = 3.0
"""Where the head may be at several addresses, none of them is waited for longer at once."""
RETRY_S: Final = 0.05
AVOID_S: Final = 2.0
"""How long a head that this agent cannot follow is left alone."""
LATE_HEAD_S: Final = 15.0
"""How much longer than the heirs take an agent waits for one of them to start the next head."""
MAX_KNOWN: Final = 8
"""Addresses at which a head was, or may be."""


class Owner(Listener, Protocol):
    """The agent, as `Following` calls it."""

    def receive(self, message: Message) -> None:
        """Receive a message of the head."""

    def end(self, ended: Ended) -> None:
        """End the run for this machine: there is no head any more."""

    def known_end(self) -> Ended | None:
        """Return how the run has ended, by what this machine sees; None: it does not know of an end."""

    def follow(self, url: str) -> None:
        """Have the workers of this machine follow the head at this address; "": let them wait for one."""

    def has_workers(self) -> bool:
        """Return whether a worker of this machine runs."""

    async def forget_workers(self) -> None:
        """End the workers of this machine, and report nothing about them: a head elsewhere will order new ones."""


class Following:
    """The connection of an agent to the head of its run, whichever head that is.

    Args:
        hello: how the agent introduces itself.
        away_s: how long a head may be away before this machine gives up, or starts the next one.
        head: starts heads on this machine; None: there can be none. The command that starts the run starts the first.
        partition: what this machine does when it is cut off from the head.
    """

    def __init__(
        self,
        url: str,
        token: str,
        hello: AgentHello,
        owner: Owner,
        *,
        away_s: float,
        head: HeadProcess | None,
        partition: Partition = "go-on",
    ) -> None:
        self._url = self._first_url = url
        self._token = token
        self._hello = hello
        self._owner = owner
        self._away_s = away_s
        self._head = head
        self._side = Allegiance(has_seat=hello.primary and head is not None)
        self._link: Link | None = None
        self._is_welcome = False
        self._outbox: deque[Message] = deque()
        self._reports: dict[
            str, Message
        ] = {}  # repeated after each `Welcome`: an earlier head may not have received them
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._partition = partition
        self._absence: Absence | None = None
        self._machines: list[MachineInfo] = []
        self._urls: list[str] = []  # where else a head was, or may be; the newest first
        self._avoided: dict[str, float] = {}  # until when
        self._reached: set[str] = set()  # addresses of machines that have answered, be it that nobody listens
        self._was_refused = False
        self._found = url  # the address of the head at the other end of the connection
        self._last_step = -1
        self._lost_head: Child | None = None  # this head has ended, and its last messages are not all read
        self._head_is_done = False
        self._is_over = False
        self._command = ""  # the address of the command that has started this agent, which would end it if it could
        self._is_answered = asyncio.Event()
        self._is_answered.set()
        self.agent_id = ""
        self.run_id = ""
        self.num_machines = 1

    @property
    def has_seat(self) -> bool:
        """The head is this agent's child."""
        return self._side.has_seat

    @property
    def snapshot(self) -> HeadSnapshot | None:
        """The newest version of the head's state."""
        return self._side.followed.snapshot

    # -- what the agent asks for ---------------------------------------------------------------------

    def start_head(self) -> None:
        """Start the head, where it is this agent's child.

        Raises:
            OSError: no process can be started.
        """
        if self.has_seat:
            self._start_head()

    def _start_head(self, **settings: str) -> None:
        assert self._head is not None
        self._side = self._side.seated()
        state = self.snapshot.state if self.snapshot is not None else b""
        settings |= {"branch": self._side.branch}
        term = self._side.followed.term
        self._head.start(term, state, partial(self._owner.on_line, "head"), self._head_ended, **settings)

    def send(self, message: Message) -> None:
        """Send a message to the head, and again to every later head: the table ignores repetitions."""
        what = message.worker_id if isinstance(message, WorkerExit) else type(message).__name__
        self._reports[what] = message
        self._outbox.append(message)
        self._is_sent.clear()
        self._flush_outbox()

    def report(self, message: Message) -> bool:
        """Send a message to this head only, and only if it can be sent now; return whether it was sent."""
        link = self._link
        if link is None or not self._is_welcome or self._outbox or not link.is_acknowledged:
            return False
        try:
            link.put(encode(message))
        except OSError:
            return False  # the reader gets the same error
        return True

    def say_end(self, ended: Ended) -> None:
        """Send the end of the run to the head; `answered` waits until the head has sent it to the other machines."""
        if self.agent_id:
            self._is_answered.clear()
        self.send(ended)

    def hurry(self) -> None:
        """Stop all waits for the head, after a second signal."""
        self._is_answered.set()

    def outlive_command(self) -> None:
        """Note that the command that has started this agent cannot end it any more: this agent ends when it is gone."""
        self._command = self._first_url

    def leave(self) -> None:
        """Note that the run is over for this machine: do not start a head after this one."""
        self._is_over = True

    async def sent(self, seconds: float) -> None:
        """Wait until all messages are sent to the head, for so long at most."""
        await _wait(self._is_sent, seconds)

    async def answered(self, seconds: float) -> None:
        """Wait until the head has answered the end of the run, or has ended, for so long at most."""
        await _wait(self._is_answered, seconds)

    # -- connections ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the head, and those that follow it, until the run is over. Each absence has its own time."""
        while not self._is_over or not self._is_answered.is_set():
            joins = self._side.joins
            try:
                why = await self._follow()
            except Refused as refused:
                why = f"the head at {shown(self._url)} rejects this machine with {refused}"
                self._end(Ended(ok=False, reason=why, exit_code=1))
            except OSError as error:
                why = f"the connection to the head at {shown(self._url)} broke: {error}"
            except Exception as error:
                self._end(Ended(ok=False, reason=f"{type(error).__name__}: {error}", exit_code=1))
                raise
            if self._side.joins != joins and not self._is_over:
                self._url = self._side.joins
                self._owner.on_notice(f"this machine joins the head at {self._url}, with new workers")
                continue
            self._note_absence(why)
            await self._take_over_when_due(why)
            await asyncio.sleep(RETRY_S)
            if self._head_is_done:
                why = (
                    "the head has ended the run, and its final message did not arrive: the head was asked to end, or "
                    "this command was stopped for too long"
                )
                self._end(Ended(ok=False, reason=why, exit_code=1))

    def _note_absence(self, why: str) -> None:
        now = time.monotonic()
        if self._absence is None:
            self._absence = Absence(now)
            if not self._is_over and not self._hello.primary:
                self._owner.on_notice(f"{why}; the workers continue for {self._away_s:.0f} s")
        self._absence = self._absence.tried(self._was_refused, now)
        has_never_followed = not self.agent_id and not self._hello.primary
        if now - self._absence.since > self._patience_s() or has_never_followed:
            if self._partition == "wait" and self._may_be_next():
                why += "; this machine could continue without that head, but must not (--set when-cut=wait)"
            self._end(self._owner.known_end() or Ended(ok=False, reason=why, exit_code=1))
        gone_since = self._absence.refused_since
        if self._url == self._command and gone_since is not None and now >= gone_since + GONE_S:
            why = f"the command that has started this agent is gone: nobody listens at {shown(self._url)}"
            self._end(Ended(ok=False, reason=why, exit_code=1))

    def _patience_s(self) -> float:
        """Return how long this machine waits for a head: longer where another machine may start the next one."""
        others = [machine for machine in self._machines if machine.url not in (self._url, self._own_url)]
        if self._partition == "wait" or not (others or self._may_be_next()):
            return self._away_s
        return self._away_s + MAX_HEIRS * TURN_S + LATE_HEAD_S

    # -- the next head, where the machine of the last one is lost --------------------------------------

    @property
    def _own_url(self) -> str:
        return self._head.url if self._head is not None else ""

    def _may_be_next(self) -> bool:
        return self._head is not None and self.snapshot is not None and self.agent_id in self.snapshot.heirs

    async def _take_over_when_due(self, why: str) -> None:
        """Start the next head here, if it is this machine's turn."""
        if self._is_over or self.has_seat or self._head is None or self._absence is None:
            return
        here = {machine.agent_id for machine in self._machines if machine.url in self._reached} | {self.agent_id}
        now = time.monotonic()
        is_due = self._side.followed.may_start(
            self.agent_id,
            self._absence,
            self._partition,
            away_s=self._away_s,
            has_majority=is_majority(here, {machine.agent_id for machine in self._machines} | here),
            has_workers=self._owner.has_workers(),
            now=now,
        )
        if not is_due:
            return
        is_gone = self._absence.refused_since is not None
        await self._head.end()  # one that has given way
        try:
            self._start_head(seat=self.agent_id, run_id=self.run_id, before="gone" if is_gone else "away")
        except OSError as error:
            self._end(Ended(ok=False, reason=f"{why}; the next one {NOT_STARTED.format(error)}", exit_code=1))
            return
        self._url, self._absence = self._head.url, None
        self._owner.on_notice(f"{why}; this machine runs the next head, and the run continues")

    async def _leave_side(self) -> None:
        """End the workers of this machine, and the head that has given way: the head that it joins has answered."""
        await self._owner.forget_workers()
        if self._head is not None:
            await self._head.end()
            with contextlib.suppress(OSError):
                self._head.renew(self._found)
        self._reports.clear()
        self._outbox.clear()
        self._side, self._last_step = self._side.joined(), -1

    def _learn_machines(self, machines: list[MachineInfo]) -> None:
        if machines:
            self._machines = machines
            urls = [machine.url for machine in machines[:MAX_HEIRS]]
            self._urls = list(dict.fromkeys([*urls, self._found, *self._urls]))[:MAX_KNOWN]

    async def _follow(self) -> str:
        """Talk to one head until the connection ends."""
        link = await self._reach()
        if self._found == self._side.joins:
            await self._leave_side()
        self._link = link
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def pump() -> None:
            try:
                for data in link.take():
                    self._take(decode(data))
                self._flush_outbox()
            except Exception as error:
                loop.remove_reader(link.sock)
                if not ended.done():
                    ended.set_exception(error)

        loop.add_reader(link.sock, pump)
        try:
            hello = msgspec.structs.replace(
                self._hello,
                agent_id=self.agent_id,
                term=self._side.followed.term,
                url=self._own_url,
                branch=self._side.branch,
                fresh=self._side.is_fresh,
                run_id=self.run_id,
            )
            link.put(encode(hello))
            pump()
            return await ended
        finally:
            self._link, self._is_welcome = None, False
            self._owner.follow("")  # what a head says to workers whose machine does not follow it counts for nothing
            loop.remove_reader(link.sock)
            loop.remove_writer(link.sock)
            link.close()
            lost, self._lost_head = self._lost_head, None
            if lost is not None and not self._is_over:
                self._start_next(lost)

    async def _reach(self) -> Link:
        """Connect to the head, wherever it is: to the first address at which one answers.

        Raises:
            Refused, OSError: of the address at which the head was.
        """
        # Without an answer, an attempt must not take much longer than the head may be away.
        open_s = min(OPEN_S, 1.0 + self._away_s) if self.agent_id else OPEN_S
        urls = self._places()
        if len(urls) > 1:
            open_s = min(open_s, ELSEWHERE_S)
        attempts = {url: asyncio.ensure_future(open_link(url, self._token, open_s)) for url in urls}
        found, waiting = "", set(attempts.values())
        try:
            while waiting and not found:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                answered = [url for url, attempt in attempts.items() if attempt.done() and not attempt.exception()]
                found = next(iter(answered), "")
        finally:
            for url, attempt in attempts.items():
                if url != found:
                    _drop(attempt)
        failures = {url: attempt.exception() for url, attempt in attempts.items() if attempt.done() and url != found}
        self._reached = {url for url, failure in failures.items() if isinstance(failure, ConnectionRefusedError)}
        self._was_refused = self._url in self._reached
        if found:
            self._found = found
            return attempts[found].result()
        failure = failures.get(self._url)
        raise failure if failure is not None else OSError("no head answers")

    def _places(self) -> list[str]:
        """Return the addresses at which the head may be, first the one at which it was."""
        if self.has_seat:
            return [self._url]
        now = time.monotonic()
        others = self._urls
        if self._partition == "majority" and self._absence is not None:
            others = [*others, *(machine.url for machine in self._machines)]
        found = [url for url in dict.fromkeys(others) if url not in (self._url, self._own_url)]
        found = [url for url in found if self._avoided.get(url, 0.0) <= now]
        is_avoided = self._avoided.get(self._url, 0.0) > now
        return [*([] if is_avoided and found else [self._url]), *(found if self.agent_id else [])]

    def _flush_outbox(self) -> None:
        """Send what can be sent now, and the rest when there is room."""
        link = self._link
        if link is None or not self._is_welcome:
            return
        loop = asyncio.get_running_loop()
        try:
            link.push()
            while self._outbox and not link.wants_to_write:
                link.put(encode(self._outbox.popleft()))
        except OSError:
            return  # the reader gets the same error, after the head's last messages
        if link.wants_to_write:
            loop.add_writer(link.sock, self._flush_outbox)
            return
        loop.remove_writer(link.sock)
        self._is_sent.set()

    def _end(self, ended: Ended) -> None:
        self._is_over = True
        self._owner.end(ended)

    # -- messages of the head ------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        match message:
            case Welcome():
                self._welcomed(message)
                self.agent_id, self.run_id = message.agent_id, message.run_id
                self._url, self._absence = self._found, None
                self._learn_machines(message.machines)
                self.num_machines = message.num_machines
                self._owner.follow(self._url)
                self._is_welcome = True
                self._outbox = deque(self._reports.values())
            case Heads():
                self._side = msgspec.structs.replace(self._side, branch=message.branch)
                self.num_machines = message.num_machines
                self._learn_machines(message.machines)
            case Foreign():
                has_workers = self._head is not None and self._owner.has_workers()
                self._side = self._side.offered(
                    self._found, message, self.agent_id, has_workers=has_workers, last_step=self._last_step
                )
                if self._side.joins != self._found:
                    self._avoided[self._found] = time.monotonic() + AVOID_S
                raise ConnectionError(f"the head at {self._found} continued without this machine")
            case Moved():
                self._side = self._side.sent(message.url)
                raise ConnectionError(f"the head yields to the one at {message.url}")
            case Happened(events=[*_, StepFinished() as event]):
                self._last_step = max(self._last_step, event.step)
                self._owner.receive(message)
            case HeadSnapshot():
                followed, answer = self._side.followed.keep(message)
                self._side = msgspec.structs.replace(self._side, followed=followed)
                self._outbox.append(answer)
            case Ended():
                self._is_answered.set()
                self._owner.receive(message)
            case _:
                self._owner.receive(message)

    def _welcomed(self, welcome: Welcome) -> None:
        try:
            self._side = self._side.welcomed(welcome)
        except StaleHead:
            self._avoided[self._found] = time.monotonic() + AVOID_S
            raise

    # -- the head's process --------------------------------------------------------------------------

    def _head_ended(self, child: Child) -> None:
        self._is_answered.set()
        if child.exit_code == SUPERSEDED:
            self._side = self._side.sent("")
            self._url = next(
                (url for url in (self._side.joins, *self._urls) if url not in ("", self._own_url)), self._url
            )
            return
        if self._is_over:  # the head has done its work; what it leaves is still this agent's to look after
            return
        if child.exit_code == 0:
            self._head_is_done = True  # `run` reads its last messages first
        elif self._link is not None:
            self._lost_head = child  # the connection's end starts the next head, after the last messages are read
        else:
            self._start_next(child)

    def _start_next(self, child: Child) -> None:
        """Start another head after one that has died."""
        assert self._head is not None
        if self._side.joins or (not self.has_seat and not self._side.followed.is_successor(self.agent_id)):
            return
        lines = "".join(f"\n{line}" for line in child.output.last_lines)
        reason = f"the head (pid {child.pid}) {silent_exit_words(child.exit_code or 0)}{lines}"
        if not self._head.may_start_again():
            self._end(Ended(ok=False, reason=f"{reason}; {MAX_HEADS} heads in a row have ended", exit_code=1))
            return
        try:
            self._start_head(run_id=self.run_id, seat=self.agent_id) if self.run_id else self._start_head()
        except OSError as error:
            why = f"{reason}; another one {NOT_STARTED.format(error)}"
            self._end(Ended(ok=False, reason=why, exit_code=1))
        else:
            self._owner.on_notice(f"{reason}; another one takes over, and the workers continue")


def _drop(attempt: asyncio.Future[Link]) -> None:
    """Give up an attempt to connect."""

    def close(done: asyncio.Future[Link]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    attempt.cancel()
    attempt.add_done_callback(close)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
