"""``unisono run``: train on the workers of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from click import argument, option
from msgspec.structs import replace

from unisono import faults, tasks
from unisono.capacity import Workers, parse_workers
from unisono.cli.back import again, by_hand
from unisono.cli.given import (
    address_of,
    check_directory,
    check_text,
    directory_of_new_run,
    port_range,
    script_arguments,
    seconds,
)
from unisono.cli.part import take_part
from unisono.cli.resume import Resumed, resumed
from unisono.errors import RunGoesBack, UsageError
from unisono.invitation import HeadUrl
from unisono.secret import is_reader
from unisono.spec import MOST_AUDITED, AuditThen, Partition, RunSpec, StartMethod

if TYPE_CHECKING:
    from unisono.launchers import Launcher, Machine, Request
    from unisono.machine.headprocess import Service

__all__ = ["Options", "read", "run", "run_options", "start"]

LOOPBACK: Final = "127.0.0.1"

RESTARTS: Final = 10
PLAIN_RESTARTS: Final = 0
SHORTEST_TOKEN: Final = 20


# fmt: off
_OPTIONS: Final = (
    argument("script", required=False),
    argument("arguments", nargs=-1, type=click.UNPROCESSED),
    option("-m", "module", metavar="MODULE", help="Run a module instead of a script, as `python -m` does."),
    option("-n", "--workers", default="auto", show_default=True, metavar="N|auto|A:B", help="How many workers: N; "
           "every GPU, else every core; or at least A and at most B."),
    option("--evaluators", type=int, default=0, metavar="N", help="So many more processes of this machine compute what "
           "run.evaluate(..., wait=False) asks for, while the workers train on."),
    option("--wait-for", type=int, default=0, metavar="N", help="Begin when N workers are there: those of this machine "
           "and of machines that join. Default: the workers of this machine."),
    option("--efficiency", type=float, default=0.0, metavar="PART", help="With --workers A:B: begin with A, have more "
           "while the next one adds this part of a worker's speed, e.g. 0.7, and give back those that do not."),
    option("--threads", type=int, show_default="1", help="CPU threads of a worker. Part of the result's bits."),
    option("--run-dir", default="", metavar="DIR", help="Journal and checkpoints; wins over the script's."),
    option("--overwrite", is_flag=True, help="Replace the run that the directory holds."),
    option("--resume", default="", metavar="DIR", help="Go on with the run in DIR, or from one of its "
           "checkpoints, or from the URL of its copies, at any number of workers; without SCRIPT, with the run's own. "
           "auto: with what the run directory holds, if anything."),
    option("--resume-anyway", multiple=True, metavar="NAME", help="A part of the recipe that may differ from the "
           "checkpoint's, e.g. microbatches. It changes the bits."),
    option("--copies-to", multiple=True, metavar="URL", help="Copy each checkpoint to this place as well: a path, or a "
           "URL that fsspec knows (s3://bucket/run, sftp://host/path). Wins over the script's."),
    option("--tensorboard", is_flag=True, help="Write event files for TensorBoard into the folder tensorboard of the "
           "run's directory; elsewhere: --sink tensorboard=DIR."),
    option("--sink", "sinks", multiple=True, metavar="NAME[=ARGUMENT]", help="Give the run's events to a tool: "
           "tensorboard, mlflow, wandb, opentelemetry, logging, or MODULE:FUNCTION of your own."),
    option("--profile", default="", metavar="A:B", help="Record the steps from A up to but without B with "
           "torch.profiler on all workers: one trace for Perfetto, in the folder profile of the run's directory."),
    option("--audit", type=float, default=0.0, metavar="SHARE", help="Have a second worker compute this share of the "
           "micro-batches as well, e.g. 0.01, and find a machine that computes wrong values (with three workers or "
           "more). At most 0.5. It changes no bit."),
    option("--audit-then", type=click.Choice(["go-back", "go-on"]), default=None,
           help="What follows then: the run goes back to a checkpoint from before what may be wrong, or goes on. "
           "[default: as the script says, or go-back]"),
    option("--exchange", default="auto", show_default=True, metavar="NAME", help="How gradients meet: auto (the "
           "fastest), shared (one machine), gloo, or two-level."),
    option("--hosts", default="", metavar="A,B:2,C", help="Machines to train on, by ssh: B with 2 workers, the others "
           "with as many as they have room for. This machine takes part only if it is named (localhost)."),
    option("--hostfile", default="", metavar="FILE", help="The same, one a line: HOST, HOST:N or HOST slots=N."),
    option("--ssh", default="ssh", show_default=True, metavar="COMMAND", help="How machines are reached, with "
           "options: 'ssh -F config'."),
    option("--remote-python", default="", metavar="PATH", show_default="the path of this one", help="Python on the "
           "other machines."),
    option("--pass-env", multiple=True, metavar="NAME", help="An environment variable that the workers of --hosts get "
           "from here."),
    option("--ship", is_flag=True, help="Send the current folder, without what .gitignore names, to machines that "
           "lack it."),
    option("--ship-limit", type=float, default=100.0, show_default=True, metavar="MB", help="Most that --ship sends."),
    option("--bind", metavar="ADDRESS", show_default="127.0.0.1; with --hosts, one that these reach", help="Where the "
           "head listens; other machines need an address that they can reach."),
    option("--interface", default="", metavar="NAME", help="The network interface that the head listens on, and that "
           "workers of this machine exchange gradients over, e.g. ib0; instead of --bind."),
    option("--port", default=0, show_default="any", help="The head's port."),
    option("--ports", default="", metavar="A:B", help="The head takes the first free port of these; `unisono doctor "
           "--ports A:B` says what workers need."),
    option("--advertise", default="", metavar="HOST", help="The address or name at which other machines reach the "
           "head, where that is not the one of --bind."),
    option("--tls/--no-tls", default=None, help="Whether connections to the head are encrypted.  [default: if other "
           "machines can reach it]"),
    option("--certificate", default="", metavar="FILE", help="The head's certificate (PEM) instead of one that is "
           "made for the run."),
    option("--private-key", default="", metavar="FILE", help="The private key of --certificate (PEM, no password)."),
    option("--token-file", default="", metavar="FILE", help="The run's token, instead of one that is made for the run; "
           "for machines that must know it before."),
    option("--max-restarts", type=int, show_default="10; 0 with --plain", help="How many lost workers of a machine are "
           "replaced; with --plain, how often all processes are started again."),
    option("--plain", is_flag=True, help="The script is one for torchrun: it does not use Unisono, and reads RANK, "
           "WORLD_SIZE and the like."),
    option("--strict", is_flag=True, help="Refuse workers whose arithmetic may differ."),
    option("--allow-different-script", is_flag=True, help="Admit workers whose script has another text than the "
           "run's, with a warning. It may change the result."),
    seconds("--heartbeat-s", 0.5, "Time between a worker's heartbeats."),
    seconds("--heartbeat-timeout-s", 5.0, "Silent for this long, a worker is lost."),
    seconds("--timeout-s", 300.0, "How long one exchange may take."),
    seconds("--late-s", 3.0, "Report a worker that others wait for after this time."),
    seconds("--aside-s", 10.0, "Go on without a worker that others wait for after this time."),
    seconds("--hang-s", 60.0, "End a worker that others wait for after this time."),
    seconds("--head-away-s", 20.0, "How long machines wait for a head that is out of reach."),
    option("--partition", type=click.Choice(["wait", "majority", "go-on"]), default="go-on", show_default=True,
           help="What machines do then that hold the run's state: end; go on where they are more than half of the "
           "machines; or go on in any case (both sides compute the same bits)."),
    option("--start", type=click.Choice(["fork", "spawn"]), default="fork" if sys.platform == "linux" else "spawn",
           show_default=True, help="Workers are forked from a process that has imported torch, or come by "
           "themselves."),
    option("--launcher", default="auto", show_default=True, metavar="NAME", help="What starts the workers: auto, "
           "local (this machine), none (they join by themselves), or the batch system that the command runs in."),
    option("--simulate-hosts", default=1, hidden=True),
    option("--inspect", nargs=2, default=("", ""), hidden=True),
    option("--callable", "function", default="", hidden=True),
    option("--result", default="", hidden=True),
    option("--outcome", default="", hidden=True),
)
# fmt: on


def run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the script, its arguments, and all options of ``unisono run``: the fields of `Options`."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


@click.command()
@run_options
def run(**given: Any) -> int:
    """Train SCRIPT on the workers of this machine, or of --hosts, with the same bits at any number of them.

    What stands after -- are the script's own arguments:

        unisono run train.py --workers 4 -- --lr 0.01
    """
    return start(Options(**given))


def start(options: Options, launcher: Launcher | None = None) -> int:
    """Start the run of this command line, and block until it is over. Returns the exit code.

    Args:
        launcher: where the workers are; default: the one that the command line or the environment asks for.

    Raises:
        UsageError: something is wrong with the command line. Nothing was started.
    """
    from unisono import launchers

    if launcher is None and options.launcher == "auto":
        tasks.refuse_unknown(os.environ)
        task = tasks.here(os.environ)
        if task is not None and task.size > 1:
            options.refuse_hosts(f"{task.command} has started this command {task.size} times, which are the machines")
            try:
                return take_part(options, task, partial(read, options))
            except RunGoesBack as back:
                raise by_hand(back) from None
    if launcher is not None:
        options.refuse_hosts("the machines of this command are given otherwise")
    dropped: frozenset[str] = frozenset()
    while True:
        spec, workers = read(options)
        _refuse_used(options, spec)
        chosen = launcher if launcher is not None else launchers.choose(options.request(spec, workers))
        machines = [machine for machine in chosen.machines() if machine.name not in dropped]
        workers = _of_machines(options, spec, workers, machines)
        try:
            return _run(options, spec, workers, chosen, machines)
        except RunGoesBack as back:
            found = again(back, workers, machines)
            options, dropped = replace(options, **found.changes), dropped | found.dropped
            if faults.ENVIRONMENT in os.environ:
                os.environ[faults.ENVIRONMENT] = faults.forget_passing(os.environ[faults.ENVIRONMENT])


def _refuse_used(options: Options, spec: RunSpec) -> None:
    """Raise RunDirectoryError, where that is certain, before workers import torch and load data only to be refused."""
    from unisono.rundir import refuse_used

    if options.script and not (options.overwrite or options.resume or options.plain or options.inspect[0]):
        new = directory_of_new_run(Path(options.script), spec.run_dir)
        if new is not None:
            refuse_used(new)


def _of_machines(options: Options, spec: RunSpec, workers: Workers, machines: Sequence[Machine]) -> Workers:
    """Return how many workers the run has, where the machines say so."""
    if options.workers == "auto" and any(machine.num_workers for machine in machines):
        return parse_workers(str(sum(machine.num_workers for machine in machines)), spec.threads)
    return workers


def _run(options: Options, spec: RunSpec, workers: Workers, launcher: Launcher, machines: Sequence[Machine]) -> int:
    from unisono import launchers

    return launchers.run(
        spec,
        launcher,
        options.service(workers, launcher.bind() if isinstance(launcher, launchers.Reached) else ""),
        machines=machines,
        start=options.start,
        num_evaluators=options.evaluators,
        simulate_hosts=options.simulate_hosts,
        outcome=options.outcome,
        address=options.address,
    )


class Options(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The command line; each field is an option of `run`."""

    script: str | None
    arguments: tuple[str, ...]
    module: str | None
    workers: str
    evaluators: int
    wait_for: int
    efficiency: float
    threads: int | None
    run_dir: str
    overwrite: bool
    resume: str
    resume_anyway: tuple[str, ...]
    copies_to: tuple[str, ...]
    tensorboard: bool
    sinks: tuple[str, ...]
    profile: str
    audit: float
    audit_then: AuditThen | None
    exchange: str
    hosts: str
    hostfile: str
    ssh: str
    remote_python: str
    pass_env: tuple[str, ...]
    ship: bool
    ship_limit: float
    bind: str | None
    interface: str
    port: int
    ports: str
    advertise: str
    tls: bool | None
    certificate: str
    private_key: str
    token_file: str
    max_restarts: int | None
    plain: bool
    strict: bool
    allow_different_script: bool
    heartbeat_s: float
    heartbeat_timeout_s: float
    timeout_s: float
    late_s: float
    aside_s: float
    hang_s: float
    head_away_s: float
    partition: Partition
    start: StartMethod
    launcher: str
    simulate_hosts: int
    inspect: tuple[str, str]
    function: str
    result: str
    outcome: str

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"a worker has at least 1 thread, got --threads {self.threads}")
        if self.evaluators < 0:
            raise UsageError(f"a run has 0 or more evaluators, got --evaluators {self.evaluators}")
        if self.wait_for < 0:
            raise UsageError(f"a run waits for 0 or more workers, got --wait-for {self.wait_for}")
        if not self.heartbeat_s < self.heartbeat_timeout_s:
            raise UsageError(
                f"--heartbeat-s must be smaller than --heartbeat-timeout-s, got --heartbeat-s {self.heartbeat_s} and "
                f"--heartbeat-timeout-s {self.heartbeat_timeout_s}"
            )
        if not 0.0 <= self.audit <= MOST_AUDITED:
            raise UsageError(
                f"--audit is a share of the micro-batches from 0 to {MOST_AUDITED:g}, e.g. 0.01; got {self.audit}"
            )
        if self.plain:
            self._check_plain()
        if self.bind == "":
            raise UsageError("--bind is an address of this machine, or 0.0.0.0 for all that it has; got ''")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"a port is a number from 0 (any) to 65535, got --port {self.port}")
        if self.interface and self.bind:
            raise UsageError(
                f"--interface {self.interface} and --bind {self.bind} both name an address; give one of them"
            )
        if self.ports and self.port:
            raise UsageError(f"--port {self.port} and --ports {self.ports} both name the head's port; give one of them")
        if self.advertise and not HeadUrl.is_host(self.advertise):
            raise UsageError(f"--advertise is an address or the name of a host, without a port; got {self.advertise!r}")
        if bool(self.certificate) != bool(self.private_key):
            raise UsageError("--certificate and --private-key are given together, or neither")
        if self.certificate and self.tls is False:
            raise UsageError("--certificate is for TLS, and --no-tls turns it off; leave one of them out")
        if self.simulate_hosts < 1:
            raise UsageError(f"there is at least 1 host, got --simulate-hosts {self.simulate_hosts}")

        if self.ship_limit <= 0:
            raise UsageError(f"--ship-limit is a size in MB above 0, got {self.ship_limit}")
        if self.names_hosts and self.launcher not in ("auto", "ssh"):
            raise UsageError(f"--hosts and --hostfile are for the launcher ssh, got --launcher {self.launcher}")
        if not self.names_hosts:
            given = {"--ship": self.ship, "--remote-python": self.remote_python, "--pass-env": self.pass_env}
            for name in (name for name, value in given.items() if value):
                raise UsageError(f"{name} is for machines that --hosts or --hostfile name")

    @property
    def names_hosts(self) -> bool:
        return bool(self.hosts or self.hostfile)

    def refuse_hosts(self, why: str) -> None:
        """Raise a `UsageError` if the command line names machines; ``why`` says where they come from instead."""
        if self.names_hosts:
            raise UsageError(f"--hosts and --hostfile are for `unisono run` by itself; {why}")

    @cached_property
    def address(self) -> str:
        """The address of the interface that was named; "" where none was."""
        return address_of(self.interface) if self.interface else ""

    @property
    def bound(self) -> str:
        """The address at which the user wants the head to listen; "" where none was named."""
        return self.address or self.bind or ""

    @cached_property
    def head_ports(self) -> tuple[int, int]:
        """The first and the last port that the head may take; 0: any."""
        return port_range(self.ports) if self.ports else (self.port, self.port)

    @cached_property
    def token(self) -> str:
        """The token in the file that was named; "" where none was."""
        from unisono.cli.reach import read_token

        if not self.token_file:
            return ""
        try:
            token = read_token(self.token_file)
        except FileNotFoundError:
            raise UsageError(f"there is no --token-file {self.token_file}") from None
        if is_reader(token):
            raise UsageError(
                f"the token in --token-file {self.token_file} looks like one for watchers; use another one"
            )
        if len(token) < SHORTEST_TOKEN:
            raise UsageError(
                f"the token in --token-file {self.token_file} has {len(token)} characters; {SHORTEST_TOKEN} or more "
                "cannot be guessed: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return token

    def check_head(self) -> None:
        """Raise a `UsageError` if the head's interface, ports or token are not there: before any machine is asked."""
        _ = self.address, self.head_ports, self.token

    def _check_plain(self) -> None:
        given = {
            "--resume": self.resume,
            "--copies-to": self.copies_to,
            "--tensorboard": self.tensorboard,
            "--sink": self.sinks,
            "--profile": self.profile,
            "--overwrite": self.overwrite,
            "--strict": self.strict,
            "--efficiency": self.efficiency,
            "--audit": self.audit,
            "--evaluators": self.evaluators,
        }
        for name in (name for name, value in given.items() if value):
            raise UsageError(f"{name} is for scripts that use Unisono, and not for a plain one")
        if self.function:
            raise UsageError("--plain is for scripts; the functions that `unisono.launch` calls use Unisono")

    def _max_restarts(self) -> int:
        """Return the number of restarts; the default for a plain script is that of torchrun."""
        if self.max_restarts is not None:
            return self.max_restarts
        return PLAIN_RESTARTS if self.plain else RESTARTS

    def request(self, spec: RunSpec, workers: Workers) -> Request:
        """Return what a launcher is asked for."""
        from unisono.launchers import Remote, Request

        remote = Remote(
            hosts=self.hosts,
            hostfile=self.hostfile,
            ssh=self.ssh,
            python=self.remote_python,
            variables=self.pass_env,
            ship=self.ship,
            ship_mb=self.ship_limit,
        )
        return Request(
            workers=workers,
            threads=spec.threads,
            environment=dict(os.environ),
            launcher=self.launcher,
            takes_all=self.workers == "auto",
            spec=spec,
            bind=self.bound,
            port=self.head_ports[0],
            allow_different_script=self.allow_different_script,
            remote=remote,
        )

    def service(self, workers: Workers, bind: str) -> Service:
        """Return the settings of the head of a run that begins with so many workers.

        Args:
            bind: where it listens if the user has not said it; "": on the loopback interface.
        """
        from unisono.decisions.policy import Policy
        from unisono.machine.headprocess import Service

        policy = Policy(
            start=workers.start,
            efficiency=self.efficiency,
            most=workers.maximum,
            wait_for=self.wait_for,
            minimum=workers.minimum,
            maximum=workers.start if self.efficiency else workers.maximum,
            grows=workers.grows,
            max_restarts=self._max_restarts(),
            plain=self.plain,
            strict=self.strict,
            allow_different_script=self.allow_different_script,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            late_s=self.late_s,
            aside_s=self.aside_s,
            hang_s=self.hang_s,
            away_s=self.head_away_s,
            partition=self.partition,
        )
        return Service(
            policy=policy,
            bind=self.bound or bind or LOOPBACK,
            ports=self.head_ports,
            advertise=self.advertise.strip("[]"),
            tls=self.tls,
            certificate=self.certificate,
            private_key=self.private_key,
            token=self.token,
        )


def read(options: Options) -> tuple[RunSpec, Workers]:
    """Return the settings of the run, and the numbers of workers that the command line asks for.

    Raises:
        UsageError: something is wrong with them. Nothing was started.
    """
    try:
        check_text("the working directory", os.getcwd())
    except FileNotFoundError:
        raise UsageError("the working directory has been removed; go to another one (cd)") from None
    check_text("the run directory", options.run_dir, options.resume)
    before = Resumed(options.run_dir, "", {})
    if options.resume:
        before = resumed(options.resume, options.run_dir, overwrite=options.overwrite)
    elif options.resume_anyway:
        raise UsageError("--resume-anyway says what may differ when a run goes on; give --resume DIR as well")
    run_dir = str(Path(before.run_dir).resolve()) if before.run_dir else ""
    if run_dir:
        check_directory(Path(run_dir), resumes=bool(options.resume))
    copies = _places(options.copies_to)
    options.check_head()
    arguments = _arguments(options, before)
    threads = options.threads or (_plain_threads() if options.plain else before.threads())
    takes_all = options.workers == "auto" and options.names_hosts  # so many as the machines will say
    workers = parse_workers("1" if takes_all else options.workers, threads)
    if options.efficiency and workers.grows:
        raise UsageError("--efficiency decides between A and B workers: give --workers A:B as well")
    spec = RunSpec(
        arguments=tuple(arguments),
        threads=threads,
        run_dir=run_dir,
        overwrite=options.overwrite,
        resume=before.path,
        resume_anyway=options.resume_anyway,
        copies=copies,
        sinks=_sinks(options),
        profile=_profile(options.profile),
        inspect=options.inspect,
        audit=options.audit,
        audit_then=options.audit_then,
        exchange=options.exchange,
        timeout_s=options.timeout_s,
        heartbeat_s=options.heartbeat_s,
        head_away_s=options.head_away_s,
        ports=options.head_ports if options.ports else (0, 0),
        plain=options.plain,
        partition=options.partition,
    )
    return spec, workers


def _places(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Return the places to which checkpoints are copied.

    Raises:
        UsageError: this installation does not know how to reach one of them.
    """
    if not urls:
        return ()
    from unisono.checkpoint.copies import absolute, check

    check_text("a place for copies", *urls)
    if "" in urls:
        raise UsageError("--copies-to is a URL or a path, got ''")
    places = tuple(absolute(url) for url in urls)
    check(places)
    return places


def _sinks(options: Options) -> tuple[str, ...]:
    """Return the sinks that the workers make.

    Raises:
        UsageError: one of them is not known, or needs a package that is missing here.
    """
    texts = (*(("tensorboard",) if options.tensorboard else ()), *options.sinks)
    if texts:
        from unisono.watch import named

        check_text("a sink", *texts)
        for text in texts:
            named(text, is_here=False)
    return texts


def _profile(text: str) -> tuple[int, int]:
    """Return the steps of ``--profile``; (0, 0) where there are none.

    Raises:
        UsageError: they are not A:B.
    """
    if not text:
        return 0, 0
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise UsageError(f"steps to profile are A:B, e.g. 100:105 for the steps 100 to 104; got --profile {text}")
    return int(first), int(stop)


def _plain_threads() -> int:
    """Return the threads of a process of a plain script: as for torchrun, the environment may say so."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def _arguments(options: Options, before: Resumed) -> list[str]:
    """Return the arguments of a worker."""
    if options.function:
        return ["--callable", options.function, options.result]
    if before.path and options.script is None and options.module is None:
        return before.arguments()
    arguments = script_arguments(options.script, options.module, options.arguments)
    check_text("the script or one of its arguments", *arguments)
    return arguments
