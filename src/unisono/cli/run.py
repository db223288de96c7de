"""``unisono run``: train on the workers of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.given import check_open_files, check_text, check_workers, seconds
from unisono.errors import UsageError
from unisono.spec import RunSpec, StartMethod

if TYPE_CHECKING:
    from unisono.machine.headprocess import Service

__all__ = ["Options", "count_workers", "parse_workers", "render", "run", "script_arguments"]


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
    spec, num_workers, service = render(options)
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
    """What the command line said; each field is an option of `run`."""

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
                f"heartbeats come more often than they time out, got --heartbeat-s {self.heartbeat_s} and "
                f"--heartbeat-timeout-s {self.heartbeat_timeout_s}"
            )
        if not self.bind:
            raise UsageError("--bind is an address of this machine, or 0.0.0.0 for all that it has; got ''")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"a port is a number from 0 (any) to 65535, got --port {self.port}")
        if self.simulate_hosts < 1:
            raise UsageError(f"there is at least 1 host, got --simulate-hosts {self.simulate_hosts}")


def render(options: Options) -> tuple[RunSpec, int, Service]:
    """Return the settings of the run, the number of workers, and those of the head; checked before anything starts."""
    from unisono.decisions.membership import Policy
    from unisono.machine.headprocess import Service

    try:
        check_text("the working directory", os.getcwd())
    except FileNotFoundError:
        raise UsageError("the working directory has been removed; go to another one (cd)") from None
    check_text("the run directory", options.run_dir, options.resume)
    run_dir, resume, facts = options.run_dir, options.resume, dict[str, Any]()
    if resume:
        run_dir, resume, facts = _resumed(Path(resume), run_dir, overwrite=options.overwrite)
    elif options.resume_anyway:
        raise UsageError("--resume-anyway says what may differ when a run goes on; give --resume DIR as well")
    if run_dir:
        run_dir = str(Path(run_dir).resolve())
        _check_directory(Path(run_dir))
    if options.function:
        command = ["--callable", options.function, options.result]
    elif resume and options.script is None and options.module is None:
        command = _recorded(Path(resume), facts)
    else:
        command = script_arguments(options.script, options.module, options.arguments)
        check_text("the script or one of its arguments", *command)
    threads = options.threads or _recorded_threads(facts)
    first, minimum, maximum, grows = parse_workers(options.workers, threads)
    num_workers = first if grows else min(maximum, max(first, count_workers(threads)))
    check_workers(num_workers)
    check_open_files(num_workers)
    policy = Policy(
        start=first,
        minimum=minimum,
        maximum=maximum,
        grows=grows,
        max_restarts=options.max_restarts,
        strict=options.strict,
        allow_different_script=options.allow_different_script,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        late_s=options.late_s,
        aside_s=options.aside_s,
        hang_s=options.hang_s,
        away_s=options.head_away_s,
    )
    spec = RunSpec(
        arguments=tuple(command),
        threads=threads,
        run_dir=run_dir,
        overwrite=options.overwrite,
        resume=resume,
        resume_anyway=options.resume_anyway,
        exchange=options.exchange,
        timeout_s=options.timeout_s,
        heartbeat_s=options.heartbeat_s,
        head_away_s=options.head_away_s,
    )
    return spec, num_workers, Service(policy=policy, bind=options.bind, port=options.port)


def script_arguments(script: str | None, module: str | None, arguments: tuple[str, ...]) -> list[str]:
    """What a worker is to run, checked before anything is started."""
    if module:
        rest = [script, *arguments] if script else list(arguments)
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            raise UsageError(f"there is no module {module!r} to run; the working directory is {os.getcwd()}")
        return ["-m", module, *rest]
    if script is None:
        raise UsageError("which script? unisono run SCRIPT [--workers N] [-- ARGUMENTS]")
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory; give the script in it")
    if not path.is_file():
        raise UsageError(f"there is no script {script} (looked in {os.getcwd()})")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {script} cannot be read; check its permissions")
    return [script, *arguments]


def parse_workers(text: str, threads: int) -> tuple[int, int, int, bool]:
    """Start, minimum, maximum, and whether machines that join raise the maximum."""
    wrong = UsageError(f"--workers is a number from 1, 'auto', or A:B with 1 <= A <= B, got {text!r}")
    if text == "auto":
        number = count_workers(threads)
        return number, 1, number, True
    first, colon, last = text.partition(":")
    try:
        low, high = int(first), int(last if colon else first)
    except ValueError:
        raise wrong from None
    if not 1 <= low <= high:
        raise wrong
    return (low, low, high, False) if colon else (low, 1, low, True)


def count_workers(threads: int) -> int:
    """As many workers as this machine is good for: every GPU, else every core, without importing torch."""
    gpus = _count_gpus()
    if gpus:
        return gpus
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def _count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return len(list(folder.iterdir()))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _resumed(path: Path, run_dir: str, *, overwrite: bool) -> tuple[str, str, dict[str, Any]]:
    """The run's directory, what to go on from, and what the run says of itself, that ``--resume`` means."""
    from unisono.checkpoint.files import FOLDER
    from unisono.journal import JOURNAL
    from unisono.rundir import RUN_FILE, read_facts

    if overwrite:
        raise UsageError("--resume goes on with a run, --overwrite removes it; give one of them")
    if not path.is_dir():
        raise UsageError(f"--resume {path}: there is no such directory")
    inside = path.parent.name == FOLDER
    own = path.parent.parent if inside else path
    if not inside and not run_dir and not any((own / name).exists() for name in (RUN_FILE, JOURNAL, FOLDER)):
        raise UsageError(f"--resume {path}: that directory holds no run")
    return run_dir or str(own), str(path.resolve()), read_facts(own)


def _recorded(resume: Path, facts: dict[str, Any]) -> list[str]:
    """What the run was started with. Goes to the folder where that was."""
    wanted = "give the script: unisono run --resume DIR SCRIPT [-- ARGUMENTS]"
    match facts.get("command"):
        case {"folder": str(folder), "arguments": [str(), *_] as arguments} if all(
            isinstance(word, str) for word in arguments
        ) and arguments != ["-m"]:
            pass
        case _:
            raise UsageError(f"{resume} does not say which script it was made with; {wanted}")
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(f"the run began in {folder}, which cannot be used ({error.strerror}); {wanted}") from None
    is_module = arguments[0] == "-m"
    script, module = (None, arguments[1]) if is_module else (arguments[0], None)
    command = script_arguments(script, module, tuple(arguments[2 if is_module else 1 :]))
    click.echo(f"unisono: goes on with {shlex.join(command)} in {folder}", err=True)
    return command


def _recorded_threads(facts: dict[str, Any]) -> int:
    match facts.get("recipe"):
        case {"threads": int(threads)} if threads >= 1:
            return threads
    return 1


def _check_directory(folder: Path) -> None:
    """The run directory can be written, and no run is going in it."""
    from unisono.rundir import ADDRESS_FILE, going

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--run-dir {folder} is not a directory")
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise UsageError(f"--run-dir {folder} cannot be made: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"--run-dir {folder} cannot be written: no permission in {existing}")
    try:
        pid = int(json.loads((folder / ADDRESS_FILE).read_text())["pid"])
        os.kill(pid, 0)
        is_head = b"unisono.head" in Path(f"/proc/{pid}/cmdline").read_bytes() if Path("/proc/self").exists() else True
    except (OSError, ValueError, KeyError, TypeError):
        return
    if is_head:
        raise UsageError(going(folder, f"its head is pid {pid}"))
