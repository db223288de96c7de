"""The search for another head of the run, with a head that takes its time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from websockets.asyncio.server import ServerConnection, serve

from tests.waiting import WAIT_S
from unisono.cluster.head import meeting
from unisono.cluster.head.meeting import Meeting
from unisono.core.messages import Proposal, Verdict, decode, encode


class Training(Meeting):
    """A side of the run that gets on."""

    def __init__(self, url: str) -> None:
        self.step = 3
        self.has_answer = asyncio.Event()
        self._lost = url

    def lost_addresses(self) -> Sequence[str]:
        return [self._lost]

    def propose(self) -> Proposal:
        return Proposal(run_id="x", agent_id="agent0", term=1, step=self.step, url="")

    def answered(self, url: str, answer: Verdict | None) -> None:
        if answer is not None:
            self.has_answer.set()


def test_a_head_says_to_another_one_how_far_it_is_when_that_one_can_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a side that has come further while the network was cut would join the one that is behind."""
    monkeypatch.setattr(meeting, "PACE_S", 0.0)
    monkeypatch.setattr(meeting, "ANSWER_S", WAIT_S)

    async def meet() -> int:
        heard: list[Proposal] = []

        async def talk(connection: ServerConnection) -> None:
            message = decode(bytes(await connection.recv(decode=False)))
            assert isinstance(message, Proposal)
            heard.append(message)
            await connection.send(encode(Verdict(gives_way="me", step=5)))

        with socket.create_server(("127.0.0.1", 0)) as listener:
            side = Training(f"ws://127.0.0.1:{listener.getsockname()[1]}")
            search = asyncio.create_task(side.search("token"))
            await _calls(listener)
            side.step = 8
            async with serve(talk, sock=listener):
                await asyncio.wait_for(side.has_answer.wait(), WAIT_S)
            search.cancel()
        return heard[0].step

    assert asyncio.run(meet()) == 8


async def _calls(listener: socket.socket) -> None:
    """Until somebody has called, whom nobody has answered yet."""
    has_called = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(listener, has_called.set)
    await asyncio.wait_for(has_called.wait(), WAIT_S)
    loop.remove_reader(listener)
