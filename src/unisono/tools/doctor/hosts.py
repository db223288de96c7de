"""The doctor's program on every machine, here and by ssh, and what they find together.

Machines are reached, and asked first what is there, in the way of ``unisono run --hosts``
(`unisono.cluster.launchers.way`).
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Final

import msgspec

from unisono.cluster.launchers.way import Unfit, Way, for_all
from unisono.tools.doctor.__main__ import MARK
from unisono.tools.doctor.facts import MachineFacts, Scope
from unisono.tools.doctor.orders import ProbeReply, ProbeRequest
from unisono.tools.doctor.together import Known, Path

__all__ = ["HERE", "ProbedHost", "examine", "hosts"]

HERE: Final = "here"
PROGRAM: Final = "unisono.tools.doctor"
ANSWER_S: Final = 40.0
NUM_CLOCKS: Final = 3


class ProbedHost:
    """One machine, with the doctor's program on it.

    Args:
        command: starts the program; its standard input and output reach it.
        error: why it is not to be started.
    """

    def __init__(self, name: str, command: Sequence[str], error: str = "") -> None:
        self.name = name
        self.error = error
        """Why the machine does not answer; "" as long as it does."""
        self._process: subprocess.Popen[str] | None = None
        if error:
            return
        self._said: list[str] = []
        self._answers: queue.Queue[ProbeReply | None] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                [*command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as failed:
            self.error = f"{command[0]} cannot be started: {failed.strerror}"
            return
        threading.Thread(target=self._read, args=(self._process,), name=f"unisono-{name}", daemon=True).start()

    def ask(self, order: ProbeRequest) -> ProbeReply:
        """Return the answer to an order; one with an error where the machine does not answer."""
        self.send(order)
        return self.answer()

    def send(self, order: ProbeRequest) -> None:
        process = self._process
        if self.error or process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # `answer` says why, when all that it has said is read
            process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            process.stdin.flush()

    def answer(self) -> ProbeReply:
        """Return the answer to the oldest order that was sent and not answered yet."""
        if self.error:
            return ProbeReply(error=self.error)
        try:
            found = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            self.error = f"no answer within {ANSWER_S:.0f} s"
            return ProbeReply(error=self.error)
        if found is None:
            self._is_gone()
            return ProbeReply(error=self.error)
        return found

    def close(self) -> None:
        if self._process is None:
            return
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # the program ends
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_gone(self) -> None:
        words = " ".join(self._said[-3:]) or "nothing was printed"
        self.error = f"the program there has ended: {words}"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                self._answers.put(msgspec.json.decode(line.removeprefix(MARK), type=ProbeReply))
            elif line.strip():
                self._said.append(line.strip())
        self._answers.put(None)


@contextlib.contextmanager
def hosts(names: Mapping[str, bool], way: Way) -> Iterator[list[ProbedHost]]:
    """Start the program here, or on all of these machines, and end it.

    Args:
        names: of machines, each with whether it is this one, which needs no ssh.
    """
    found = for_all([name for name, is_here in names.items() if not is_here], way.ask)
    started: list[ProbedHost] = []
    try:
        for name, is_here in (names or {HERE: True}).items():
            command = (sys.executable, "-P", "-m", PROGRAM) if is_here else way.to(name, PROGRAM)
            answer = found.get(name)
            started.append(ProbedHost(name, command, str(answer) if isinstance(answer, Unfit) else ""))
        yield started
    finally:
        for host in started:
            host.close()


def examine(found: Sequence[ProbedHost], asked: Scope) -> Known:
    """Return what all machines say of themselves, and of each other. Those that do not answer have an ``error``."""
    for host in found:
        host.send(ProbeRequest(what="facts", asked=asked))
    facts: dict[str, MachineFacts] = {}
    for host in found:
        answer = host.answer()
        if answer.facts is not None:
            facts[host.name] = answer.facts
    able = [host for host in found if host.name in facts]
    if len(able) < 2:
        return Known(facts=facts)
    return Known(
        facts=facts,
        clocks={host.name: _clock(host) for host in able},
        sees_run_dir=_who_sees(able, facts[able[0].name].disk_folder),
        paths=[_path(source, target, facts, asked) for source, target in itertools.permutations(able, 2)],
    )


def _clock(host: ProbedHost) -> float:
    """Return by how much the clock of a machine is ahead of the one here; of several looks the quickest counts."""
    looks = []
    for _ in range(NUM_CLOCKS):
        begun = time.time()
        answer = host.ask(ProbeRequest(what="clock"))
        ended = time.time()
        looks.append((ended - begun, answer.time - (begun + ended) / 2))
    return min(looks)[1]


def _who_sees(able: Sequence[ProbedHost], folder: str) -> Mapping[str, bool]:
    """Return which machines see a file that the first one makes in a folder; nothing where it cannot."""
    file = str(PurePath(folder) / f".unisono-doctor-{secrets.token_hex(4)}")
    first, *others = able
    if first.ask(ProbeRequest(what="make", file=file)).error:
        return {}
    try:
        return {host.name: host.ask(ProbeRequest(what="see", file=file)).is_there for host in others}
    finally:
        first.ask(ProbeRequest(what="remove", file=file))


def _path(source: ProbedHost, target: ProbedHost, facts: Mapping[str, MachineFacts], asked: Scope) -> Path:
    served = target.ask(ProbeRequest(what="serve", asked=asked))
    if served.error:
        return Path(source=source.name, target=target.name, error=served.error)
    addresses = [each for each in facts[target.name].addresses if (":" in each) == asked.ipv6]
    answer = source.ask(ProbeRequest(what="measure", addresses=addresses, port=served.port, word=served.word))
    return Path(
        source=source.name,
        target=target.name,
        address=answer.address,
        latency_s=answer.latency_s,
        bandwidth=answer.bandwidth,
        error=answer.error,
    )
