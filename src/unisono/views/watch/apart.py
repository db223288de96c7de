"""A sink in a process of its own, for the packages of others.

They take long to import, keep the interpreter busy, and draw from the global random generators (for names, and for how
long to wait before they try again), which in the worker's process would change what the script draws.

The worker sends batches of events through a pipe. When the pipe ends without a last word, the worker was killed, and
this process ends at once: the next writer asks the tool how far it has got, and goes on there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO, Final

import msgspec

from unisono.core.events import Event
from unisono.core.words import exit_words
from unisono.views.watch.queued import Batched

__all__ = ["Apart", "main"]

CLOSE_S: Final = 15.0
"""How long a tool may take to end; then its process is killed."""
HEADER_BYTES: Final = 4

_Batch = list[Event]


class Apart:
    """A `Batched` that has another one, in a process of its own, do its work.

    Args:
        place: MODULE:CLASS of the other one.
        arguments: its keyword arguments, for JSON.
    """

    def __init__(self, place: str, **arguments: str) -> None:
        self._command = [sys.executable, "-P", "-m", "unisono.views.watch.apart", place, json.dumps(arguments)]
        self._process: subprocess.Popen[bytes] | None = None
        self._encoder = msgspec.msgpack.Encoder()

    def emit_all(self, events: Sequence[Event]) -> None:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(self._encoder.encode(list(events)))

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        self._process = process
        try:
            with contextlib.suppress(RuntimeError):
                self._send(b"")
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"its process had not ended after {CLOSE_S:.0f} s, and was killed") from None
        finally:
            self._process = None
        self._raise(process)

    def _send(self, payload: bytes) -> None:
        """Send a batch; an empty one is the last word.

        Raises:
            RuntimeError: the process has ended; the message is its last one.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(len(payload).to_bytes(HEADER_BYTES, "little") + payload)
            process.stdin.flush()
        except BrokenPipeError:
            process.wait()
            self._process = None
            self._raise(process)
            raise RuntimeError(f"its process {exit_words(process.returncode)}") from None

    def _raise(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as said:
            if text := said.read().decode(errors="replace").strip():
                raise RuntimeError(text)


def main(place: str, arguments: str) -> int:
    """Be the process: read batches from standard input until the last word, or until the worker is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process in its turn
    with os.fdopen(os.dup(1), "wb", buffering=0) as answer, os.fdopen(os.dup(0), "rb") as batches:
        os.dup2(2, 1)  # what the package prints is no answer
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        try:
            module, _, name = place.partition(":")
            sink = getattr(importlib.import_module(module), name)(**json.loads(arguments))
            return _work(sink, batches)
        except Exception as error:
            answer.write(f"{type(error).__name__}: {error}".encode(errors="replace")[:4000])
            return 1


def _work(sink: Batched, batches: BinaryIO) -> int:
    decoder = msgspec.msgpack.Decoder(_Batch)
    while len(header := batches.read(HEADER_BYTES)) == HEADER_BYTES:
        num_bytes = int.from_bytes(header, "little")
        if num_bytes == 0:
            sink.close()
            return 0
        payload = batches.read(num_bytes)
        if len(payload) < num_bytes:
            break
        events: Any = decoder.decode(payload)
        sink.emit_all(events)
    os._exit(0)  # the worker was killed, and another one goes on with the tool: nothing more may be written into it


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
