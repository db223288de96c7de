"""``unisono join``: add this machine's workers to a run that is going."""

from __future__ import annotations

import getpass
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from unisono.cli.given import address_of, check_text, seconds
from unisono.cli.reach import RUN, NotGoing, await_status, find, may_act, read_token
from unisono.cli.saying import say
from unisono.cluster.machine import agent
from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.core.errors import UsageError
from unisono.core.spec import MachineSpec, RunSpec
from unisono.core.words import count
from unisono.system.capacity import check_open_files, check_workers, parse_workers
from unisono.system.interfaces import is_local

__all__ = ["join", "settled", "spec_of"]


@click.command(epilog=RUN)
@click.argument("run", type=click.Path())
@click.option("--token-file", default="", metavar="FILE", help=(
    "RUN is the head's address (url in RUN/head.json), and this file has the token (RUN/token)."
))  # fmt: skip
@click.option("-n", "--workers", default="auto", show_default=True, metavar="N|auto", help="How many workers.")
@click.option("--folder", default="", metavar="DIR", help="The script's folder on this machine, if its path differs.")
@click.option("--run-dir", default="", metavar="DIR", help="The run directory on this machine, if its path differs.")
@click.option(
    "--interface",
    default="",
    metavar="NAME",
    help="The network interface over which workers exchange gradients. Default: the one that reaches the head.",
)
@click.option(
    "--while",
    "condition",
    default=None,
    metavar="COMMAND",
    help=(
        "Take part only while this command, run by a shell every few seconds, exits with 0. Otherwise the workers "
        "leave at the end of the step."
    ),
)
@seconds("--wait", None, "How long to wait for the head, if it is not up yet. [default: not]")
@click.option(
    "--no-head", is_flag=True, help=("Never run the head on this machine, even if the machine that runs it is lost.")
)
@click.option("--launched", default="", metavar="NAME", hidden=True)
def join(
    run: str,
    token_file: str,
    workers: str,
    folder: str,
    run_dir: str,
    interface: str,
    condition: str | None,
    wait: float | None,
    no_head: bool,
    launched: str,
) -> int:
    """Add this machine's workers to an active run.

    They run the run's script, as you. Ctrl-C removes them again, at the end of the step. The line that `unisono watch
    --once` shows keeps the invitation out of the process list:

        unisono join - <<< 'wss://...'
    """
    check_text("--while", condition or "")
    if condition is not None and not condition.strip():
        raise UsageError("--while is a command, such as --while 'test ! -e in-use'; got an empty one")
    invitation = may_act(_from_token_file(run, token_file) if token_file else find(run))
    spec = spec_of(status := await_status(invitation, wait or 0.0, _say_that_it_waits))
    if ":" in workers or "x" in workers:
        raise UsageError(f"unisono join --workers takes a number of workers or 'auto', got {workers!r}")
    number = parse_workers(workers, spec.threads).start
    check_workers(number)
    check_open_files(number)
    spec = settled(spec, folder=folder, run_dir=run_dir)
    if not launched:
        for line in _what_begins(invitation, str(status.get("run_id", "")), spec, number):
            say(f"unisono: {line}", err=True)
    machine = MachineSpec(
        run=spec,
        num_workers=number,
        launched=launched,
        held=bool(launched),
        may_have_head=not no_head,
        address=address_of(interface) if interface else "",
        condition=condition or "",
    )
    return agent.join(machine, invitation.url, invitation.token)


def settled(run: RunSpec, *, folder: str = "", run_dir: str = "") -> RunSpec:
    """Go to the folder of the script on this machine; return the run as it is here.

    Raises:
        UsageError: the folder or the script is not on this machine.
    """
    check_text("--folder", folder)
    check_text("--run-dir", run_dir)
    there = Path(folder or run.folder)
    script = Path(run.arguments[1] if run.arguments[0] == "--callable" else run.arguments[0])
    if not there.is_dir():
        if folder:
            raise UsageError(f"--folder {folder} is not a folder of this machine")
        raise UsageError(f"the run works in {there}, which is not on this machine; say where it is with --folder")
    if run.arguments[0] != "-m" and not (there / script).is_file():
        raise UsageError(f"the run's script {script} is not in {there}; say where it is with --folder")
    os.chdir(there)
    settings = replace(run.settings, run_dir=run_dir or run.settings.run_dir)
    return replace(run, folder=os.getcwd(), settings=settings)


def _from_token_file(url: str, token_file: str) -> Invitation:
    url = str(HeadUrl.parse(url))
    try:
        token = sys.stdin.readline().strip() if token_file == "-" else read_token(token_file)
    except FileNotFoundError:
        raise UsageError(f"there is no --token-file {token_file}; it is RUN/token while the run is active") from None
    return Invitation(url, token)


def _what_begins(invitation: Invitation, run_id: str, run: RunSpec, number: int) -> list[str]:
    """Return whom this machine trusts from now on, and what runs here, as whom."""
    head = HeadUrl.parse(invitation.url)
    why = "which has proved that it is the run's head"
    if not head.is_secure and not is_local(head.host):
        why += "; but without TLS, others on the network can read the token and impersonate the head"
    what = count(number, "worker")
    arguments = ["a function"] if run.arguments[0] == "--callable" else list(run.arguments)
    return [
        f"joins run {run_id} at {head.place}, {why}",
        f"{what} here will run, as {_user()}, in {run.folder}: {shlex.join(arguments)}",
    ]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name here, as in some containers
        return f"user {os.getuid()}"


def _say_that_it_waits(error: NotGoing) -> None:
    # Process 1 of a container is not ended by a signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    say(f"unisono: {error}; waiting for it", err=True)


def spec_of(status: dict[str, Any]) -> RunSpec:
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
