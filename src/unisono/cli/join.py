"""``unisono join``: add this machine's workers to a run that is going."""

from __future__ import annotations

import os
from pathlib import Path

import click

from unisono.cli.given import check_open_files, check_text, check_workers, seconds
from unisono.errors import UsageError

__all__ = ["join"]


@click.command()
@click.argument("url")
@click.option("--token-file", required=True, metavar="FILE", help="The run's token (RUN/token on the head's machine).")
@click.option("-n", "--workers", default="auto", show_default=True, metavar="N|auto", help="How many workers.")
@click.option("--folder", default="", metavar="DIR", help="Where the script is here, if not at the same place.")
@click.option("--run-dir", default="", metavar="DIR", help="The run directory here, if not at the same place.")
@seconds("--head-away-s", 60.0, "How long workers go on without the head.")
@click.option("--simulate-hosts", default=1, hidden=True)
def join(
    url: str, token_file: str, workers: str, folder: str, run_dir: str, head_away_s: float, simulate_hosts: int
) -> int:
    """Add this machine's workers to the run at URL (ws://HOST:PORT, in RUN/head.json).

    They run the script that the run was started with. Ctrl-C takes them away again, at the end of the step.
    """
    from unisono.cli.reach import Address, ask_status, read_token
    from unisono.cli.run import parse_workers
    from unisono.machine import agent

    if not url.startswith("ws://"):
        raise UsageError(f"the address of a run is ws://HOST:PORT (url in RUN/head.json), got {url!r}")
    try:
        token = read_token(token_file)
    except FileNotFoundError:
        raise UsageError(f"there is no --token-file {token_file}; it is RUN/token while the run is going") from None
    found = ask_status(Address(url, token))
    known = found["job"]
    if ":" in workers:
        raise UsageError(f"--workers of a join is a number or 'auto', got {workers!r}")
    number = parse_workers(workers, known["threads"])[0]
    check_workers(number)
    check_open_files(number)
    check_text("--folder", folder)
    check_text("--run-dir", run_dir)
    place = Path(folder or known["folder"])
    arguments: list[str] = known["arguments"]
    script = Path(arguments[1] if arguments[0] == "--callable" else arguments[0])
    if not place.is_dir():
        raise UsageError(f"the run works in {place}, which is not on this machine; say where with --folder")
    if arguments[0] != "-m" and not (place / script).is_file():
        raise UsageError(f"the run's script {script} is not in {place}; say where it is with --folder")
    os.chdir(place)
    job = agent.Job(
        arguments=arguments,
        num_workers=number,
        threads=known["threads"],
        run_dir=run_dir or known["run_dir"],
        overwrite=known["overwrite"],
        resume=known["resume"],
        resume_anyway=tuple(known["resume_anyway"]),
        simulate_hosts=simulate_hosts,
        head_away_s=head_away_s,
    )
    return agent.join(job, url, token)
