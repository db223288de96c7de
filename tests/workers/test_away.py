"""An agent while the head is out of reach, with a head that is there and away as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.cluster.machine import agent, head_connection
from unisono.cluster.machine.head_connection import Following
from unisono.core.events import RunEnded
from unisono.core.messages import Ended, Message, Welcome, encode
from unisono.core.settings import RunSettings
from unisono.core.spec import MachineSpec, RunSpec
from unisono.record.journal import JOURNAL
from unisono.record.journal.lines import text_of, to_line
from unisono.record.rundir import describe
from unisono.system.lifetime import Memory
from unisono.views.watch import EventStream
from unisono.views.watch.terminal import PlainTerminal

WELCOME = Welcome(run_id="x", heartbeat_s=0.5, agent_id="agent1")
HEAD_AWAY_S = 10.0


class Connection:
    """A `Link` over which the head says this; then it breaks, as when the head is killed."""

    wants_to_write = False

    def __init__(self, said: Sequence[Message]) -> None:
        self._said = [encode(message) for message in said]
        self.sock, self._far = socket.socketpair()
        self._far.send(b"x")  # there is something to read

    def put(self, data: bytes) -> None:
        pass

    def push(self) -> None:
        pass

    def take(self) -> list[bytes]:
        if not self._said:
            raise ConnectionError("it broke")
        found, self._said = self._said, []
        return found

    def close(self) -> None:
        self.sock.close()
        self._far.close()


def outcome(
    attempts: Iterator[tuple[float, Sequence[Message] | None]], monkeypatch: pytest.MonkeyPatch, run_dir: str = ""
) -> Ended:
    """How a machine that has joined ends, whose attempts to reach the head are made at these times; None: in vain."""
    clock = SimpleNamespace(now=0.0)

    async def reach(self: Following) -> Connection:
        clock.now, said = next(attempts)
        if said is None:
            raise ConnectionRefusedError("nobody listens")
        return Connection(said)

    async def work() -> Ended:
        settings = RunSettings(head_away_s=HEAD_AWAY_S, run_dir=run_dir)
        spec = MachineSpec(run=RunSpec(arguments=("train.py",), settings=settings), num_workers=1)
        with contextlib.closing(Memory("unisono-token")) as secret:
            guest = agent._Agent(spec, "ws://127.0.0.1:1", "token", secret, EventStream([PlainTerminal()]), None)
        talk = asyncio.create_task(guest._following.run())
        ended = await asyncio.wait_for(guest._over, 60)
        talk.cancel()
        await asyncio.gather(talk, return_exceptions=True)
        await guest.close()
        return ended

    monkeypatch.setattr(Following, "_reach", reach)
    monkeypatch.setattr(head_connection, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return asyncio.run(work())


def test_each_disconnection_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was down for a while an hour ago does not shorten the time of the next failure."""
    attempts = [(0.0, [WELCOME]), (8.0, None), (9.0, [WELCOME]), (3600.0, [WELCOME]), (3608.0, None)]
    last = (3609.0, [WELCOME, Ended(ok=True, reason="finished")])
    assert outcome(iter([*attempts, last]), monkeypatch).ok


def test_a_head_that_stays_away_ends_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = outcome(iter([(0.0, [WELCOME]), (9.0, None), (10.5, None)]), monkeypatch)
    assert not ended.ok
    assert "nobody listens" in ended.reason


def test_what_takes_connections_and_says_nothing_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay, for example, that is still there when the machine behind it is not."""
    assert not outcome(iter([(0.0, [WELCOME]), (9.0, []), (10.5, [])]), monkeypatch).ok


@pytest.mark.parametrize("is_own", [True, False])
def test_a_machine_that_was_cut_off_knows_the_end_of_the_run_from_its_journal(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side has finished meanwhile, and no head is left that could say so."""
    describe(tmp_path, {"run_id": "x" if is_own else "another"})
    line = text_of({"line": 0, **to_line(RunEnded(ok=True, reason="", digests={}))})
    (tmp_path / JOURNAL).write_text(f"{line}\n")
    attempts = [(0.0, [WELCOME]), (9.0, None), (10.5, None)]
    assert outcome(iter(attempts), monkeypatch, str(tmp_path)).ok == is_own
