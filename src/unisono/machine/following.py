"""Connection of an agent to the head of its run, made again while the head is away, and the newest state of the head.

However a head has ended, the same follows: the agent that `Followed.is_successor` names starts the next head, with
the newest state that it holds and a term that is one higher, and all agents and workers connect to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from typing import Final, Protocol

import msgspec

from unisono.decisions.following import SUPERSEDED, Followed
from unisono.link import Link, Refused, host_and_port
from unisono.machine.children import NOT_STARTED, Child
from unisono.machine.headprocess import MAX_HEADS, HeadProcess
from unisono.messages import AgentHello, Ended, Message, Snapshot, Welcome, WorkerExit, decode, encode
from unisono.words import exit_words

__all__ = ["Following", "Owner"]

OPEN_S: Final = 10.0
RETRY_S: Final = 0.05


class Owner(Protocol):
    """The agent, as `Following` calls it."""

    def receive(self, message: Message) -> None:
        """Receive a message of the head."""

    def announce(self, text: str) -> None:
        """Show a sentence to the user."""

    def show_head_line(self, text: str, is_error: bool) -> None:
        """Show a line that the head's process has printed."""

    def end(self, ended: Ended) -> None:
        """End the run for this machine: there is no head any more."""


class Following:
    """The connection of an agent to the head of its run, whichever head that is.

    Args:
        hello: how the agent introduces itself.
        away_s: how long a head may be away before the machine gives up.
        head: starts heads, where the head is this agent's child; None in ``unisono join``.
    """

    def __init__(
        self, url: str, token: str, hello: AgentHello, owner: Owner, *, away_s: float, head: HeadProcess | None
    ) -> None:
        self._url = url
        self._token = token
        self._hello = hello
        self._owner = owner
        self._away_s = away_s
        self._head = head
        self._known = Followed()
        self._link: Link | None = None
        self._is_welcome = False
        self._outbox: deque[Message] = deque()
        self._reports: dict[
            str, Message
        ] = {}  # repeated after each `Welcome`: an earlier head may not have received them
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._away_since: float | None = None
        self._lost_head: Child | None = None  # this head has ended, and its last messages are not all read
        self._head_is_done = False
        self._is_over = False
        self._is_answered = asyncio.Event()
        self._is_answered.set()
        self.agent_id = ""
        self.run_id = ""

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest version of the head's state."""
        return self._known.snapshot

    # -- what the agent asks for ---------------------------------------------------------------------

    def start_head(self) -> None:
        """Start the head, where it is this agent's child.

        Raises:
            OSError: no process can be started.
        """
        if self._head is None:
            return
        self._known = self._known.learn(self._known.term + 1)
        state = self._known.snapshot.state if self._known.snapshot is not None else b""
        self._head.start(self._known.term, state, self._owner.show_head_line, self._head_ended)

    def send(self, message: Message) -> None:
        """Send a message to the head, and again to every later head: the table ignores repetitions."""
        what = message.worker_id if isinstance(message, WorkerExit) else type(message).__name__
        self._reports[what] = message
        self._outbox.append(message)
        self._is_sent.clear()
        self._flush_outbox()

    def say_end(self, ended: Ended) -> None:
        """Send the end of the run to the head; `answered` waits until the head has sent it to the other machines."""
        if self.agent_id:
            self._is_answered.clear()
        self.send(ended)

    def hurry(self) -> None:
        """Stop all waits for the head, after a second signal."""
        self._is_answered.set()

    def own_address(self) -> str:
        """Return the address of this machine at which others reach it: that of its connection to the head."""
        return str(self._link.sock.getsockname()[0]) if self._link is not None else "127.0.0.1"

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
            try:
                why = await self._follow()
            except Refused as refused:
                why = f"the head at {self._url} refuses this machine with {refused}"
                self._end(Ended(ok=False, reason=why, exit_code=1))
            except OSError as error:
                why = f"the connection to the head at {self._url} broke: {error}"
            except Exception as error:
                self._end(Ended(ok=False, reason=f"{type(error).__name__}: {error}", exit_code=1))
                raise
            self._note_absence(why)
            await asyncio.sleep(RETRY_S)
            if self._head_is_done:
                why = (
                    "the head has ended the run, and its final message did not arrive: the head was asked to end, or "
                    "this command was stopped for too long"
                )
                self._end(Ended(ok=False, reason=why, exit_code=1))

    def _note_absence(self, why: str) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            if not self._is_over and self._head is None:
                self._owner.announce(f"{why}; the workers go on for {self._away_s:.0f} s")
        has_never_followed = not self.agent_id and self._head is None
        if now - self._away_since > self._away_s or has_never_followed:
            self._end(Ended(ok=False, reason=why, exit_code=1))

    async def _follow(self) -> str:
        """Talk to one head until the connection ends."""
        self._link = link = await self._reach()
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
                self._hello, agent_id=self.agent_id, term=self._known.term, run_id=self.run_id
            )
            link.put(encode(hello))
            pump()
            return await ended
        finally:
            self._link, self._is_welcome = None, False
            loop.remove_reader(link.sock)
            loop.remove_writer(link.sock)
            link.close()
            lost, self._lost_head = self._lost_head, None
            if lost is not None and not self._is_over:
                self._start_next(lost)

    async def _reach(self) -> Link:
        # Without an answer, an attempt must not take much longer than the head may be away.
        open_s = min(OPEN_S, 1.0 + self._away_s) if self.agent_id else OPEN_S
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(open_s):
                sock = await _connect(*host_and_port(self._url))
                try:
                    link = Link(sock, self._url, self._token)
                    while not link.is_open:
                        link.feed(await loop.sock_recv(sock, 65536))
                    return link
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError:
            raise TimeoutError(f"no answer within {open_s:.0f} s") from None

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
                self._known = self._known.learn(message.term)
                self.agent_id, self.run_id = message.agent_id, message.run_id
                self._away_since = None
                self._is_welcome = True
                self._outbox = deque(self._reports.values())
            case Snapshot():
                self._known, answer = self._known.keep(message)
                self._outbox.append(answer)
            case Ended():
                self._is_answered.set()
                self._owner.receive(message)
            case _:
                self._owner.receive(message)

    # -- the head's process --------------------------------------------------------------------------

    def _head_ended(self, child: Child) -> None:
        self._is_answered.set()
        if self._is_over or child.exit_code == SUPERSEDED:
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
        if not self._known.is_successor(self.agent_id):
            return
        lines = "".join(f"\n{line}" for line in child.output.last_lines)
        reason = f"the head (pid {child.pid}) {exit_words(child.exit_code or 0)}{lines}"
        if not self._head.may_start_again():
            self._end(Ended(ok=False, reason=f"{reason}; {MAX_HEADS} heads in a row have ended", exit_code=1))
            return
        try:
            self.start_head()
        except OSError as error:
            why = f"{reason}; another one {NOT_STARTED.format(error)}"
            self._end(Ended(ok=False, reason=why, exit_code=1))
        else:
            self._owner.announce(f"{reason}; another one takes over, the workers go on")


async def _connect(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that is connected to the first address of this host that answers."""
    loop = asyncio.get_running_loop()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name, whose look-up may take long
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
