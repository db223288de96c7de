"""``unisono join``: add this machine's workers to a run that is going."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from unisono.capacity import check_open_files, check_workers, parse_workers
from unisono.cli.given import address_of, check_text, seconds
from unisono.errors import UsageError
from unisono.spec import MachineSpec, RunSpec, WhenIdle

__all__ = ["join"]

NICE: Final = 10
INPUTS: Final = (
    "/dev/tty[0-9]*",
    "/dev/pts/[0-9]*",
    "/dev/input/event*",
    "/dev/input/mice",
    "/proc/interrupts",
    "logind",
)


@click.command()
@click.argument("url")
@click.option("--token-file", required=True, metavar="FILE", help="The run's token (RUN/token on the head's machine).")
@click.option("-n", "--workers", default="auto", show_default=True, metavar="N|auto", help="How many workers.")
@click.option("--folder", default="", metavar="DIR", help="Where the script is here, if not at the same place.")
@click.option("--run-dir", default="", metavar="DIR", help="The run directory here, if not at the same place.")
@click.option(
    "--interface",
    default="",
    metavar="NAME",
    help="The network interface over which workers exchange gradients; default: the one that reaches the head.",
)
@seconds("--head-away-s", 60.0, "How long workers go on without the head.")
@click.option(
    "--when-idle",
    is_flag=True,
    help="Take part only while nobody else uses this machine; its workers leave "
    "at the end of the step when somebody does.",
)
@seconds("--idle-s", 300.0, "With --when-idle: without input and load for this long, the machine is idle.")
@click.option(
    "--idle-load",
    default=0.5,
    show_default=True,
    metavar="CORES",
    help="With --when-idle: what other processes may use.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="PATTERN",
    help="With --when-idle: files that show input, "
    "instead of terminals, input devices and desktops; e.g. one that a program touches.",
)
@click.option("--simulate-hosts", default=1, hidden=True)
@click.option("--launched", is_flag=True, hidden=True)
def join(
    url: str,
    token_file: str,
    workers: str,
    folder: str,
    run_dir: str,
    interface: str,
    head_away_s: float,
    when_idle: bool,
    idle_s: float,
    idle_load: float,
    inputs: tuple[str, ...],
    simulate_hosts: int,
    launched: bool,
) -> int:
    """Add this machine's workers to the run at URL (ws://HOST:PORT, in RUN/head.json).

    They run the script that the run was started with. Ctrl-C takes them away again, at the end of the step.
    """
    from unisono.cli.reach import Address, ask_status, read_token
    from unisono.machine import agent

    if not url.startswith("ws://"):
        raise UsageError(f"the address of a run is ws://HOST:PORT (url in RUN/head.json), got {url!r}")
    try:
        token = sys.stdin.readline().strip() if token_file == "-" else read_token(token_file)
    except FileNotFoundError:
        raise UsageError(f"there is no --token-file {token_file}; it is RUN/token while the run is going") from None
    run = _spec_of(ask_status(Address(url, token)))
    if ":" in workers:
        raise UsageError(f"unisono join --workers takes a number or 'auto', got {workers!r}")
    number = parse_workers(workers, run.threads).start
    check_workers(number)
    check_open_files(number)
    check_text("--folder", folder)
    check_text("--run-dir", run_dir)
    there = Path(folder or run.folder)
    script = Path(run.arguments[1] if run.arguments[0] == "--callable" else run.arguments[0])
    if not there.is_dir():
        raise UsageError(f"the run works in {there}, which is not on this machine; say where with --folder")
    if run.arguments[0] != "-m" and not (there / script).is_file():
        raise UsageError(f"the run's script {script} is not in {there}; say where it is with --folder")
    os.chdir(there)
    run = msgspec.structs.replace(run, folder=os.getcwd(), run_dir=run_dir or run.run_dir, head_away_s=head_away_s)
    machine = MachineSpec(
        run=run,
        num_workers=number,
        simulate_hosts=simulate_hosts,
        launched=launched,
        address=address_of(interface) if interface else "",
        when_idle=_when_idle(idle_s, idle_load, inputs) if when_idle else None,
    )
    return agent.join(machine, url, token)


def _when_idle(idle_s: float, load: float, inputs: tuple[str, ...]) -> WhenIdle:
    """Return when this machine takes part, and let its workers stand back behind the processes of who uses it."""
    if not 0 < load < math.inf:
        raise UsageError(f"--idle-load is a number of cores above 0, got {load}")
    os.nice(NICE)
    return WhenIdle(idle_s=idle_s, load=load, inputs=inputs or INPUTS)


def _spec_of(status: dict[str, Any]) -> RunSpec:
    """Return the settings of a run from its status.

    Raises:
        UsageError: the head has another version.
    """
    try:
        return msgspec.convert(status["job"], RunSpec)
    except (KeyError, msgspec.ValidationError) as error:
        raise UsageError(
            f"the settings of the run cannot be read ({error}); install the same version of unisono on all machines"
        ) from error
