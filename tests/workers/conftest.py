"""Tests with real processes: each has a deadline, says what everybody was doing when it passes, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import PATIENT, WAIT_S
from unisono.script.worker import STACK_SIGNAL
from unisono.system import seats
from unisono.system.lifetime import PARENT
from unisono.system.seats import LEDGER

MARK = "UNISONO_TEST"
END_S = 60.0  # then what still lives after a test was left behind; a process that ends at once takes a moment, too


def marked(mark: str) -> dict[int, str]:
    """The processes that were started under this mark, children of children included: pid and command."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(folder.name)] = (
                        (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:150]
                    )
    return found


def wait_until_gone(pids: set[int], deadline: float) -> None:
    """Block until these processes have ended, at the latest until ``deadline``."""
    for pid in pids:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(descriptor)


_nurseries: list[int] = []  # standing ones


def forked() -> dict[int, str]:
    """The workers that the standing nursery has forked, which do not carry the mark: pid and command."""
    found = {}
    for pid in _nurseries:
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                found[int(child)] = "a worker of the standing nursery"
    return found


def own_descriptors() -> set[str]:
    """What this process has open that the library may have opened: sockets that listen, memory, its files."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if "unisono" in target:
                found.add(f"{entry.name} -> {target}")
    return found


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Fail a test that leaves processes, shared memory or temporary files behind."""
    value = uuid.uuid4().hex
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv(MARK, value)
    monkeypatch.setenv(LEDGER, value)  # a test has the machine for itself
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(STACK_SIGNAL, "SIGUSR1")  # for `Command.give_up`
    monkeypatch.setattr(tempfile, "tempdir", None)
    open_before = own_descriptors()
    threads_before = {thread for thread in threading.enumerate() if thread.name.startswith("unisono")}
    yield value
    seats.release()
    deadline = time.monotonic() + END_S
    while (left := marked(value) | forked()) and time.monotonic() < deadline:
        wait_until_gone(set(left), deadline)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left behind (and are ended now): {left}"
    # torch keeps a cache for its compiler there, for the next process as well.
    kept = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    assert kept == [], "temporary files are left"
    assert own_descriptors() - open_before == set(), "shared memory or files are still open"
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("unisono")} - threads_before
    for thread in threads:
        thread.join(END_S)
    assert not [thread.name for thread in threads if thread.is_alive()], "threads are left"


@contextlib.contextmanager
def run_nursery(path: str, *, before: Sequence[str] = (), also: Sequence[str] = ()) -> Iterator[None]:
    """A process that has imported torch, and modules that the tests name, and forks the workers of all runs that find
    it at ``path``.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", PARENT: str(os.getpid())}
    code = f"import {', '.join(('sys', *also))}; from unisono.script.nursery import main; main()"
    command = [*before, sys.executable, "-P", "-c", code, "--listen", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
            assert ready, f"no nursery within {WAIT_S:.0f} s"
            assert "listens" in process.stdout.readline()
            _nurseries.append(process.pid)
            yield
        finally:
            process.kill()
            if process.pid in _nurseries:
                _nurseries.remove(process.pid)


@pytest.fixture(scope="session")
def standing_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The nursery of this session; where it listens."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with run_nursery(path):
        yield path


IMPORTS = ("sklearn.datasets", "torch.utils.data")
"""What the examples import."""


@pytest.fixture(scope="session")
def nursery_with_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nursery that has also imported what the examples import."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with run_nursery(path, also=IMPORTS):
        yield path


@contextlib.contextmanager
def served_by(nursery: str) -> Iterator[None]:
    """Let the runs within fork their workers from this nursery: for fixtures of a whole module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_NURSERY", nursery)
        yield


@pytest.fixture
def nursery(standing_nursery: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of this test do not import torch each by itself."""
    monkeypatch.setenv("UNISONO_NURSERY", standing_nursery)


class Command:
    """A process under test, with its output as it comes."""

    def __init__(self, arguments: list[str], folder: Path, mark: str) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self._mark = mark
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            arguments,
            cwd=folder,
            env={**os.environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.pid = self.process.pid
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, lines), daemon=True)
            for pipe, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Iterator[str], lines: list[str]) -> None:
        for line in pipe:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def line(self, text: str, timeout_s: float = WAIT_S, *, after: str = "", pattern: str = "") -> str:
        """Wait for a line with this text in it.

        Args:
            after: only a line that comes later than one in which this regular expression is found.
            pattern: a regular expression that is found in the line as well.
        """

        def found() -> str | None:
            for lines in (self.out, self.err):
                later = iter(lines)
                if after:
                    any(re.search(after, line) for line in later)  # goes on after the first that fits
                for line in later:
                    if text in line and re.search(pattern, line):
                        return line
            return None

        with self._changed:
            self._changed.wait_for(lambda: found() or not any(r.is_alive() for r in self._readers), timeout_s)
            line = found()
        if line is None:
            self.give_up(f"no line with {text!r} within {timeout_s} s")
        return line or ""

    def generation(self, text: str, *, after: str = "") -> int:
        """Wait until a generation is announced with this text; returns its number, for `Gates.open`."""
        announced = re.compile(r"\bgeneration (\d+) with ")
        line = self.line(text, after=after, pattern=announced.pattern)
        found = announced.search(line)
        assert found is not None
        return int(found[1])

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit code, with all output read."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.give_up(f"still running after {timeout_s} s")
        for reader in self._readers:
            reader.join(END_S)
        return code

    def give_up(self, why: str) -> None:
        """Ask everybody for its Python stack, and fail with all that was said."""
        for pid, command in (marked(self._mark) | forked()).items():
            if "unisono" in command or pid in forked():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        with self._changed:
            self._changed.wait(10.0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        shown = "\n".join(["-- standard output --", *self.out, "-- standard error --", *self.err])
        pytest.fail(f"{why}\n{shown}", pytrace=False)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(END_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


Unisono = Callable[..., Command]


@pytest.fixture
def unisono(tmp_path: Path, mark: str) -> Iterator[Unisono]:
    """Start ``unisono ARGUMENTS`` in the test's folder; ``before``: a command that starts it.

    `PATIENT` goes before the options of a run, so those that the test gives count.
    """
    started: list[Command] = []

    def start(*arguments: object, before: Sequence[str] = ()) -> Command:
        words = [*map(str, arguments)]
        if words[:1] == ["run"]:
            words[1:1] = PATIENT
        command = Command([*before, sys.executable, "-P", "-m", "unisono", *words], tmp_path, mark)
        started.append(command)
        return command

    yield start
    for command in started:
        command.end()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script into the test's folder; returns its name."""

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write
