"""The time of a step between hosts, on links of a known rate, against DistributedDataParallel and against the bound.

python -m benchmarks.network                                          # everything: about an hour
python -m benchmarks.network --links 1g,100m --hosts 2 --sizes 4      # minutes
python -m benchmarks.network --sides unisono,unisono-bf16,ddp,ddp-bf16,plain     # with gradients in half the bytes
python -m benchmarks.network --links 100m_20ms --hosts 3 --sizes 4 --members 2 --json network.json

The hosts are network namespaces of this machine (root, and the commands of Debian's iproute2 and util-linux). Each has
one cable to a hub that forwards packets. Both ends of a cable send at the link's rate (``tc``'s token bucket), and a
long cable goes through the relay of the tests, which hands each packet on after half of the link's delay. The
namespaces have no names: they end with the processes in them, and these with the benchmark, also after ``kill -9``.

The sides take turns, a few steps each: Unisono as its users use it (``unisono run`` and ``unisono join``), DDP over
gloo, and DDP's computation without any exchange, on all hosts at the same time. A side whose name ends with ``-bf16``
sends gradients as bfloat16: ``wire="bf16"``, and what torch's hook for DDP does. **The bound** is

    max(computation, bytes / bandwidth) + round trips

where the bytes are those that a host sends in a step (as DDP's ring does: ``2 (H - 1) / H`` times the gradients), and
the round trips are one and a half: scattered there, sums back, and the word that they have arrived.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import CASES
from benchmarks.report import median_interval, print_table, write_json
from benchmarks.step_time import Team, started
from tests.hosts.relay import Relay

HUB = 0
"""The namespace in the middle; the hosts are 1, 2, ..."""
NETWORK = "10.213.58"
PORT = 7000
DEVICE = "cable"
BURST_BYTES = 128 << 10
QUEUE_MS = 50
"""How long a packet may stand in the queue before a link; a full queue loses packets."""
FRAME_BYTES = {1500: (1448, 1514), 9000: (8948, 9014)}
"""By MTU: the data in a full TCP segment, and the bytes that the token bucket counts for it."""
SIZES = {4: "mlp_small", 100: "mlp"}
"""MB of gradients, and the case of that size."""
TURNS = 6
BLOCK_S = 1.5
LEAST_STEPS = 3

HOLD = (
    "import os, signal; from unisono.system.lifetime import bind_to_parent; bind_to_parent(signal.SIGKILL); "
    "print('ready', flush=True); signal.pause()"
)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One host's cable. ``rate_mbit`` 0: as fast as it goes."""

    rate_mbit: float
    delay_s: float = 0.0
    """From one host to another."""

    @property
    def mtu(self) -> int:
        return 9000 if self.delay_s else 1500  # the relay is a process, and counts packets

    @property
    def bytes_per_s(self) -> float:
        """Of data, in full segments."""
        data, frame = FRAME_BYTES[self.mtu]
        return self.rate_mbit * 1e6 / 8 * data / frame


LINKS = {
    "100m": Link(rate_mbit=100),
    "100m_20ms": Link(rate_mbit=100, delay_s=0.020),
    "1g": Link(rate_mbit=1000),
    "10g": Link(rate_mbit=10_000),
}


class Lab:
    """Some hosts and the hub between them, each a namespace that one process holds."""

    def __init__(self, num_hosts: int, link: Link, stack: ExitStack, congestion: str = "") -> None:
        self._congestion = congestion
        self._holders = [self._hold(number, stack) for number in range(num_hosts + 1)]
        self._do(HUB, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for host in range(1, num_hosts + 1):
            self._lay(host, link, stack)

    @staticmethod
    def address(host: int) -> str:
        return f"{NETWORK}.{host}"

    def inside(self, host: int) -> list[str]:
        """What goes before a command that is to run on a host."""
        return ["nsenter", "--target", str(self._holders[host].pid), "--net", "--uts"]

    @staticmethod
    def _hold(number: int, stack: ExitStack) -> subprocess.Popen[str]:

        command = ["unshare", "--net", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{number}"]
        environment = {**os.environ, "UNISONO_PARENT": str(os.getpid())}
        holder = subprocess.Popen(
            [*command, sys.executable, "-c", HOLD], stdout=subprocess.PIPE, env=environment, text=True
        )
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        stack.callback(holder.stdout.close)
        if holder.stdout.readline().strip() != "ready":
            raise RuntimeError("no network namespace could be made: this needs root")
        return holder

    def _do(self, host: int, *command: object) -> None:
        subprocess.run([*self.inside(host), *map(str, command)], check=True, capture_output=True, text=True)

    def _lay(self, host: int, link: Link, stack: ExitStack) -> None:
        """Lay the cable of a host: its device there is `DEVICE`, that in the hub has the host's number in its name."""
        ends = (f"un{os.getpid()}h{host}", f"un{os.getpid()}r{host}")
        if link.delay_s:
            stack.enter_context(Relay(ends, delay_s=link.delay_s / 2))
        else:
            subprocess.run(
                ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True, text=True
            )
        for end, place in zip(ends, (host, HUB), strict=True):
            subprocess.run(["ip", "link", "set", end, "netns", str(self._holders[place].pid)], check=True)
        self._do(host, "ip", "link", "set", ends[0], "name", DEVICE)
        self._do(host, "ip", "link", "set", "lo", "up")
        if self._congestion:
            self._do(host, "sh", "-c", 'echo "$0" > /proc/sys/net/ipv4/tcp_congestion_control', self._congestion)
        for place, device in ((host, DEVICE), (HUB, ends[1])):
            self._do(place, "ip", "link", "set", device, "mtu", link.mtu)
            if link.rate_mbit:
                shape = ("rate", f"{link.rate_mbit}mbit", "burst", BURST_BYTES, "latency", f"{QUEUE_MS}ms")
                self._do(place, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
        self._do(host, "ip", "address", "add", f"{self.address(host)}/32", "dev", DEVICE)
        self._do(HUB, "ip", "address", "add", f"{NETWORK}.254/32", "dev", ends[1])
        self._do(host, "ip", "link", "set", DEVICE, "up")
        self._do(HUB, "ip", "link", "set", ends[1], "up")
        self._do(host, "ip", "route", "add", f"{NETWORK}.254/32", "dev", DEVICE, "scope", "link")
        self._do(host, "ip", "route", "add", f"{NETWORK}.0/24", "via", f"{NETWORK}.254", "src", self.address(host))
        self._do(HUB, "ip", "route", "add", f"{self.address(host)}/32", "dev", ends[1])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is measured: so many hosts with so many members each, and a model of so many MB."""

    link: str
    num_hosts: int
    members: int
    size: int
    microbatches: int

    @property
    def name(self) -> str:
        members = f".{self.members}each" if self.members > 1 else ""
        return f"{self.link}.{self.num_hosts}.{self.size}mb{members}"

    @property
    def workers(self) -> int:
        return self.num_hosts * self.members


@contextmanager
def teams(what: Comparison, lab: Lab, sides: Sequence[str], exchange: str) -> Iterator[list[Team]]:
    """The sides, started and ready for their first step."""
    commands = {side: partial(_commands, side, what, lab, exchange) for side in sides}
    with started(commands, what.workers) as ready:
        yield ready


def _commands(name: str, what: Comparison, lab: Lab, exchange: str, folder: Path) -> list[list[str]]:
    side, _, wire = name.partition("-")
    delay = side.removeprefix("delay") if side.startswith("delay") else "0"
    kind = "unisono" if delay != "0" else side
    options = [
        *(kind, SIZES[what.size], "--microbatches", str(what.microbatches), "--workers", str(what.workers)),
        *("--control", str(folder / f"{name}.socket"), "--wire", wire or "fp32"),
    ]
    if kind != "unisono":
        meeting = ["--meeting", str(folder / f"meeting-{name}")] if side == "ddp" else []
        return [
            [
                *(*lab.inside(1 + rank // what.members), "env", f"GLOO_SOCKET_IFNAME={DEVICE}"),
                *(sys.executable, "-m", "benchmarks.sides", *options, *meeting, "--rank", str(rank)),
            ]
            for rank in range(what.workers)
        ]
    options += ["--delay", delay]
    run, members, port = folder / f"run-{name}", str(what.members), PORT + bool(wire) + 2 * int(delay)
    this = [sys.executable, "-m", "unisono"]
    head = ["run", "-m", "benchmarks.sides", "--workers", members, "--run-dir", str(run), "--exchange", exchange]
    network = [
        "--bind",
        lab.address(1),
        "--set",
        f"port={port}",
        "--set",
        "go-on-without-after=600s",
        "--set",
        "kill-after=600s",
    ]
    patient = ["sh", "-c", 'until test -s "$0"; do sleep 0.1; done; exec "$@"', str(run / "head.json")]
    join = ["join", f"wss://{lab.address(1)}:{port}", "--token-file", str(run / "token"), "--workers", members]
    return [
        [*lab.inside(1), *this, *head, *network, "--", *options, "--unbalanced"],
        *([*lab.inside(host), *patient, *this, *join] for host in range(2, what.num_hosts + 1)),
    ]


def compare(
    what: Comparison, sides: Sequence[str], exchange: str, turns: int, steps: int, congestion: str
) -> dict[str, Any]:
    """Let the sides take turns."""
    link = LINKS[what.link]
    with ExitStack() as stack:
        lab = Lab(what.num_hosts, link, stack, congestion)
        with teams(what, lab, sides, exchange) as ready:
            numbers = {}
            for team in ready:
                team.measure(2)  # buffers are made, DDP has rebuilt its buckets
                team.measure(2)
                numbers[team.name] = steps or max(LEAST_STEPS, round(BLOCK_S / team.blocks[-1].step_s))
                team.blocks.clear()
            for turn in range(turns):
                for team in ready if turn % 2 == 0 else reversed(ready):
                    team.measure(numbers[team.name])
            for team in ready:
                team.finish()
            return {
                "comparison": what.name,
                "hosts": what.num_hosts,
                "members": what.members,
                "microbatches": what.microbatches,
                "gradient_bytes": _gradient_bytes(what.size),
                "step_ms": {team.name: [round(1000 * block.step_s, 3) for block in team.blocks] for team in ready},
                "cpu_ms": {team.name: [round(1000 * block.cpu_s, 3) for block in team.blocks] for team in ready},
            }


def _gradient_bytes(size: int) -> int:
    return sum(4 * parameter.numel() for parameter in CASES[SIZES[size]].model().parameters())


def bound_s(link: Link, num_hosts: int, gradient_bytes: int, compute_s: float) -> float:
    sent = 2 * (num_hosts - 1) / num_hosts * gradient_bytes
    return max(compute_s, sent / link.bytes_per_s) + 3 * link.delay_s


HEADER = (
    *("link.hosts.size", "step ms", "DDP", "computation", "bound", "ratio to DDP (95%)", "ratio to bound (95%)"),
    *("bf16 to fp32", "DDP's bf16 to fp32"),
)


def figures_of(what: Comparison, result: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The named figures of one comparison, and its row for the table."""
    step = result["step_ms"]
    own = statistics.median(step["unisono"])
    figures, row = {f"step_ms.{what.name}": own}, [what.name, f"{own:.1f}", "", "", "", "", "", "", ""]
    for place, (narrow, wide) in enumerate((("unisono-bf16", "unisono"), ("ddp-bf16", "ddp")), 7):
        if narrow in step and wide in step:
            ratio = median_interval([a / b for a, b in zip(step[narrow], step[wide], strict=True)])
            figures[f"{narrow.replace('-', '_')}_ratio.{what.name}"] = ratio.median
            row[place] = str(ratio)
    if "ddp" in step:
        ratio = median_interval([a / b for a, b in zip(step["unisono"], step["ddp"], strict=True)])
        figures[f"ratio_to_ddp.{what.name}"] = ratio.median
        row[2], row[5] = f"{statistics.median(step['ddp']):.1f}", str(ratio)
    if "plain" in step:
        compute_s = statistics.median(step["plain"]) / 1000
        bound = bound_s(LINKS[what.link], what.num_hosts, result["gradient_bytes"], compute_s) * 1000
        ratio = median_interval([each / bound for each in step["unisono"]])
        figures[f"ratio_to_bound.{what.name}"] = ratio.median
        row[3], row[4], row[6] = f"{1000 * compute_s:.1f}", f"{bound:.1f}", str(ratio)
    for side in step:
        if side.startswith("delay"):
            ratio = median_interval([a / b for a, b in zip(step[side], step["unisono"], strict=True)])
            figures[f"ratio_to_no_delay.{side}.{what.name}"] = ratio.median
            row[0] += f" ({side}: {ratio} of no delay)"
    return figures, row


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default=",".join(LINKS), metavar="A,B", help=f"of {', '.join(LINKS)}")
    parser.add_argument("--hosts", type=_numbers, default=[2, 3], metavar="N,N")
    parser.add_argument("--sizes", type=_numbers, default=[*SIZES], metavar="MB,MB", help=f"of {[*SIZES]}")
    parser.add_argument("--members", type=int, default=1, help="workers on each host")
    parser.add_argument("--microbatches", type=int, default=0, help="default: two a worker, so that bytes are a ring's")
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--congestion", default="", metavar="NAME", help="TCP's control; default: this machine's")
    parser.add_argument("--sides", default="unisono,ddp,plain", metavar="A,B", help="also delay1, delay2 ...")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--steps", type=int, default=0, help="of a turn; default: as many as take a while")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    options = parser.parse_args(arguments)
    links, sides = options.links.split(","), options.sides.split(",")
    if unknown := set(links) - set(LINKS):
        parser.error(f"unknown links {', '.join(sorted(unknown))}; there are {', '.join(LINKS)}")
    if unknown_sizes := set(options.sizes) - set(SIZES):
        parser.error(f"unknown sizes {sorted(unknown_sizes)}; there are {[*SIZES]}")
    if missing := [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]:
        parser.error(f"hosts on one machine need {', '.join(missing)} (Debian: iproute2, util-linux)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    runs, figures, rows = [], {}, []
    for size in options.sizes:
        for num_hosts in options.hosts:
            for link in links:
                workers = num_hosts * options.members
                what = Comparison(
                    link=link,
                    num_hosts=num_hosts,
                    members=options.members,
                    size=size,
                    microbatches=options.microbatches or 2 * workers,
                )
                result = compare(what, sides, options.exchange, options.turns, options.steps, options.congestion)
                found, row = figures_of(what, result)
                figures.update(found)
                runs.append(result)
                rows.append(row)
                print(f"{row}", file=sys.stderr, flush=True)
    print_table(HEADER, rows)
    if options.json:
        write_json(options.json, figures, runs)


if __name__ == "__main__":
    main()
