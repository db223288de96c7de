"""The actor that holds an agent on a node of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

__all__ = ["Holder"]


class Holder:
    """Starts an agent and holds its standard input. Its methods are called by several threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def up(self) -> str:
        """Return where this actor is."""
        return socket.gethostname()

    def start(self, words: Sequence[str], secret: str, environment: Mapping[str, str], is_sent: bool) -> int:
        """Start the agent; return its process id.

        Args:
            is_sent: the folder of the run is the one in which Ray has put this actor.
        """
        # What Ray says to its own processes would be taken for that of a job by a script that uses Ray itself.
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        command = [sys.executable, *words[1:], *(["--folder", os.getcwd()] if is_sent else [])]
        self._process = subprocess.Popen(
            command,
            env={**own, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: its exit code says so
            self._process.stdin.write(secret + "\n")
            self._process.stdin.flush()
        return self._process.pid

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def read(self) -> list[str]:
        """Return the lines that the agent has printed since the last call; block until there is one. []: the end."""
        found: list[str] = []
        while not found or not self._lines.empty():
            line = self._lines.get()
            if line is None:
                self._lines.put(None)
                break
            found.append(line)
        return found

    def wait(self) -> int:
        """Return the exit code of the agent."""
        assert self._process is not None
        return self._process.wait()

    def terminate(self) -> None:
        """Ask the agent to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
