"""A head process with 40 simulated workers of 5 agents: how many messages go where. The benchmark has the times."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.membership import Command
from benchmarks.population import Process, Site
from tests.waiting import WAIT_S
from unisono.cluster.machine.head_connection import Following
from unisono.cluster.machine.headprocess import HeadProcess, Service, listen
from unisono.cluster.trust.invitation import HeadUrl
from unisono.core.following import MAX_HEIRS
from unisono.core.messages import AgentHello
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.system.lifetime import Memory

AGENTS, EACH = 5, 8
WORKERS = AGENTS * EACH


class Run:
    """The command that started a run, its head, and the population."""

    def __init__(self, population: Process, command: Command) -> None:
        self._population = population
        self._command = command
        self.generation = 0

    async def ask(self, method: str, *arguments: Any) -> Any:
        self._population.ask(method, *arguments)
        return await asyncio.to_thread(self._population.answer, WAIT_S)

    async def all_hear(self, num_workers: int) -> None:
        """Wait until so many workers have heard of the same newest generation, and take it."""
        found = self.generation + 1
        while (newest := await self.ask("hear", found, num_workers)) > found:
            found = newest
        self.generation = found
        await self.ask("hold")

    async def counts(self) -> Counter[str]:
        return Counter({kind: number for kind, (number, _) in (await self.ask("counts")).items() if kind != "all"})

    async def steps(self, number: int) -> None:
        """Wait until the head has told of so many steps."""
        while self._command.steps < number:
            await asyncio.sleep(0)


@asynccontextmanager
async def run() -> AsyncIterator[Run]:
    policy = Policy(start=WORKERS, maximum=WORKERS, grows=False)
    token = secrets.token_urlsafe(8)
    with listen(Service(policy=policy)) as listener, Memory("unisono-token", token.encode()) as secret:
        url = str(HeadUrl("127.0.0.1", listener.getsockname()[1]))
        known = RunSettings(heartbeat_s=0.1, max_restarts=0, heartbeat_timeout_s=WAIT_S, hang_s=WAIT_S)
        settings = {"policy": policy, "run_id": "x", "spec": RunSpec(settings=known)}
        head, command = HeadProcess(settings, listener, secret, url), Command()
        hello = AgentHello(host="command", pid=1, num_workers=0, primary=True)
        following = Following(url, token, hello, command, away_s=WAIT_S, head=head)
        following.start_head()
        talk = asyncio.create_task(following.run())
        population = Process(Site(url, token, range(AGENTS), EACH, AGENTS, known.heartbeat_s))
        try:
            while not following.agent_id:
                await asyncio.sleep(0)
            yield Run(population, command)
        finally:
            following.leave()
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
            await head.end()
            population.close()


@pytest.mark.usefixtures("mark")
def test_a_run_of_many_workers_sends_each_of_them_what_it_needs_and_no_more() -> None:
    async def story() -> None:
        async with run() as found:
            assert await found.ask("join") == WORKERS
            counts = await found.counts()
            assert (counts["Welcome"], counts["Start"]) == (WORKERS + AGENTS, AGENTS)
            await found.ask("ready")
            await found.all_hear(WORKERS)
            counts = await found.counts()
            assert counts["Notice"] == WORKERS, "one generation, one notice each"
            # Hellos, the generation, and what the members have reported at the same time.
            assert counts["HeadSnapshot"] <= 6 * (MAX_HEIRS - 1)

            await found.ask("connect", False)
            counts = await found.counts()
            assert counts["StoreAnswer"] == 4 * WORKERS, "however many they are"

            await found.ask("train", 20.0, "w0")
            await found.steps(10)
            await found.ask("calm")
            counts = await found.counts()
            assert counts.keys() <= {"HeadSnapshot", "Happened"}, "heartbeats and steps are answered with nothing"
            assert counts["Happened"] <= 2 * MAX_HEIRS, "what happens, and what machines use, to few agents"
            assert counts["HeadSnapshot"] <= 3 * (MAX_HEIRS - 1), "the members hold the generation; a step is done"

            await found.ask("kill_worker", AGENTS // 2)
            await found.all_hear(WORKERS - 1)
            counts = await found.counts()
            assert counts["Notice"] == WORKERS - 1
            assert 0 < counts["HeadSnapshot"] <= 3 * (MAX_HEIRS - 1)

            await found.ask("kill_agent", AGENTS - 1)
            await found.all_hear(WORKERS - 1 - EACH)
            counts = await found.counts()
            assert counts["Notice"] <= EACH * (WORKERS - 1 - EACH)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
