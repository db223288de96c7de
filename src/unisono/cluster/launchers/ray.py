"""Ray: agents as actors. Ray finds the nodes, and hands out their CPUs and GPUs.

Each actor starts an agent as a process of its node, and holds the agent's standard input::

    command (head, driver)  --ray-->  actor on node a  --pipe-->  agent  -->  its workers
                            --ray-->  actor on node b  --pipe-->  agent  -->  its workers

However an actor ends (its node is lost, the command is killed, somebody kills its process), the pipe ends with it, and
so the agent and its workers. Actors that Ray has no room for yet are its demand: the autoscaler sees them.

Ray is imported where it is used: only those who use it need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from unisono.cluster.launchers.protocol import AgentCommand, Handle, Launcher, Machine, Request
from unisono.cluster.launchers.rayactor import Holder
from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.system.capacity import Workers
from unisono.system.extras import install_words

__all__ = ["Ray"]

PASSED_ON: Final = ("PYTHONPATH", "PYTHONHASHSEED")
SAY_S: Final = 5.0  # until the user is told what the command waits for
SETTLE_S: Final = 10.0  # for actors on nodes that have room now, once there are enough to begin
LOOK_S: Final = 0.2
REACH_S: Final = 10.0
CLOSE_S: Final = 3.0


@dataclass
class _Place:
    """An actor, with an agent or waiting for a node."""

    machine: Machine
    actor: Any
    up: Any
    """Reference to what the actor says when it is up."""
    is_sure: bool
    """A node had room for it."""
    agent: _Agent | None = None
    is_announced: bool = False


class Ray(Launcher):
    """Starts agents as actors of a Ray cluster.

    The address of the cluster is HOST:PORT; "auto": the one that this machine, or the environment, knows.

    Raises:
        UsageError: Ray is not installed.
    """

    is_elastic = True

    def __init__(self, request: Request) -> None:
        try:
            self._ray = importlib.import_module("ray")
        except ImportError as error:
            raise UsageError(f"Ray is not installed ({error}); {install_words('ray')}") from error
        self._workers: Workers = request.workers
        self._takes_all = request.settings.takes_all
        self._threads = request.spec.threads
        self._environment = {name: request.environment[name] for name in PASSED_ON if name in request.environment}
        self._address = request.settings.ray_address
        self._gpus = request.settings.ray_gpus_per_worker
        self._sends_folder = request.settings.ray_send_folder
        self._actors = self._ray.remote(Holder)
        self._places: dict[str, _Place] = {}
        self._number = 0
        self._lock = threading.Lock()
        """Of the places: `ensure` runs in a thread."""
        self._is_closed = False

    # -- a launcher ----------------------------------------------------------------------------------

    def machines(self) -> Sequence[Machine]:
        """Connect to the cluster, and wait until there is room for the workers that begin the run.

        May be called again after `close`: for a run that goes back to an earlier checkpoint.
        """
        self._places, self._is_closed = {}, False
        self._connect()
        try:
            wanted, needed = self._workers.maximum, self._workers.start
            if self._takes_all:
                wanted = needed = max(1, sum(room for _, room in _rooms(self._ray, self._needs())))
            self._request(max(1, wanted))
            return self._wait_for(needed)
        except BaseException:
            self.close()
            raise

    def bind(self) -> str:
        """Return the address of this machine in the cluster."""
        own = self._ray.get_runtime_context().get_node_id()
        return next(str(node["NodeManagerAddress"]) for node in self._ray.nodes() if node["NodeID"] == own)

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        place = self._places[machine.name]
        place.agent = _Agent(self._ray, place.actor, command, self._environment, self._sends_folder)
        return place.agent

    def ensure(self, num_workers: int, lost: Sequence[Machine]) -> Sequence[Machine]:
        """Ask for actors, or take requests back; return machines of actors that have come up meanwhile.

        Of a lost machine nothing is left but the number of workers that are missing.
        """
        with self._lock:
            if self._is_closed:
                return []
            self._drop_ended()
            running = sum(place.machine.num_workers for place in self._places.values() if place.agent is not None)
            waiting = [place for place in self._places.values() if place.agent is None]
            missing = max(0, num_workers - running)
            while waiting and sum(place.machine.num_workers for place in waiting) > missing:
                self._withdraw(waiting.pop())
            self._request(missing - sum(place.machine.num_workers for place in waiting))
            return self._new_ones()

    def close(self) -> None:
        self._is_closed = True
        is_locked = self._lock.acquire(timeout=CLOSE_S)  # `ensure` may wait for a cluster that does not answer
        try:
            for place in list(self._places.values()):
                with contextlib.suppress(Exception):  # the cluster may be gone
                    self._ray.kill(place.actor)
            self._ray.shutdown()
        finally:
            if is_locked:
                self._lock.release()

    # -- the cluster ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._address.startswith("ray://"):
            raise UsageError(
                "the head of the run has to be on a machine of the cluster: give --set ray.address=HOST:PORT there, or "
                "submit the command with `ray job submit`"
            )
        settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self._sends_folder:
            settings["runtime_env"] = {"working_dir": os.getcwd()}
        try:
            _check_reachable(self._address)
            self._ray.init(address=self._address, **settings)
        except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
            first = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"no Ray cluster answers at ray.address={self._address}: {first}; start one with `ray start --head`, "
                "name the machine of its head (--set ray.address=HOST:PORT), or give its token: RAY_AUTH_TOKEN with "
                "RAY_AUTH_MODE=token, or the file ~/.ray/auth_token (`ray get-auth-token` there shows it)"
            ) from error
        if self._gpus is None:
            self._gpus = 1.0 if self._ray.cluster_resources().get("GPU") else 0.0

    def _needs(self) -> dict[str, float]:
        """Return what Ray is to reserve for one worker."""
        return {"CPU": float(self._threads), **({"GPU": self._gpus} if self._gpus else {})}

    def _request(self, num_workers: int) -> None:
        """Ask for so many workers: one actor on each node that has room, then actors of one worker."""
        for node, room in _rooms(self._ray, self._needs()):
            if num_workers <= 0:
                return
            number = min(room, num_workers)
            self._place(number, node)
            num_workers -= number
        for _ in range(num_workers):
            self._place(1, "")

    def _place(self, num_workers: int, node: str) -> None:
        name, self._number = f"ray{self._number}", self._number + 1
        needs = self._needs()
        options: dict[str, Any] = {
            "num_cpus": needs["CPU"] * num_workers,
            "num_gpus": needs.get("GPU", 0.0) * num_workers,
            "max_restarts": 0,
            "max_concurrency": 8,
        }
        if node:
            affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(node_id=node, soft=True)
        actor = self._actors.options(**options).remote()
        machine = Machine(name=name, num_workers=num_workers)
        self._places[name] = _Place(machine, actor, actor.up.remote(), is_sure=bool(node))

    def _withdraw(self, place: _Place) -> None:
        self._ray.kill(place.actor)
        del self._places[place.machine.name]

    def _drop_ended(self) -> None:
        self._places = {
            name: place for name, place in self._places.items() if place.agent is None or place.agent.exit_code is None
        }

    def _new_ones(self) -> list[Machine]:
        """Return the machines of actors that are up, each once."""
        found = []
        for place in list(self._places.values()):
            if place.is_announced or not self._ray.wait([place.up], timeout=0)[0]:
                continue
            try:
                where = self._ray.get(place.up)
            except self._ray.exceptions.RayError as error:
                print(f"unisono: Ray could not start {place.machine.name}: {error}", file=sys.stderr, flush=True)
                del self._places[place.machine.name]
                continue
            place.is_announced = True
            words = count(place.machine.num_workers, "worker")
            print(f"unisono: {place.machine.name} is on {where}, with {words}", file=sys.stderr, flush=True)
            found.append(place.machine)
        return found

    def _wait_for(self, needed: int) -> list[Machine]:
        """Wait for actors with so many workers, and a while for those for which nodes have room."""
        began, found, is_said = time.monotonic(), self._new_ones(), False
        while True:
            workers, waited_s = sum(machine.num_workers for machine in found), time.monotonic() - began
            if not self._places:
                raise UsageError("Ray could not start an actor for an agent; see the lines above")
            coming = any(place.is_sure and not place.is_announced for place in self._places.values())
            if workers >= needed and (not coming or waited_s > SETTLE_S):
                return found
            if waited_s > SAY_S and not is_said:
                is_said = True
                print(
                    f"unisono: waiting for Ray: it has room for {workers} of {count(needed, 'worker')} with "
                    f"{self._needs()} each",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(LOOK_S)
            found += self._new_ones()


def _check_reachable(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray itself would try again for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()


def _rooms(ray: Any, needs: Mapping[str, float]) -> list[tuple[str, int]]:
    """Return the nodes that have room for workers now, and for how many each."""
    # Ray, up to 2.60, has no public call for what is free on a node (its own ray.util.tpu uses this one). In a version
    # without it, what a node has in all counts: then a worker may have to wait until there is room for it.
    state = getattr(getattr(ray, "_private", None), "state", None)
    ask = getattr(state, "available_resources_per_node", None)
    free = ask() if ask is not None else {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has = free.get(node["NodeID"], {})
            room = min(int(has.get(name, 0.0) // amount) for name, amount in needs.items())
            if room:
                found.append((node["NodeID"], room))
    return found


class _Agent(Handle):
    """An agent that an actor holds.

    Args:
        is_sent: the run's folder is the one in which the actor works.
    """

    def __init__(
        self, ray: Any, actor: Any, command: AgentCommand, environment: Mapping[str, str], is_sent: bool
    ) -> None:
        self._ray = ray
        self._actor = actor
        self._pid = actor.start.remote(list(command.words), command.secret, dict(environment), is_sent)
        self._code: int | None = None
        self._on_end: Callable[[int], None]
        self._reading: asyncio.Task[None]

    @property
    def exit_code(self) -> int | None:
        return self._code

    def follow(self, on_line: Callable[[str], None], on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._reading = asyncio.get_running_loop().create_task(self._read(on_line))

    async def _read(self, on_line: Callable[[str], None]) -> None:
        code = -signal.SIGKILL
        try:
            await self._pid
            while lines := await self._actor.read.remote():
                for line in lines:
                    on_line(line.rstrip("\n"))
            code = await self._actor.wait.remote()
        except self._ray.exceptions.RayActorError:
            on_line("the agent's actor is gone: its node was lost, or its process was killed")
        except self._ray.exceptions.RayTaskError as error:
            code = 1
            on_line(f"the agent could not be started: {str(error).strip().splitlines()[-1]}")
        finally:
            self._end(code)

    def terminate(self) -> None:
        self._actor.terminate.remote()

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.kill(self._actor)
        self._reading.cancel()
        self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._on_end(code)
