"""What a run of many workers costs its head: the time of a generation, and the work of heartbeats and steps.

python -m benchmarks.membership                                  # 1,000 workers of 125 agents
python -m benchmarks.membership --workers 256 --agents 32 --json membership.json
python -m benchmarks.membership --profile head.prof              # where the head's time goes (slower)

The head is the process that `unisono run` starts. Agents and workers are simulated in a few processes: each has a real
connection and sends and receives the messages of a training, and none computes. On one machine they share its cores
with the head.

`generation_s`: from the last worker's `Ready` to the last worker's `Notice` of the first generation; `generation_mb`:
what the head sends for that, and `notice_mb`: how much it would be uncompressed. `store_s`, `store_cpu_s`: the members
of a generation find each other through the head's store, in as many groups as a machine has workers; the time that
takes, and the head's part of it. `heartbeat_cpu`: share of one core in a steady training without steps; `head_cpu`: the
same with steps. `versions`, `version_kb`: versions of the state that an heir has received with these, and the
uncompressed size of one. `loss_s`, `machine_loss_s`: from the end of a worker (which its agent reports), and from the
end of a machine with all of its workers (whose connections end), to the last survivor's `Notice`. `head_mb`: most
memory of the head. `head_loss_s`: from the end of the head (SIGKILL) to the last worker's `Welcome` of the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.population import Process, Site
from benchmarks.report import print_table, write_json
from unisono.cluster.machine import headprocess
from unisono.cluster.machine.head_connection import Following
from unisono.cluster.machine.headprocess import HeadProcess, Service, listen
from unisono.cluster.trust.invitation import HeadUrl
from unisono.core.events import StepFinished
from unisono.core.messages import AgentHello, Ended, Happened, Message
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.system.lifetime import Memory

TIMEOUT_S: Final = 180.0
SETTLE_S: Final = 2.0


class Command:
    """The agent of ``unisono run``, without workers of its own: it starts the head and follows it."""

    def __init__(self) -> None:
        self.steps = 0
        """The last step of which the head has told."""

    def receive(self, message: Message) -> None:
        if isinstance(message, Ended):
            print(f"the run has ended: {message.reason}", flush=True)
        elif isinstance(message, Happened) and isinstance(step := message.events[-1], StepFinished):
            self.steps = step.step

    def on_notice(self, text: str) -> None:
        if "join" not in text:
            print(text[:200], flush=True)

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        print(f"{name}: {text}", flush=True)

    def end(self, ended: Ended) -> None:
        self.receive(ended)

    def known_end(self) -> Ended | None:
        return None

    def has_workers(self) -> bool:
        return False

    def follow(self, url: str) -> None:
        """Do nothing: the simulated workers know no other head."""

    async def forget_workers(self) -> None:
        """Do nothing: there are none."""


def cpu_seconds(pid: int) -> float:
    """Return the time that a process has had a core."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class Bench:
    """One head, and the populations around it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._populations: list[Process] = []
        self._generation = 0
        self._alive = options.workers
        self.figures: dict[str, float] = {}

    async def run(self) -> None:
        options = self._options
        policy = Policy(start=options.workers, maximum=options.workers, grows=False)
        token = secrets.token_urlsafe(32)
        secret = Memory("unisono-token", token.encode())
        listener = listen(Service(policy=policy))
        url = str(HeadUrl("127.0.0.1", listener.getsockname()[1]))
        known = RunSettings(heartbeat_s=options.heartbeat_s, timeout_s=600.0, max_restarts=0)
        settings = {"policy": policy, "run_id": "bench", "spec": RunSpec(settings=known)}
        if options.profile:
            headprocess.spawn = partial(profiled, headprocess.spawn, options.profile)  # type: ignore[attr-defined]
            headprocess.TERMINATE_S = 60.0  # type: ignore[attr-defined]
        head = HeadProcess(settings, listener, secret, url)
        hello = AgentHello(host="command", pid=os.getpid(), num_workers=0, primary=True)
        following = Following(url, token, hello, Command(), away_s=60.0, head=head)
        following.start_head()
        talk = asyncio.create_task(following.run())
        try:
            while not following.agent_id:
                await asyncio.sleep(0.01)
            self._open(url, token)
            assert head.child is not None
            await self._measure(head.child.pid)
            await self._take_over(head)
        finally:
            following.leave()
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
            await head.end()
            for population in self._populations:
                population.close()
            listener.close()
            secret.close()

    def _open(self, url: str, token: str) -> None:
        options = self._options
        share = -(-options.agents // options.processes)
        for first in range(0, options.agents, share):
            agents = range(first, min(first + share, options.agents))
            each = options.workers // options.agents
            site = Site(url, token, agents, each, options.agents, options.heartbeat_s, options.alone)
            self._populations.append(Process(site))

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Ask all populations, and return their answers."""
        for population in self._populations:
            population.ask(method, *arguments)
        return [await asyncio.to_thread(population.answer) for population in self._populations]

    async def _heard(self, generation: int) -> float:
        """Wait until all living workers have heard of a generation, and return when the last one did."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answers = await self._ask("told", generation)
            if sum(number for number, _ in answers) == self._alive:
                return float(max(at for _, at in answers))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{answers} workers have heard of generation {generation}, of {self._alive}")
            await asyncio.sleep(0.02)

    async def _measure(self, pid: int) -> None:
        figures, options = self.figures, self._options
        before, cpu = time.monotonic(), cpu_seconds(pid)
        await self._ask("join")
        await self._idle(pid)
        figures["join_s"] = time.monotonic() - before
        figures["join_cpu_s"] = cpu_seconds(pid) - cpu
        await self._ask("counts")
        cpu = cpu_seconds(pid)
        last = max(await self._ask("ready"))
        figures["generation_s"] = await self._heard(1) - last
        counts = await self._counts()
        figures["notice_mb"] = counts["Notice"][1] / 1e6
        figures["generation_mb"] = counts["all"][1] / 1e6
        figures["generation_cpu_s"] = await self._settled(pid, cpu)
        cpu = cpu_seconds(pid)
        times = await self._ask("connect", options.pairwise)
        figures["store_s"] = max(end for _, end in times) - min(begin for begin, _ in times)
        await self._idle(pid)
        figures["store_cpu_s"] = cpu_seconds(pid) - cpu
        figures["heartbeat_cpu"] = await self._share(pid, 0.0)
        await self._ask("counts")
        figures["head_cpu"] = await self._share(pid, options.steps_per_s)
        counts = await self._counts()
        versions = counts.get("HeadSnapshot", (0, 0))
        figures["versions"] = versions[0] / 2  # two of the three heirs are simulated
        figures["events_mb_s"] = counts.get("Happened", (0, 0))[1] / 1e6 / options.seconds
        await self._lose(pid, "loss", "kill_worker", options.agents // 2, lost=1)
        await self._lose(pid, "machine_loss", "kill_agent", options.agents - 1, lost=options.workers // options.agents)
        versions = (await self._counts())["HeadSnapshot"]
        figures["version_kb"] = versions[1] / versions[0] / 1e3
        figures["head_mb"] = peak_mb(pid)

    async def _take_over(self, head: HeadProcess) -> None:
        """Kill the head in a steady training, and wait until all workers are welcome at the next one."""
        await self._ask("train", self._options.steps_per_s, "w0")
        await asyncio.sleep(SETTLE_S)
        assert head.child is not None
        killed = time.monotonic()
        os.kill(head.child.pid, signal.SIGKILL)
        self.figures["head_loss_s"] = max(await self._ask("welcome", 2)) - killed
        self.figures["head_loss_cpu_s"] = cpu_seconds(head.child.pid)
        await self._ask("calm")

    async def _lose(self, pid: int, name: str, method: str, *arguments: Any, lost: int) -> None:
        """Lose workers in a steady training."""
        await self._ask("train", self._options.steps_per_s, "w0")
        await asyncio.sleep(SETTLE_S)
        cpu = cpu_seconds(pid)
        self._alive -= lost
        at = max(await self._ask(method, *arguments))
        generation = await self._next(self._alive)
        self.figures[f"{name}_s"] = generation - at
        await self._ask("calm")
        self.figures[f"{name}_cpu_s"] = await self._settled(pid, cpu)

    async def _next(self, num_members: int) -> float:
        """Wait for the generation without the lost ones, and return when the last survivor has heard of it.

        The head may announce more than one; the last is the one after which nobody hears of another.
        """
        at = await self._heard(self._generation + 1)
        while True:
            await asyncio.sleep(0.5)
            later = max(at for _, at in await self._ask("told", self._generation + 1))
            if later == at:
                return at
            at = later

    async def _settled(self, pid: int, cpu: float) -> float:
        """Let all members hold the newest generation; return the head's time since ``cpu`` until it is idle."""
        await self._ask("hold")
        await self._idle(pid)
        self._generation = max(await self._ask("newest"))
        return cpu_seconds(pid) - cpu

    async def _idle(self, pid: int) -> None:
        """Wait until the head has nothing left to do."""
        while True:
            before = cpu_seconds(pid)
            await asyncio.sleep(1.0)
            if cpu_seconds(pid) - before < 0.05:
                return

    async def _share(self, pid: int, steps_per_s: float) -> float:
        """Return the share of a core that the head uses in a steady training."""
        await self._ask("train", steps_per_s, "w0")
        await asyncio.sleep(SETTLE_S)
        began, cpu = time.monotonic(), cpu_seconds(pid)
        await asyncio.sleep(self._options.seconds)
        share = (cpu_seconds(pid) - cpu) / (time.monotonic() - began)
        await self._ask("calm")
        return share

    async def _counts(self) -> dict[str, tuple[int, int]]:
        """Return the messages that all populations have received since the last call, and their bytes."""
        numbers: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for counts in await self._ask("counts"):
            for kind, (number, size) in counts.items():
                numbers[kind] += number
                sizes[kind] += size
        return {kind: (number, sizes[kind]) for kind, number in numbers.items()}


PROFILED: Final = (
    "import cProfile, sys; from unisono.cluster.head.__main__ import main; "
    "cProfile.runctx('main()', globals(), {}, sys.argv.pop())"
)


def profiled(spawn: Any, path: str, name: str, command: list[str], *arguments: Any, **options: Any) -> Any:
    """Start the head under `cProfile`."""
    where = command.index("-m")
    return spawn(name, [*command[:where], "-c", PROFILED, *command[where + 2 :], path], *arguments, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--agents", type=int, default=125)
    parser.add_argument("--processes", type=int, default=3, help="that simulate agents and workers")
    parser.add_argument("--heartbeat-s", type=float, default=0.5)
    parser.add_argument("--alone", action="store_true", help="workers send their heartbeats themselves")
    parser.add_argument("--pairwise", action="store_true", help="ask the store for one member after the other")
    parser.add_argument("--steps-per-s", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each steady training")
    parser.add_argument("--profile", default="", metavar="FILE", help="profile the head into this file (pstats)")
    parser.add_argument("--json", default="", metavar="FILE")
    options = parser.parse_args()
    if options.workers % options.agents:
        parser.error("every agent has the same number of workers: --workers must be a multiple of --agents")
    bench = Bench(options)
    asyncio.run(bench.run())
    print_table(("figure", "value"), [(name, f"{value:.3f}") for name, value in bench.figures.items()])
    if options.json:
        write_json(options.json, bench.figures, [vars(options)])


if __name__ == "__main__":
    main()
