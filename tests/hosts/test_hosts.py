"""Two hosts on one machine: network namespaces with a cable between them, which is cut, loses packets, or is long.

The head and two workers are on the first host; the second one joins with two workers. Skipped where namespaces are not
permitted (they need root, and the commands of Debian's iproute2 and iptables).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.relay import Relay
from tests.waiting import WAIT_S
from tests.workers import small_training
from tests.workers.conftest import Command, Unisono, run_nursery
from tests.workers.gates import Gates
from unisono.record.journal import compare, read, times
from unisono.testing import Faults

SCRIPT = Path(small_training.__file__)
STEPS = 60
ADDRESSES = ("10.213.57.1", "10.213.57.2")
HAS_IPV6 = Path("/proc/net/if_inet6").exists()
HEARTBEAT_TIMEOUT_S = 4.0
"""Before the kernel closes a connection whose other end is silent, which it does after 5 s."""
SILENT = ("--set", f"heartbeat-timeout={HEARTBEAT_TIMEOUT_S}s")
"""Where the other end shall be silent; elsewhere a worker that waits for its turn is not lost for that."""
EXCHANGE_TIMEOUT_S = 3600.0
"""Longer than a test: whoever goes on was told to."""
DELAY_S = 0.1
"""On the long way, in each direction: an answer takes 200 ms."""
CLOSED_PORT = 9
LOST = re.compile(r"has been silent for|has closed its connection")
"""What the head says of a worker behind a cut cable: the kernel closes its connection, if the head looks late."""
NAMESPACES = Path("/run/netns")
# As a host of its own: another name, so that nobody there takes the other's memory for its own.
ENTER = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')


def do(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)


def of_ipv6(address: str) -> str:
    """The other address of the host that has this one."""
    return f"fd57::{address.rpartition('.')[2]}"


class Cable:
    """Two namespaces, `left` (the head's) and `right`, with a link between them."""

    def __init__(self, folder: Path) -> None:
        self.nurseries = tuple(str(folder / side) for side in ("left", "right"))
        self.names = tuple(f"unisono-{os.getpid()}-{side}" for side in ("left", "right"))
        self.links = tuple(f"un{os.getpid()}{side}" for side in "lr")

    def lay(self) -> None:
        for left in NAMESPACES.glob("unisono-*-*"):  # names only, by a test that was killed
            if not Path("/proc", left.name.split("-")[1]).exists():
                do("ip", "netns", "delete", left.name)
        for name in self.names:
            do("ip", "netns", "add", name)
        do("ip", "link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            do("ip", "link", "set", link, "netns", name)
            do("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
            do("ip", "-n", name, "link", "set", "lo", "up")
            do("ip", "-n", name, "link", "set", link, "up")
        self._give_ipv6()

    def _give_ipv6(self) -> None:
        """Both addresses of IPv6: the kernel takes them away from a link that goes down."""
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            if HAS_IPV6:
                do("ip", "-n", name, "address", "replace", f"{of_ipv6(address)}/64", "dev", link, "nodad")

    def cut(self) -> None:
        do("ip", "-n", self.names[0], "link", "set", self.links[0], "down")

    def mend(self) -> None:
        do("ip", "-n", self.names[0], "link", "set", self.links[0], "up")
        self._give_ipv6()
        for side in (0, 1):
            do(*self.inside(side), "iptables", "-F")

    def wait_until_whole(self) -> None:
        """Both hosts find each other. After a cut, they may hold for some seconds that there is no way."""
        deadline = time.monotonic() + WAIT_S
        for side in (0, 1):
            do("ip", "-n", self.names[side], "neigh", "flush", "all")
            while not self.reaches_other(side):
                assert time.monotonic() < deadline, f"{self.names[side]} does not reach the other host"

    def reaches_other(self, side: int) -> bool:
        """Whether the other host answers this one."""
        try:
            self.knock(side, timeout_s=1.0)
        except OSError:  # no route, or no answer
            return False
        return True

    def knock(self, side: int = 0, timeout_s: float | None = None) -> float:
        """How long a host waits for the other's answer to its wish for a connection: no.

        Raises:
            OSError: there is none.
        """
        with self.socket(side, socket.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
            probe.settimeout(timeout_s)
            since = time.monotonic()
            probe.connect((ADDRESSES[1 - side], CLOSED_PORT))
        return time.monotonic() - since

    def drop(self, side: int, *match: str) -> None:
        """Let what arrives on this side (0: the head's) be lost, where it matches."""
        do(*self.inside(side), "iptables", "-A", "INPUT", "-i", self.links[side], *match, "-j", "DROP")

    def lengthen(self, relay: Relay) -> None:
        """Lead all packets over the relay instead, from now until it ends."""
        for name, end, own, other in zip(self.names, relay.ends, ADDRESSES, reversed(ADDRESSES), strict=True):
            do("ip", "link", "set", end, "netns", name)
            do("ip", "-n", name, "link", "set", end, "up")
            do("ip", "-n", name, "route", "add", f"{other}/32", "dev", end, "src", own)

    def socket(self, side: int, kind: socket.SocketKind) -> socket.socket:
        """A socket on this host, for this process."""

        def enter_and_open() -> socket.socket:
            with (NAMESPACES / self.names[side]).open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.socket(socket.AF_INET, kind)

        with ThreadPoolExecutor(1) as thread:  # a namespace is entered by a thread, and left with it
            return thread.submit(enter_and_open).result()

    def wait_for_round_trip(self, least_s: float, most_s: float) -> None:
        """None takes less; and one takes no more, though a busy machine makes many of them longer."""
        deadline = time.monotonic() + WAIT_S
        while (seconds := self.knock()) > most_s:
            assert time.monotonic() < deadline, f"no answer within {most_s} s, the last one after {seconds:.3f} s"
        assert seconds >= least_s

    def inside(self, side: int) -> list[str]:
        """What goes before a command that is to run on this host."""
        nursery = f"UNISONO_NURSERY={self.nurseries[side]}"
        return ["ip", "netns", "exec", self.names[side], "env", nursery, *ENTER, ("left", "right")[side]]

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cable]:
    """Both hosts, each with a standing nursery."""
    missing = [tool for tool in ("ip", "iptables", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"hosts on one machine need {', '.join(missing)} (Debian: iproute2, iptables)")
    cable = Cable(tmp_path_factory.mktemp("nurseries"))
    with ExitStack() as stack:
        stack.callback(cable.remove)
        try:
            cable.lay()
            do(*cable.inside(0), "iptables", "-L")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        for side in (0, 1):
            stack.enter_context(run_nursery(cable.nurseries[side], before=cable.inside(side)))
        yield cable


@pytest.fixture
def cable(hosts: Cable) -> Iterator[Cable]:
    """The cable between both hosts; whole again at the end."""
    hosts.wait_until_whole()
    yield hosts
    hosts.mend()


@pytest.fixture
def relay(cable: Cable) -> Iterator[Relay]:
    """What makes the way from one host to the other long, once it is laid (`Cable.lengthen`)."""
    try:
        relay = Relay((f"far{os.getpid()}l", f"far{os.getpid()}r"), delay_s=DELAY_S)
    except OSError as error:
        pytest.skip(f"packets between two hosts on one machine cannot be delayed here: {error}")
    with relay:
        yield relay


@pytest.fixture(scope="module")
def calm(hosts: Cable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker, on the first host."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    command = [*hosts.inside(0), sys.executable, "-P", "-m", "unisono", "run", "-n", "1", "--run-dir", folder, SCRIPT]
    outcome = subprocess.run([*command, "--", "--steps", str(STEPS)], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Hosts:
    """A run on the first host, and two workers of the second one that have joined it."""

    def __init__(
        self, cable: Cable, unisono: Unisono, run_dir: Path, gates: Gates, *options: object, away_s: float
    ) -> None:
        options += (
            "--bind",
            ADDRESSES[0],
            "--set",
            "heartbeat=0.3s",
            "--set",
            f"exchange-timeout={EXCHANGE_TIMEOUT_S}s",
            "--set",
            f"head-away={away_s}s",
        )
        self.left: Command = unisono(
            *("run", SCRIPT, "-n", 2, "--run-dir", run_dir, *options),
            *("--", "--steps", STEPS, "--gates", gates.folder),
            before=cable.inside(0),
        )
        gates.wait(3)
        url = json.loads((run_dir / "head.json").read_text())["url"]
        self.right: Command = unisono(
            *("join", url, "--token-file", run_dir / "token", "-n", 2),
            before=cable.inside(1),
        )
        gates.open(3, self.left.generation("; generation 2 with"))
        gates.open(20, self.left.generation("with 4 workers"))
        gates.wait(40)


def finish_on_both(
    cable: Cable,
    unisono: Unisono,
    run_dir: Path,
    calm: Path,
    tmp_path: Path,
    *place: object,
    join: tuple[object, ...] = (),
) -> dict[str, Any]:
    """A worker on each host, at this address; returns what the head says of the run."""
    with Gates(tmp_path / "gates", (3, 20)) as gates:
        left = unisono(
            *("run", SCRIPT, "-n", 1, "--run-dir", run_dir, *place, "--", "--steps", STEPS, "--gates", gates.folder),
            before=cable.inside(0),
        )
        gates.wait(3)
        url = json.loads((run_dir / "head.json").read_text())["url"]
        right = unisono("join", url, "--token-file", run_dir / "token", "-n", 1, *join, before=cable.inside(1))
        gates.open(3, left.generation("w1 joins"))
        gates.wait(20, workers=2)
        status = unisono("watch", "--once", run_dir, "--json", before=cable.inside(0))
        assert status.wait() == 0, status.err
        gates.open(20)
        assert left.wait() == 0, left.err
        assert right.wait() == 0, right.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert by_step(run_dir)[-1] == {"w0", "w1"}
    found: dict[str, Any] = json.loads("\n".join(status.out))
    return found


def test_two_hosts_train_by_ipv6(cable: Cable, unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """The head, and the exchange of gradients: no packet of IPv4 passes."""
    if not HAS_IPV6:
        pytest.skip("no IPv6 here")
    host = of_ipv6(ADDRESSES[0])
    for side in (0, 1):
        cable.drop(side)
    found = finish_on_both(cable, unisono, run_dir, calm, tmp_path, "--bind", host)
    assert f"[{host}]" in found["url"]


def test_an_interface_and_a_range_of_ports_are_named(
    cable: Cable, unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    place = ("--set", f"interface={cable.links[0]}", "--set", "port=47330:47339")
    join = ("--interface", cable.links[1])
    found = finish_on_both(cable, unisono, run_dir, calm, tmp_path, *place, join=join)
    assert f"{ADDRESSES[0]}:4733" in found["url"]


def by_step(run_dir: Path) -> list[set[str]]:
    return [set(workers) for workers in times.by_step(run_dir).values()]


@pytest.mark.parametrize("how", ["cut", "nothing to the head", "nothing from the head"])
def test_with_partition_wait_only_the_side_with_the_head_goes_on(
    how: str, cable: Cable, unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    """A link that is cut, or carries one direction only: two workers go on, the other two end and say why."""
    with Gates(tmp_path / "gates", (3, 20, 40, 50)) as gates:
        hosts = Hosts(cable, unisono, run_dir, gates, *SILENT, "--set", "when-cut=wait", away_s=1.0)
        if how == "cut":
            cable.cut()
        else:
            cable.drop(0 if how == "nothing to the head" else 1)
        gates.open(40)
        gates.wait(50)
        assert hosts.right.wait() == 1
        gates.open(50)
        assert hosts.left.wait() == 0, hosts.left.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert by_step(run_dir)[39] == {"w0", "w1", "w2", "w3"}
    assert by_step(run_dir)[-1] == {"w0", "w1"}
    assert LOST.search(" ".join(hosts.left.err))
    assert re.search(r"failed: the (connection to the )?head at ", hosts.right.err[-1]), hosts.right.err


def test_the_other_side_comes_back(cable: Cable, unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """When the link is whole again, the joined machine starts new workers, and they are admitted."""
    with Gates(tmp_path / "gates", (3, 20, 40, 50)) as gates:
        hosts = Hosts(cable, unisono, run_dir, gates, *SILENT, away_s=60.0)
        cable.cut()
        gates.open(40)
        gates.wait(50)
        cable.mend()
        gates.open(50, hosts.left.generation("join", after=LOST.pattern))  # of those that replace the lost ones
        assert hosts.left.wait() == 0, hosts.left.err
        assert hosts.right.wait() == 0, hosts.right.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert by_step(run_dir)[50] == {"w0", "w1"}
    assert len(by_step(run_dir)[-1]) > 2


def test_lost_packets_cost_time_only(cable: Cable, unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """One packet of ten is lost in each direction: the four workers finish together."""
    with Gates(tmp_path / "gates", (3, 20, 40)) as gates:
        hosts = Hosts(cable, unisono, run_dir, gates, away_s=60.0)
        for side in (0, 1):
            cable.drop(side, "-m", "statistic", "--mode", "nth", "--every", "10", "--packet", "0")
        gates.open(40)
        assert hosts.left.wait() == 0, hosts.left.err
        assert hosts.right.wait() == 0, hosts.right.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert by_step(run_dir)[-1] == {"w0", "w1", "w2", "w3"}


def test_a_long_way_is_as_long_as_it_says(cable: Cable, relay: Relay) -> None:
    """Packets take `DELAY_S` in each direction and stay in order, a connection the double; then the way is short."""
    cable.lengthen(relay)
    for side in (0, 1):
        with cable.socket(side, socket.SOCK_DGRAM) as sender, cable.socket(1 - side, socket.SOCK_DGRAM) as receiver:
            receiver.bind((ADDRESSES[1 - side], 0))
            receiver.settimeout(WAIT_S)
            sent_at = []
            for number in range(100):
                sent_at.append(time.monotonic())
                sender.sendto(bytes([number]), receiver.getsockname())
            for number in range(100):
                assert receiver.recv(1) == bytes([number])
                assert time.monotonic() - sent_at[number] >= DELAY_S
    cable.wait_for_round_trip(2 * DELAY_S, 3 * DELAY_S)
    relay.end()
    cable.wait_for_round_trip(0.0, DELAY_S)


def test_a_long_way_costs_time_only(
    cable: Cable,
    relay: Relay,
    unisono: Unisono,
    run_dir: Path,
    calm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer takes 200 ms: four workers go on together, also after one is killed; another takes its place."""
    for name, value in Faults().kill("w3", step=55, at="published").environment().items():
        monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", (3, 20, 40, 54, 55, 56, 57)) as gates:
        hosts = Hosts(cable, unisono, run_dir, gates, away_s=60.0)
        gates.open(40)
        gates.wait(54)
        cable.lengthen(relay)
        assert cable.knock() >= 2 * DELAY_S
        gates.open(54)
        gates.wait(55)
        gates.open(55)
        gates.wait(56)
        gates.open(56)
        gates.open(57, hosts.left.generation("w4 joins"))
        assert hosts.left.wait() == 0, hosts.left.err
        assert hosts.right.wait() == 0, hosts.right.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    steps = [line for line in read(run_dir) if line["kind"] == "step"][54:]
    assert by_step(run_dir)[54:56] == [{"w0", "w1", "w2", "w3"}, {"w0", "w1", "w2"}]
    assert by_step(run_dir)[-1] == {"w0", "w1", "w2", "w4"}
    assert steps[-1]["generation"] - steps[0]["generation"] == 2, "another one than the killed one was lost"
    assert "silent" not in " ".join(hosts.left.err)
    held = [step["seconds"]["waiting"] + step["seconds"]["network"] for step in steps]
    assert min(held) >= 2 * DELAY_S, "a step did not go the long way"


def examined(cable: Cable, unisono: Unisono, tmp_path: Path, *options: object) -> dict[str, Any]:
    """What `unisono doctor` finds on both hosts."""
    enter = "\n".join(
        f'{side}) exec {shlex.join(cable.inside(number))} sh -c "$command" ;;'
        for number, side in enumerate(("left", "right"))
    )
    program = tmp_path / "enter"
    program.write_text(f'#!/bin/sh\nfor word; do name=$command command=$word; done\ncase "$name" in\n{enter}\nesac\n')
    program.chmod(0o755)
    command = unisono("doctor", "--hosts", "left,right", "--ssh", program, "--json", *options)
    command.wait()
    found: dict[str, Any] = json.loads("\n".join(command.out))
    return found


def test_the_doctor_measures_the_way_between_hosts_and_finds_a_firewall(
    cable: Cable, unisono: Unisono, tmp_path: Path
) -> None:
    """Each direction by itself: what stops one may let the other pass."""
    ports = "47310:47320"
    cable.drop(1, "-p", "tcp", "--dport", ports)
    found = examined(cable, unisono, tmp_path, "--ports", ports)
    there, back = found["machines"]["paths"]
    assert (there["source"], there["target"]) == ("left", "right")
    assert there["error"].startswith(f"{ADDRESSES[1]} port 4731")
    assert "timed out" in there["error"]
    assert back["address"] == ADDRESSES[0]
    assert back["bandwidth"] > 1e5
    (hurt,) = [finding for finding in found["findings"] if finding["check"] == "left to right"]
    assert hurt["do"].startswith("let the firewall of right pass TCP from left")
    assert {facts["host"] for facts in found["machines"]["facts"].values()} == {"left", "right"}
