"""A long way between two hosts of a test: a process that hands each packet on after a fixed time.

It makes two TUN devices, the ends of the way. Whoever started it moves each of them into a network namespace and leads
a route over it::

    with Relay(("far-l", "far-r"), delay_s=0.1):
        ...  # ip link set far-l netns left; ip -n left link set far-l up; ip -n left route add 10.0.0.2/32 dev far-l

From then on each packet that is sent into one end comes out of the other one ``delay_s`` later, in the order in which
they were sent; an answer takes twice as long. The kernel needs TUN devices and not ``sch_netem``, which many lack.

The devices go when the process ends, the routes with them. It ends with the ``with``, and with the process that
started it, also after ``kill -9``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from types import TracebackType

from unisono.system.lifetime import PARENT, bind_to_parent

__all__ = ["Relay"]

READY = "ready"
READY_S = 240.0
TUN = "/dev/net/tun"
MAX_PACKET_BYTES = 65536

# <linux/if_tun.h>; the request is a struct ifreq.
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
REQUEST = struct.Struct("16sH22x")


class Relay:
    """The process; both devices are there until it ends.

    Args:
        ends: names for the devices, of at most 15 letters.
        delay_s: from one end to the other, in each direction.

    Raises:
        OSError: they cannot be made here; says why.
    """

    def __init__(self, ends: tuple[str, str], *, delay_s: float) -> None:
        self.ends = ends
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *ends, str(delay_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, PARENT: str(os.getpid())},
            text=True,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], READY_S)
        said = self._process.stdout.readline().strip() if ready else f"not a word within {READY_S:.0f} s"
        if said != READY:
            self.end()
            raise OSError(f"no relay between {' and '.join(ends)}: {said or 'it ended before it was ready'}")

    def end(self) -> None:
        """What is on its way is lost, as on a cable that is cut."""
        with self._process:  # waits for it, and closes the pipe
            self._process.kill()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()


# -- in the process itself ---------------------------------------------------------------------------


class Way:
    """One direction: the packets that were read from ``source`` and may not yet be written to ``target``."""

    def __init__(self, source: int, target: int, *, delay_s: float) -> None:
        self._source = source
        self._target = target
        self._delay_s = delay_s
        self._packets: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read all that is there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self._source, MAX_PACKET_BYTES)
                self._packets.append((time.monotonic() + self._delay_s, packet))

    def hand_on(self) -> float | None:
        """Write all whose time has come; returns after how many seconds the next one's comes, None without one."""
        while self._packets:
            due, packet = self._packets[0]
            left_s = due - time.monotonic()
            if left_s > 0:
                return left_s
            self._packets.popleft()
            with contextlib.suppress(OSError):  # that end is not up yet: lost
                os.write(self._target, packet)
        return None


def make_device(name: str) -> int:
    """A TUN device; it is there as long as the descriptor."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, REQUEST.pack(name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def main(left_name: str, right_name: str, delay_s: float) -> None:
    try:
        left, right = make_device(left_name), make_device(right_name)
    except OSError as error:
        print(f"{TUN}: {error}", flush=True)
        return
    print(READY, flush=True)
    ways = (Way(left, right, delay_s=delay_s), Way(right, left, delay_s=delay_s))
    pauses: list[float] = []
    while True:
        select.select([left, right], [], [], min(pauses, default=None))
        for way in ways:
            way.take()
        pauses = [pause_s for way in ways if (pause_s := way.hand_on()) is not None]


if __name__ == "__main__":
    bind_to_parent(signal.SIGKILL)
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
