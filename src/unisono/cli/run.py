"""``unisono run``: train on the workers of this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.given import check_directory, check_text, script_arguments, seconds
from unisono.cli.resume import Resumed, resumed
from unisono.cli.workers import Workers, check_open_files, check_workers, parse_workers
from unisono.errors import UsageError
from unisono.spec import RunSpec, StartMethod

if TYPE_CHECKING:
    from unisono.decisions.membership import Policy
    from unisono.machine.headprocess import Service

__all__ = ["Options", "read", "run"]


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": True})
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Run a module instead of a script, as `python -m` does.")
@click.option("-n", "--workers", default="auto", show_default=True, metavar="N|auto|A:B", help="How many workers: N; "
              "every GPU, else every core; or at least A and at most B.")  # fmt: skip
@click.option("--threads", type=int, show_default="1", help="CPU threads of a worker. Part of the result's bits.")
@click.option("--run-dir", default="", metavar="DIR", help="Journal and checkpoints; wins over the script's.")
@click.option("--overwrite", is_flag=True, help="Replace the run that the directory holds.")
@click.option("--resume", default="", metavar="DIR", help="Go on with the run in DIR, or from one of its "
              "checkpoints, at any number of workers; without SCRIPT, with the run's own.")  # fmt: skip
@click.option("--resume-anyway", multiple=True, metavar="NAME", help="A part of the recipe that may differ from the "
              "checkpoint's, e.g. microbatches. It changes the bits.")  # fmt: skip
@click.option("--exchange", default="auto", show_default=True, metavar="NAME", help="How gradients meet: auto (the "
              "fastest), shared (one machine), gloo, or two-level.")  # fmt: skip
@click.option("--bind", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where the head listens; other "
              "machines need one that they can reach.")  # fmt: skip
@click.option("--port", default=0, show_default="any", help="The head's port.")
@click.option("--max-restarts", default=10, show_default=True, help="How many lost workers of a machine are replaced.")
@click.option("--strict", is_flag=True, help="Refuse workers whose arithmetic may differ.")
@click.option("--allow-different-script", is_flag=True, help="Admit workers whose script has another text than the "
              "run's, with a warning. It may change the result.")  # fmt: skip
@seconds("--heartbeat-s", 0.5, "Time between a worker's heartbeats.")
@seconds("--heartbeat-timeout-s", 5.0, "Silent for this long, a worker is lost.")
@seconds("--timeout-s", 300.0, "How long one exchange may take.")
@seconds("--late-s", 3.0, "Report a worker that others wait for after this time.")
@seconds("--aside-s", 10.0, "Go on without a worker that others wait for after this time.")
@seconds("--hang-s", 60.0, "End a worker that others wait for after this time.")
@seconds("--head-away-s", 60.0, "How long workers go on without the head.")
@click.option("--start", type=click.Choice(["fork", "spawn"]), default="fork" if sys.platform == "linux" else "spawn",
              show_default=True, help="Workers are forked from a process that has imported torch, or come by "
              "themselves.")  # fmt: skip
@click.option("--simulate-hosts", default=1, hidden=True)
@click.option("--callable", "function", default="", hidden=True)
@click.option("--result", default="", hidden=True)
@click.option("--outcome", default="", hidden=True)
def run(**given: Any) -> int:
    """Train SCRIPT on the workers of this machine, with the same bits at any number of them.

    What stands after -- are the script's own arguments:

        unisono run train.py --workers 4 -- --lr 0.01
    """
    from unisono import launchers

    options = Options(**given)
    spec, num_workers, service = read(options)
    return launchers.run(
        spec,
        launchers.LAUNCHERS["local"](num_workers),
        service,
        start=options.start,
        simulate_hosts=options.simulate_hosts,
        outcome=options.outcome,
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line; each field is an option of `run`."""

    script: str | None
    arguments: tuple[str, ...]
    module: str | None
    workers: str
    threads: int | None
    run_dir: str
    overwrite: bool
    resume: str
    resume_anyway: tuple[str, ...]
    exchange: str
    bind: str
    port: int
    max_restarts: int
    strict: bool
    allow_different_script: bool
    heartbeat_s: float
    heartbeat_timeout_s: float
    timeout_s: float
    late_s: float
    aside_s: float
    hang_s: float
    head_away_s: float
    start: StartMethod
    simulate_hosts: int
    function: str
    result: str
    outcome: str

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"a worker has at least 1 thread, got --threads {self.threads}")
        if not self.heartbeat_s < self.heartbeat_timeout_s:
            raise UsageError(
                f"--heartbeat-s must be smaller than --heartbeat-timeout-s, got --heartbeat-s {self.heartbeat_s} and "
                f"--heartbeat-timeout-s {self.heartbeat_timeout_s}"
            )
        if not self.bind:
            raise UsageError("--bind is an address of this machine, or 0.0.0.0 for all that it has; got ''")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"a port is a number from 0 (any) to 65535, got --port {self.port}")
        if self.simulate_hosts < 1:
            raise UsageError(f"there is at least 1 host, got --simulate-hosts {self.simulate_hosts}")


def read(options: Options) -> tuple[RunSpec, int, Service]:
    """Return the settings of the run, the number of workers of this machine, and the settings of the head.

    Raises:
        UsageError: something is wrong with them. Nothing was started.
    """
    from unisono.machine.headprocess import Service

    try:
        check_text("the working directory", os.getcwd())
    except FileNotFoundError:
        raise UsageError("the working directory has been removed; go to another one (cd)") from None
    check_text("the run directory", options.run_dir, options.resume)
    before = Resumed(options.run_dir, "", {})
    if options.resume:
        before = resumed(Path(options.resume), options.run_dir, overwrite=options.overwrite)
    elif options.resume_anyway:
        raise UsageError("--resume-anyway says what may differ when a run goes on; give --resume DIR as well")
    run_dir = str(Path(before.run_dir).resolve()) if before.run_dir else ""
    if run_dir:
        check_directory(Path(run_dir))
    arguments = _arguments(options, before)
    threads = options.threads or before.threads()
    workers = parse_workers(options.workers, threads)
    num_workers = workers.on_this_machine(threads)
    check_workers(num_workers)
    check_open_files(num_workers)
    spec = RunSpec(
        arguments=tuple(arguments),
        threads=threads,
        run_dir=run_dir,
        overwrite=options.overwrite,
        resume=before.path,
        resume_anyway=options.resume_anyway,
        exchange=options.exchange,
        timeout_s=options.timeout_s,
        heartbeat_s=options.heartbeat_s,
        head_away_s=options.head_away_s,
    )
    return spec, num_workers, Service(policy=_policy(options, workers), bind=options.bind, port=options.port)


def _arguments(options: Options, before: Resumed) -> list[str]:
    """Return the arguments of a worker."""
    if options.function:
        return ["--callable", options.function, options.result]
    if before.path and options.script is None and options.module is None:
        return before.arguments()
    arguments = script_arguments(options.script, options.module, options.arguments)
    check_text("the script or one of its arguments", *arguments)
    return arguments


def _policy(options: Options, workers: Workers) -> Policy:
    from unisono.decisions.membership import Policy

    return Policy(
        start=workers.start,
        minimum=workers.minimum,
        maximum=workers.maximum,
        grows=workers.grows,
        max_restarts=options.max_restarts,
        strict=options.strict,
        allow_different_script=options.allow_different_script,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        late_s=options.late_s,
        aside_s=options.aside_s,
        hang_s=options.hang_s,
        away_s=options.head_away_s,
    )
