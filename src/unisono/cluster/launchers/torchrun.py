"""``unisono run --plain``: torchrun on each machine of a launcher, and one owner that ends all of them.

Each torchrun is started as an agent is (`unisono.cluster.launchers.protocol`), that of this machine in the hands of a
holder (`unisono.cluster.machine.holder`). Where there are several, they meet at a store of this process. There is no
head, and no run directory: who is in the training, and what is started again, is torchrun's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from unisono.cluster.launchers.agent_processes import AgentProcess
from unisono.cluster.launchers.protocol import HERE, AgentCommand, Handle, Launcher, Machine
from unisono.cluster.machine import holder
from unisono.cluster.machine.torchrunner import Order
from unisono.core.errors import UsageError
from unisono.core.words import count, exit_words
from unisono.system.aside import Aside

__all__ = ["Torchruns", "exit_code", "fewest", "open_store"]

END_S: Final = holder.COMMAND_S + 2 * holder.TERMINATE_S
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OWN_STORES: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Where processes may start again, each start has a store of its own: in torchrun's, which outlives it, gloo finds the
addresses of the processes before, and waits for them."""
_COMMAND: Final = (sys.executable, "-P", "-m", "unisono.cluster.machine.torchrunner")


def exit_code(codes: Mapping[str, int], num_machines: int, least: int) -> int | None:
    """Return the exit code of a training; None while it may still end well.

    Args:
        codes: exit codes of the torchruns that have ended, by machine, in the order in which they have ended.
        least: the training goes on on so many machines; the loss of more is its end.
    """
    failed = [code for code in codes.values() if code]
    if len(failed) > num_machines - least:
        return failed[0] if failed[0] > 0 else 128 - failed[0]
    return 0 if len(codes) == num_machines else None


def fewest(numbers: Sequence[int], minimum: int) -> int:
    """Return how many machines always have ``minimum`` processes together, whichever they are.

    Args:
        numbers: of processes, by machine.

    Raises:
        UsageError: all together have fewer.
    """
    if sum(numbers) < minimum:
        raise UsageError(f"the machines have room for {sum(numbers)} of at least {count(minimum, 'process')}")
    return next(number for number in range(1, len(numbers) + 1) if sum(sorted(numbers)[:number]) >= minimum)


@contextlib.contextmanager
def open_store(host: str, port: int) -> Iterator[str]:
    """Open a store at which torchruns meet, as long as the context lasts; return its address HOST:PORT.

    Raises:
        UsageError: the address is not this machine's, or the port is taken.
    """
    from torch.distributed import TCPStore

    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise UsageError(
            f"the torchruns cannot meet at {host}, port {port or 'any'}: {first}; give another --bind or --set "
            "port=PORT"
        ) from error
    yield f"[{host}]:{store.port}" if ":" in host else f"{host}:{store.port}"
    del store


class Torchruns:
    """Starts torchrun on machines, shows the output, waits for the end, leaves nothing behind.

    Args:
        arguments: of the script: ``SCRIPT ...`` or ``-m MODULE ...``.
        folder: in which the script runs.
        environment: variables of the script beside those of a machine.
        max_restarts: how often torchrun starts all processes again.
        launcher: starts the torchruns of other machines; None: there are none.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        max_restarts: int,
        launcher: Launcher | None = None,
    ) -> None:
        self._arguments = tuple(arguments)
        self._folder = folder
        self._environment = dict(environment)
        self._max_restarts = max_restarts
        self._launcher = launcher
        self._handles: dict[str, Handle] = {}
        self._news: asyncio.Queue[tuple[str, int] | signal.Signals]
        """Ends of torchruns (machine, exit code), and signals to this process."""
        self._loop: asyncio.AbstractEventLoop
        self._shown: Aside[str]

    def run(
        self, machines: Sequence[Machine], *, nodes: tuple[int, int] = (1, 1), endpoint: str = "", name: str = ""
    ) -> int:
        """Start torchrun on each of these machines, and wait; return the exit code of the training. Main thread only.

        Args:
            nodes: with how many machines the training goes on, and how many it has at most, those of other commands
                included.
            endpoint: where several torchruns meet (`open_store`).
            name: of the training, equal for all torchruns that meet; default: a new one.

        Raises:
            UsageError: a torchrun cannot be started.
        """
        return asyncio.run(self._run(machines, nodes, endpoint, name or secrets.token_hex(8)))

    async def _run(self, machines: Sequence[Machine], nodes: tuple[int, int], endpoint: str, name: str) -> int:
        self._news = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._shown = Aside(self._print)
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        least = len(machines) - (nodes[1] - nodes[0])
        codes: dict[str, int] = {}
        try:
            for machine in machines:
                self._start(machine, self._order(machine.num_workers, nodes, endpoint, name))
            while (code := exit_code(codes, len(machines), least)) is None:
                news = await self._news.get()
                if isinstance(news, signal.Signals):
                    return 128 + news
                machine_name, codes[machine_name] = news
                if codes[machine_name] and len(machines) > 1:
                    _say(machine_name, codes[machine_name])
            return code
        finally:
            await self._close(set(self._handles) - set(codes))
            await asyncio.to_thread(self._shown.close)

    def _on_signal(self, number: signal.Signals) -> None:
        self._shown.hurry()
        self._news.put_nowait(number)

    def _order(self, num_processes: int, nodes: tuple[int, int], endpoint: str, name: str) -> Order:
        options = ["--nproc-per-node", str(num_processes), "--max-restarts", str(self._max_restarts)]
        if endpoint:
            options += ["--nnodes", f"{nodes[0]}:{nodes[1]}", "--rdzv-id", name]
        environment = dict(self._environment)
        if self._max_restarts or nodes[0] < nodes[1]:
            environment.setdefault(OWN_STORES, os.environ.get(OWN_STORES, "1"))
        return Order(
            arguments=self._arguments,
            options=tuple(options),
            folder=self._folder,
            environment=environment,
            endpoint=endpoint,
        )

    def _start(self, machine: Machine, order: Order) -> None:
        if machine.name == HERE:
            handle: Handle = _held_here(order)
        else:
            assert self._launcher is not None
            handle = self._launcher.start(machine, AgentCommand(words=_COMMAND, secret=order.encode()))
        self._handles[machine.name] = handle
        handle.follow(self._shown.put, lambda code: self._news.put_nowait((machine.name, code)))

    def _print(self, line: str) -> None:
        """Print a line of a script (in a thread)."""
        try:
            print(line, flush=True)
        except BrokenPipeError:  # nobody reads this process's output any more
            self._loop.call_soon_threadsafe(self._news.put_nowait, signal.SIGPIPE)
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
        except OSError:  # a full disk: this line is lost, those after it perhaps not
            pass

    async def _close(self, running: set[str]) -> None:
        """End the torchruns that still run; a second signal ends them at once."""
        for name in running:
            self._handles[name].terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while running:
                    news = await self._news.get()
                    if isinstance(news, signal.Signals):
                        break
                    running.discard(news[0])
        await asyncio.gather(*(handle.close() for handle in self._handles.values()))
        if self._launcher is not None:
            self._launcher.close()


def _held_here(order: Order) -> Handle:
    """Start torchrun on this machine. Its output is that of this process."""
    words = (sys.executable, "-P", "-m", "unisono.cluster.machine.holder")
    given = f"{holder.HolderOrder(_COMMAND, merges_output=False).encode()}\n{order.encode()}"
    return AgentProcess(AgentCommand(words=words, secret=given), shows_output=True)


def _say(name: str, code: int) -> None:
    where = name if name != HERE else "this machine"
    print(f"unisono: torchrun on {where} {exit_words(code)}", file=sys.stderr, flush=True)
