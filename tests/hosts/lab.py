"""Several machines on one: network namespaces at one switch, and process namespaces that die with one kill.

A machine of the lab can be lost as a whole (`Machine.kill`: all its processes are killed at once), and the network can
be cut between groups of machines, in both directions or in one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono
from unisono.system.lifetime import PARENT

__all__ = ["Lab", "Machine", "laid"]

NETWORK = "10.213.58"
NAMESPACES = Path("/run/netns")
BURST_BYTES = 32 << 10


def do(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)


class Machine:
    """A machine of a lab, on which one command of `unisono` runs."""

    def __init__(self, namespace: str, name: str, address: str) -> None:
        self.namespace = namespace
        self.name = name
        self.address = address
        self.command: Command | None = None

    def inside(self) -> list[str]:
        """What goes before a command that looks at the run from this machine."""
        return ["ip", "netns", "exec", self.namespace]

    def start(self, unisono: Unisono, *arguments: object, set_up: str = "") -> Command:
        """Start a command on this machine.

        Args:
            set_up: a line of shell that is run before, in the machine's own mounts.
        """
        shell = f'hostname {self.name} && {set_up or "true"} && exec "$@"'
        ends = ["env", "-u", PARENT, "setpriv", "--pdeathsig", "KILL"]  # with this process, whose id is another inside
        own = [*ends, "unshare", "--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child=KILL", "--mount-proc"]
        self.command = unisono(*arguments, before=[*self.inside(), *own, "sh", "-c", shell, "sh"])
        return self.command

    def kill(self) -> None:
        """All processes of this machine are killed at once."""
        assert self.command is not None
        os.kill(self.command.pid, signal.SIGKILL)
        self.command.process.wait(WAIT_S)


class Lab:
    """Machines that reach each other over a switch."""

    def __init__(self, num_machines: int) -> None:
        self._prefix = f"unisono-{os.getpid()}"
        names = [f"{self._prefix}-m{number}" for number in range(num_machines)]
        self.machines = [
            Machine(namespace, f"m{number}", f"{NETWORK}.{number + 1}") for number, namespace in enumerate(names)
        ]
        self._switch = f"{self._prefix}-switch"

    def lay(self) -> None:
        for name in (self._switch, *(machine.namespace for machine in self.machines)):
            do("ip", "netns", "add", name)
        do("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        do("ip", "-n", self._switch, "link", "set", "br0", "up")
        for number, machine in enumerate(self.machines):
            inner, outer = f"un{os.getpid()}m{number}", f"un{os.getpid()}s{number}"
            do("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
            do("ip", "link", "set", inner, "netns", machine.namespace)
            do("ip", "link", "set", outer, "netns", self._switch)
            do("ip", "-n", self._switch, "link", "set", outer, "master", "br0", "up")
            do("ip", "-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", inner)
            do("ip", "-n", machine.namespace, "link", "set", "lo", "up")
            do("ip", "-n", machine.namespace, "link", "set", inner, "up")

    def remove(self) -> None:
        for name in (self._switch, *(machine.namespace for machine in self.machines)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def cut(self, side: Collection[int], *, only_from: bool = False) -> None:
        """Cut the machines of these numbers off from the others.

        Args:
            only_from: what these machines send still arrives at the others.
        """
        for number, machine in enumerate(self.machines):
            for other_number, other in enumerate(self.machines):
                if (number in side) == (other_number in side) or (only_from and number not in side):
                    continue
                do(*machine.inside(), "iptables", "-A", "INPUT", "-s", other.address, "-j", "DROP")

    def limit(self, number: int, mbit_per_s: float) -> None:
        """Let a machine send no more than so much from now on."""
        device = f"un{os.getpid()}m{number}"
        rate = ("rate", f"{mbit_per_s}mbit", "burst", BURST_BYTES, "latency", "50ms")
        do(*self.machines[number].inside(), "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def mend(self) -> None:
        """Let all machines reach each other again, as fast as they can."""
        for number, machine in enumerate(self.machines):
            do(*machine.inside(), "iptables", "-F")
            device = f"un{os.getpid()}m{number}"
            subprocess.run(
                [*machine.inside(), "tc", "qdisc", "delete", "dev", device, "root"], capture_output=True, check=False
            )


@contextmanager
def laid(num_machines: int) -> Iterator[Lab]:
    """A lab. Skipped where namespaces are not permitted."""
    missing = [
        tool for tool in ("ip", "tc", "iptables", "unshare", "setpriv", "hostname") if shutil.which(tool) is None
    ]
    if missing:
        pytest.skip(f"hosts on one machine need {', '.join(missing)} (Debian: iproute2, iptables)")
    lab = Lab(num_machines)
    try:
        try:
            lab.lay()
            do(*lab.machines[0].inside(), "iptables", "-L")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield lab
    finally:
        lab.remove()
