"""``unisono join``: add this machine's workers to a run that is going."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from unisono.capacity import check_open_files, check_workers, parse_workers
from unisono.cli.given import check_text, seconds
from unisono.errors import UsageError
from unisono.spec import MachineSpec, RunSpec

if TYPE_CHECKING:
    from unisono.cli.reach import Address

__all__ = ["join"]

RETRY_S: Final = 1.0


@click.command()
@click.argument("url")
@click.option("--token-file", required=True, metavar="FILE", help="The run's token (RUN/token on the head's machine).")
@click.option("-n", "--workers", default="auto", show_default=True, metavar="N|auto", help="How many workers.")
@click.option("--folder", default="", metavar="DIR", help="Where the script is here, if not at the same place.")
@click.option("--run-dir", default="", metavar="DIR", help="The run directory here, if not at the same place.")
@seconds("--head-away-s", 60.0, "How long workers go on without the head.")
@click.option("--wait-s", default=0.0, show_default=True, help="How long to wait for the head, if it is not there yet.")
@click.option("--simulate-hosts", default=1, hidden=True)
@click.option("--launched", is_flag=True, hidden=True)
def join(
    url: str,
    token_file: str,
    workers: str,
    folder: str,
    run_dir: str,
    head_away_s: float,
    wait_s: float,
    simulate_hosts: int,
    launched: bool,
) -> int:
    """Add this machine's workers to the run at URL (ws://HOST:PORT, in RUN/head.json).

    They run the script that the run was started with. Ctrl-C takes them away again, at the end of the step.
    """
    from unisono.cli.reach import Address, read_token
    from unisono.machine import agent

    if not url.startswith("ws://"):
        raise UsageError(f"the address of a run is ws://HOST:PORT (url in RUN/head.json), got {url!r}")
    try:
        token = sys.stdin.readline().strip() if token_file == "-" else read_token(token_file)
    except FileNotFoundError:
        raise UsageError(f"there is no --token-file {token_file}; it is RUN/token while the run is going") from None
    run = _spec_of(_wait_for_head(Address(url, token), wait_s))
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
    machine = MachineSpec(run=run, num_workers=number, simulate_hosts=simulate_hosts, launched=launched)
    return agent.join(machine, url, token)


def _wait_for_head(address: Address, wait_s: float) -> dict[str, Any]:
    """Return the head's account of the run, as soon as there is a head."""
    from unisono.cli.reach import NotGoing, ask_status

    until, is_said = time.monotonic() + wait_s, False
    while True:
        try:
            return ask_status(address)
        except NotGoing as error:
            if time.monotonic() >= until:
                raise
            if not is_said:
                # Process 1 of a container is not ended by a signal that it does not handle.
                signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
                click.echo(f"unisono: {error}; waiting for it", err=True)
            is_said = True
            time.sleep(RETRY_S)


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
