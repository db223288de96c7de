"""What an agent and a nursery (`unisono.script.nursery`) say to each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import msgspec

from unisono.system.lifetime import Memory

__all__ = ["ForkRequest", "Forked", "WorkerEnded"]


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. Attached: its standard output, its standard error, the token, its settings (`WorkerSpec.encode`),
    and a pipe from which the worker reads a byte before it does anything. The byte says that the agent knows of the
    worker; at the pipe's end the worker exits.
    """

    name: str
    arguments: list[str]
    """As after ``python -m unisono.script.worker``."""
    environment: dict[bytes, bytes]
    """Bytes, like the names of files: not all of them are UTF-8."""
    folder: bytes
    """The working directory."""
    adopted: bool = False
    """The agent adopts the worker."""

    @classmethod
    def of(
        cls, name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str, *, adopted: bool = False
    ) -> ForkRequest:
        inherited = {os.fsencode(key): os.fsencode(value) for key, value in environment.items()}
        return cls(name, list(arguments), inherited, os.fsencode(folder), adopted)

    def send(self, channel: socket.socket, descriptors: list[int]) -> None:
        """Send the request to the nursery at the other end."""
        # In memory of its own: an environment may be larger than what a socket takes at once.
        with Memory("unisono-fork", msgspec.msgpack.encode(self)) as memory:
            socket.send_fds(channel, [b"fork"], [*descriptors, memory.descriptor])


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Answer to a `ForkRequest`: the worker was started, or not."""

    name: str
    pid: int
    error: str = ""


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """A worker that is the nursery's own child has ended, with all processes of its group."""

    pid: int
    exit_code: int
    """Negative: killed by that signal."""
    peak_bytes: int = 0
    """The most memory that it had."""
