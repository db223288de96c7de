"""The doctor's program on every machine, here and by ssh, and what they find together.

Machines are reached, and asked first what is there, in the way of ``unisono run --hosts``
(`unisono.cluster.launchers.way`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

import msgspec

from unisono.cluster.launchers.way import Unfit, Way, for_all
from unisono.cluster.machine.children import Child, spawn
from unisono.tools.doctor.asking import MARK, ProbeReply, ProbeRequest
from unisono.tools.doctor.facts import MachineFacts, Scope
from unisono.tools.doctor.together import Known, Path

__all__ = ["examine"]

HERE: Final = "here"
PROGRAM: Final = "unisono.tools.doctor.asking"
ANSWER_S: Final = 40.0
CLOSE_S: Final = 2.0
NUM_CLOCKS: Final = 3


def examine(names: Mapping[str, bool], way: Way, asked: Scope) -> tuple[Known, dict[str, str]]:
    """Return what these machines, or this one, say of themselves and of each other, and why a machine does not answer.

    Args:
        names: of machines, each with whether it is this one, which needs no ssh.

    Returns:
        The second has all machines, in their order, with "" for those that answer.
    """
    found = for_all([name for name, is_here in names.items() if not is_here], way.ask)
    unfit = {name: str(answer) for name, answer in found.items() if isinstance(answer, Unfit)}
    return asyncio.run(_examine(names or {HERE: True}, unfit, way, asked))


async def _examine(
    names: Mapping[str, bool], unfit: Mapping[str, str], way: Way, asked: Scope
) -> tuple[Known, dict[str, str]]:
    hosts = [
        _Host(name, (sys.executable, "-P", "-m", PROGRAM) if is_here else way.to(name, PROGRAM), unfit.get(name, ""))
        for name, is_here in names.items()
    ]
    try:
        return await _known(hosts, asked), {host.name: host.error for host in hosts}
    finally:
        await asyncio.gather(*(host.close() for host in hosts))


class _Host:
    """One machine, with the doctor's program on it.

    Args:
        command: starts the program; its standard input and output reach it.
        error: why it is not to be started.
    """

    def __init__(self, name: str, command: Sequence[str], error: str) -> None:
        self.name = name
        self.error = error
        """Why the machine does not answer; "" as long as it does."""
        self._said: deque[str] = deque(maxlen=3)
        self._answers: asyncio.Queue[ProbeReply | None] = asyncio.Queue()
        self._child: Child | None = None
        if error:
            return
        try:
            self._child = spawn(
                name,
                [*command],
                os.environ,
                (),
                given="",
                is_together=True,
                on_line=self._take,
                on_end=lambda child: self._answers.put_nowait(None),
            )
        except OSError as failed:
            self.error = f"{command[0]} cannot be started: {failed.strerror}"

    async def ask(self, order: ProbeRequest) -> ProbeReply:
        """Return the answer to an order; one with an error where the machine does not answer."""
        self.send(order)
        return await self.answer()

    def send(self, order: ProbeRequest) -> None:
        if self._child is not None:
            self._child.write(msgspec.json.encode(order).decode() + "\n")

    async def answer(self) -> ProbeReply:
        """Return the answer to the oldest order that was sent and not answered yet."""
        if not self.error:
            try:
                async with asyncio.timeout(ANSWER_S):
                    found = await self._answers.get()
                if found is not None:
                    return found
                self.error = f"the program there has ended: {' '.join(self._said) or 'nothing was printed'}"
            except TimeoutError:
                self.error = f"no answer within {ANSWER_S:.0f} s"
        return ProbeReply(error=self.error)

    async def close(self) -> None:
        if self._child is not None:
            self._child.close_input()  # the program ends
            if not await self._child.ended_within(CLOSE_S):
                await self._child.close()

    def _take(self, line: str, is_error: bool) -> None:
        if line.startswith(MARK):
            self._answers.put_nowait(msgspec.json.decode(line.removeprefix(MARK), type=ProbeReply))
        elif line.strip():
            self._said.append(line.strip())


async def _known(hosts: Sequence[_Host], asked: Scope) -> Known:
    for host in hosts:
        host.send(ProbeRequest(what="facts", asked=asked))
    answers = {host.name: await host.answer() for host in hosts}
    facts = {name: answer.facts for name, answer in answers.items() if answer.facts is not None}
    able = [host for host in hosts if host.name in facts]
    if len(able) < 2:
        return Known(facts=facts)
    return Known(
        facts=facts,
        clocks={host.name: await _clock(host) for host in able},
        sees_run_dir=await _who_sees(able, facts[able[0].name].disk_folder),
        paths=[await _path(source, target, facts, asked) for source, target in itertools.permutations(able, 2)],
    )


async def _clock(host: _Host) -> float:
    """Return by how much the clock of a machine is ahead of the one here; of several looks the quickest counts."""
    looks = []
    for _ in range(NUM_CLOCKS):
        begun = time.time()
        answer = await host.ask(ProbeRequest(what="clock"))
        ended = time.time()
        looks.append((ended - begun, answer.time - (begun + ended) / 2))
    return min(looks)[1]


async def _who_sees(able: Sequence[_Host], folder: str) -> Mapping[str, bool]:
    """Return which machines see a file that the first one makes in a folder; nothing where it cannot."""
    file = str(PurePath(folder) / f".unisono-doctor-{secrets.token_hex(4)}")
    first, *others = able
    if (await first.ask(ProbeRequest(what="make", file=file))).error:
        return {}
    try:
        return {host.name: (await host.ask(ProbeRequest(what="see", file=file))).is_there for host in others}
    finally:
        await first.ask(ProbeRequest(what="remove", file=file))


async def _path(source: _Host, target: _Host, facts: Mapping[str, MachineFacts], asked: Scope) -> Path:
    served = await target.ask(ProbeRequest(what="serve", asked=asked))
    if served.error:
        return Path(source=source.name, target=target.name, error=served.error)
    addresses = [each for each in facts[target.name].addresses if (":" in each) == asked.ipv6]
    answer = await source.ask(ProbeRequest(what="measure", addresses=addresses, port=served.port, word=served.word))
    return Path(
        source=source.name,
        target=target.name,
        address=answer.address,
        latency_s=answer.latency_s,
        bandwidth=answer.bandwidth,
        error=answer.error,
    )
