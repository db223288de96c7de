"""Simulated agents and workers: real connections to a head with real messages, and no processes that compute.

Several processes of `Population` together make as many connections as a large run would. A population does what its
owner asks for through a pipe (`Population.METHODS`), one request after the other, and answers each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.cluster.worker.link import Link, host_and_port
from unisono.core.events import Seconds, StepFinished, WorkerTimes
from unisono.core.messages import (
    AgentHello,
    Beat,
    BeatOf,
    Beats,
    Ended,
    Happened,
    HeadSnapshot,
    Hello,
    Holding,
    Kept,
    MemberInfo,
    Message,
    Ready,
    Start,
    StepDone,
    StoreCall,
    UserSentence,
    Welcome,
    WorkerExit,
    decode,
    encode,
)

__all__ = ["Population", "Process", "Site", "main"]

TICK_S: Final = 0.01
RETRY_S: Final = 0.1
ROOT: Final = Path(__file__).resolve().parents[1]
FINGERPRINT: Final = {
    "torch": "2.13.0+cpu",
    "python": "3.11",
    "machine": "x86_64",
    "processor": "AMD EPYC 9555 64-Core Processor",
    "instructions": "AVX512",
    "threads": "1",
    "device": "cpu",
}


class _Head(msgspec.Struct):
    """The first fields of any message: a simulated worker need not read a list of members."""

    type: str
    generation: int = 0
    term: int = 0


_heads: Final = msgspec.msgpack.Decoder(_Head)


@dataclass(frozen=True)
class Site:
    """Where a population connects to, and how many of the run's agents are its own."""

    url: str
    token: str
    agents: range
    workers_per_agent: int
    num_agents: int
    """Of all populations together."""
    heartbeat_s: float
    alone: bool = False
    """Each worker sends its heartbeats itself, as one whose agent does not report."""


class _Link(Link):
    """A connection that counts the bytes that arrive, compressed as they are."""

    num_bytes = 0

    def feed(self, data: bytes) -> None:
        _Link.num_bytes += len(data)
        super().feed(data)


class _Line:
    """One connection of an agent or a worker."""

    def __init__(self, site: Site, take: Callable[[bytes], None], greet: Callable[[], list[Message]]) -> None:
        self._site = site
        self._take = take
        self._greet = greet
        self._redialling: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._link = _Link.dial(site.url, site.token, 60.0)
        self.is_open = True
        self._begin()

    def _begin(self) -> None:
        self._loop.add_reader(self._link.sock, self._pump)
        for message in self._greet():
            self.send(message)

    def send(self, message: Message) -> None:
        if self.is_open:
            with contextlib.suppress(ConnectionError):  # `_pump` reads why
                self._link.put(encode(message))
                self._write()

    def close(self) -> None:
        """End the connection as the end of the process would."""
        if self.is_open:
            self.is_open = False
            self._hang_up()

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._link.sock)
        self._loop.remove_writer(self._link.sock)
        self._link.sock.close()

    async def _redial(self) -> None:
        """Connect again, to the head that follows."""
        while self.is_open:
            sock = socket.socket()
            try:
                sock.setblocking(False)
                await self._loop.sock_connect(sock, host_and_port(self._site.url))
                self._link = _Link(sock, self._site.url, self._site.token)
                while not self._link.is_open:
                    self._link.feed(await self._loop.sock_recv(sock, 65536))
            except OSError:
                sock.close()
                await asyncio.sleep(RETRY_S)
            else:
                self._begin()
                return

    def _write(self) -> None:
        self._link.push()
        if self._link.wants_to_write:
            self._loop.add_writer(self._link.sock, self._write)
        else:
            self._loop.remove_writer(self._link.sock)

    def _pump(self) -> None:
        try:
            for data in self._link.take():
                self._take(data)
        except OSError:
            self._hang_up()
            self._redialling = asyncio.create_task(self._redial())


class _Worker:
    def __init__(self, population: Population, agent: _Agent, number: int, worker_id: str) -> None:
        self.worker_id = worker_id
        self.agent = agent
        self.generation = 0
        self.heard_at = 0.0
        self.is_welcome = False
        self.welcome_at = 0.0
        self.due = 0.0
        self._calls: deque[StoreCall] = deque()
        self.connected_at = 0.0
        self._population = population
        self.term = 0
        self._info = MemberInfo(
            worker_id=worker_id,
            host=agent.host,
            pid=100_000 + number,
            device="cpu",
            page=f"/proc/{100_000 + number}/fd/7",
            address=f"10.0.{agent.index // 250}.{agent.index % 250 + 1}",
        )
        self.line = _Line(population.site, self._receive, self._greeting)

    def _greeting(self) -> list[Message]:
        hello = Hello(
            info=self._info,
            fingerprint=FINGERPRINT,
            script="0f1e2d3c",
            generation=self.generation,
            term=self.term,
        )
        return [hello, Ready(phase=0), Holding(generation=self.generation)] if self.generation else [hello]

    def _receive(self, data: bytes) -> None:
        now = time.monotonic()
        message = _heads.decode(data)
        self._population.count(message.type, data)
        if message.type == "Welcome":
            self.is_welcome, self.term, self.welcome_at = True, message.term, now
        elif message.type == "Notice" and message.generation > self.generation:
            self.generation, self.heard_at = message.generation, now
        elif message.type == "StoreAnswer":
            self._call_next()

    def connect(self, pairwise: bool) -> None:
        """Find the members of this worker's lane: those with the same place on all machines, as `two_level` does.

        Args:
            pairwise: ask for one member after the other, as gloo does by itself.
        """
        site = self._population.site
        size, lane = site.num_agents, int(self.worker_id[1:]) % site.workers_per_agent
        rank, prefix = self.agent.index, f"generation-{self.generation}/lane-{lane}/"
        here = [f"{prefix}here-{each}" for each in range(size)]
        keys = [f"{prefix}0/{each}" for each in range(size)]
        address = os.urandom(24).ljust(180, b"\0") + os.urandom(2).ljust(8, b"\0") * size  # about as gloo's
        calls: list[tuple[str, list[str], list[bytes]]] = [
            ("set", [here[rank]], [b""]),
            ("wait", here, []),
            ("set", [keys[rank]], [address]),
        ]
        if pairwise:
            calls += [(operation, [key], []) for key in keys for operation in ("wait", "get")]
        else:
            calls.append(("get", keys, []))
        self.connected_at = 0.0
        self._calls = deque(
            StoreCall(call=number, operation=operation, keys=asked, values=values, generation=self.generation)
            for number, (operation, asked, values) in enumerate(calls)
        )
        self._call_next()

    def _call_next(self) -> None:
        if self._calls:
            self.line.send(self._calls.popleft())
        else:
            self.connected_at = time.monotonic()

    def beat(self, step: int, progress: int) -> Beat:
        return Beat(
            generation=self.generation,
            phase=0,
            step=step,
            microbatch=progress % 8,
            progress=progress,
            waiting=bool(progress % 3),
            num_steps=max(step, 0),
            seconds_at=0.05,
        )


class _Agent:
    def __init__(self, population: Population, index: int) -> None:
        self.index = index
        self.host = f"node{index:03d}-{index * 37 % 65536:04x}"
        self.workers: dict[str, _Worker] = {}
        self.due = 0.0
        self._population = population
        self.agent_id, self.term = "", 0
        self.line = _Line(population.site, self._receive, self._greeting)

    def _greeting(self) -> list[Message]:
        return [
            AgentHello(
                host=self.host,
                pid=50_000 + self.index,
                num_workers=self._population.site.workers_per_agent,
                launched=self.host,
                agent_id=self.agent_id,
                term=self.term,
            )
        ]

    def _receive(self, data: bytes) -> None:
        message = decode(data)
        self._population.count(type(message).__name__, data)
        if isinstance(message, HeadSnapshot):
            self.line.send(Kept(term=message.term, number=message.number))
        elif isinstance(message, Start):
            for worker_id in message.worker_ids:
                self._population.start(self, worker_id)
        elif isinstance(message, Welcome):
            self.agent_id, self.term = message.agent_id, message.term
        elif isinstance(message, Ended):
            print(f"{self.host} is told of the end: {message.reason}", flush=True)
        elif isinstance(message, UserSentence) and "not a message" in message.text:
            print(f"{self.host} is refused: {message.text}", flush=True)

    def beat(self, step: int, progress: int) -> Beats:
        """Return the heartbeats of all workers."""
        living = [worker for worker in self.workers.values() if worker.line.is_open]
        return Beats(beats=[BeatOf(w.worker_id, 0.1, w.beat(step, progress)) for w in living])

    def close(self) -> None:
        for worker in self.workers.values():
            worker.line.close()
        self.line.close()


class Population:
    """The agents of a `Site`, with their workers."""

    METHODS: Final = (
        "join",
        "ready",
        "hold",
        "connect",
        "train",
        "calm",
        "kill_worker",
        "welcome",
        "kill_agent",
        "told",
        "hear",
        "newest",
        "counts",
    )

    def __init__(self, site: Site) -> None:
        self.site = site
        self._agents: dict[int, _Agent] = {}
        self._workers: dict[str, _Worker] = {}
        self._training: asyncio.Task[None] | None = None
        self._num: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._step = 0

    def count(self, kind: str, data: bytes) -> None:
        """Note a message that has arrived."""
        self._num[kind] += 1
        self._bytes[kind] += len(data)

    def start(self, agent: _Agent, worker_id: str) -> None:
        """Do what an agent's order says: start a worker."""
        worker = _Worker(self, agent, int(worker_id[1:]), worker_id)
        agent.workers[worker_id] = self._workers[worker_id] = worker

    # -- what the owner asks for ---------------------------------------------------------------------

    async def join(self) -> int:
        """Connect all agents, and with the head's orders all workers; returns how many workers are welcome."""
        for index in self.site.agents:
            self._agents[index] = _Agent(self, index)
            await asyncio.sleep(0)
        wanted = len(self.site.agents) * self.site.workers_per_agent
        while len(self._workers) < wanted or not all(worker.is_welcome for worker in self._workers.values()):
            await asyncio.sleep(TICK_S)
        return len(self._workers)

    async def ready(self) -> float:
        """Let all workers come to their training loops; returns when the last one did."""
        for worker in self._living():
            worker.line.send(Ready(phase=0))
        return time.monotonic()

    async def hold(self) -> None:
        """Let all members take the newest generation."""
        for worker in self._living():
            worker.line.send(Holding(generation=worker.generation))

    async def train(self, steps_per_s: float, main: str) -> None:
        """Send what a training sends, until `calm`: heartbeats, and from worker ``main`` the steps."""
        self._training = asyncio.create_task(self._train(steps_per_s, main))

    async def calm(self) -> None:
        if self._training is not None:
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)
            self._training = None

    async def connect(self, pairwise: bool) -> tuple[float, float]:
        """Let all workers find each other through the head's store; returns when that began and ended."""
        living, began = self._living(), time.monotonic()
        for worker in living:
            worker.connect(pairwise)
        while not all(worker.connected_at for worker in living):
            await asyncio.sleep(TICK_S)
        return began, max(worker.connected_at for worker in living)

    async def welcome(self, term: int) -> float:
        """Wait until the head of this term has welcomed all workers; returns when it welcomed the last one."""
        living = self._living()
        while any(worker.term < term for worker in living):
            await asyncio.sleep(TICK_S)
        return max((worker.welcome_at for worker in living), default=0.0)

    async def kill_worker(self, index: int) -> float:
        """End a worker of an agent, as the agent sees it; returns the time (0.0: of another population).

        The head names workers in the order in which agents happen to connect, so a name does not say whose a worker is.
        """
        agent = self._agents.get(index)
        if agent is None:
            return 0.0
        worker_id = next(name for name in agent.workers if name in self._workers)
        worker = self._workers.pop(worker_id)
        now = time.monotonic()
        worker.agent.line.send(WorkerExit(worker_id=worker_id, exit_code=-9))
        worker.line.close()
        return now

    async def kill_agent(self, index: int) -> float:
        """End an agent with its workers, as the end of a machine; returns the time (0.0: of another population)."""
        agent = self._agents.pop(index, None)
        if agent is None:
            return 0.0
        now = time.monotonic()
        agent.close()
        for worker_id in agent.workers:
            self._workers.pop(worker_id, None)
        return now

    async def told(self, generation: int) -> tuple[int, float]:
        """Return how many living workers have heard of this generation, or a later one, and when the last one did."""
        times = [worker.heard_at for worker in self._living() if worker.generation >= generation]
        return len(times), max(times, default=0.0)

    async def newest(self) -> int:
        """Return the newest generation that a worker has heard of."""
        return max((worker.generation for worker in self._living()), default=0)

    async def hear(self, generation: int, num_workers: int) -> int:
        """Wait until so many workers have heard of this generation or a later one; return the newest of all."""
        while (await self.told(generation))[0] < num_workers:
            await asyncio.sleep(TICK_S)
        return await self.newest()

    async def counts(self) -> dict[str, tuple[int, int]]:
        """Return by kind the messages that have arrived since the last call, and their bytes.

        "all": all messages, and the bytes on the network; before, those of messages that are uncompressed.
        """
        found = {kind: (number, self._bytes[kind]) for kind, number in self._num.items()}
        found["all"] = (self._num.total(), _Link.num_bytes)
        _Link.num_bytes = 0
        self._num.clear()
        self._bytes.clear()
        return found

    # ------------------------------------------------------------------------------------------------

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.line.is_open]

    async def _train(self, steps_per_s: float, main: str) -> None:
        period = self.site.heartbeat_s
        began = time.monotonic()
        talkers: Sequence[_Agent | _Worker] = self._living() if self.site.alone else list(self._agents.values())
        for number, talker in enumerate(talkers):
            talker.due = began + period * number / len(talkers)
        due_step = began
        while True:
            now = time.monotonic()
            for talker in talkers:
                if now >= talker.due:
                    talker.due += period
                    talker.line.send(talker.beat(self._step, int(now * 20)))
            while steps_per_s > 0 and now >= due_step:
                due_step += 1 / steps_per_s
                self._step += 1
                if main in self._workers:
                    self._finish_step(self._workers[main], self._step)
            await asyncio.sleep(TICK_S)

    def _finish_step(self, worker: _Worker, step: int) -> None:
        """Report a step as the main worker of a run does."""
        worker.line.send(StepDone(step=step, seconds=0.5))
        times = WorkerTimes(leaves=1, data=0.0012, compute=0.4321, last=Seconds(0.0012, 0.4321, 0.0456, 0.0123, 0.0021))
        num = self.site.num_agents * self.site.workers_per_agent
        event = StepFinished(
            step=step,
            epoch=0,
            loss=2.345678,
            weight=1024.0,
            samples=1024,
            number=step,
            digest="0123456789abcdef",
            num_steps=100_000,
            generation=worker.generation,
            seconds=times.last,
            workers={f"w{number}": times for number in range(num)},
            logs={"accuracy": 0.5},
        )
        worker.line.send(Happened(events=[event]))


def main() -> None:
    """Be the process of a population, until its owner closes the pipe (whose number is the argument)."""
    pipe = Connection(int(sys.argv[1]))
    asyncio.run(_work(pipe.recv(), pipe))


async def _work(site: Site, pipe: Connection) -> None:
    population = Population(site)
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[Any] = asyncio.Queue()

    def read() -> None:
        try:
            asked.put_nowait(pipe.recv())
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            asked.put_nowait(None)

    loop.add_reader(pipe.fileno(), read)
    while (request := await asked.get()) is not None:
        method, arguments = request
        assert method in Population.METHODS
        pipe.send(await getattr(population, method)(*arguments))


class Process:
    """A population in a process of its own, and the pipe to it."""

    def __init__(self, site: Site) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", "from benchmarks.population import main; main()", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),))
        self._pipe = Connection(ours.detach())
        self._pipe.send(site)

    def ask(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def answer(self, timeout_s: float = 120.0) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a population has not answered for {timeout_s:.0f} s")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
