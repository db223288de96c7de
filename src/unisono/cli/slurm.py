"""``unisono slurm``: write a batch script for Slurm, submit it, and follow the job."""

from __future__ import annotations

import codecs
import math
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from unisono.cli.given import check_text, script_arguments, seconds
from unisono.cluster.launchers.sbatch import REQUEUE, join_script, options, run_script
from unisono.core.errors import UsageError
from unisono.system.lifetime import run_bound

__all__ = ["OVER", "job_facts", "slurm", "state_words"]

LOOK_S: Final = 1.0
SLURM_S: Final = 60.0
WAIT: Final = "2m"
"""For the head of the run that nodes join, which may be starting."""
MAX_SILENCE_S: Final = 300.0
"""For a controller of Slurm that is away."""
GOES_ON: Final = {"BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"}
"""States of a job that has ended, and not by itself: the same job can be queued again."""
OVER: Final = GOES_ON | {"CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "REVOKED"}
"""All states in which Slurm does nothing more with a job (``enum job_states`` of slurm.h)."""


@click.command()
@click.argument("script", required=False, type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Run a module instead of a script, as `python -m` does.")
@click.option("-N", "--nodes", metavar="N|A-B", default="1", show_default=True, help="Number of nodes.")
@click.option("-t", "--time", "time_limit", metavar="D-H:M:S", help=(
    "Time limit; what is not finished by then continues in another turn of the same job."
))  # fmt: skip
@click.option("-p", "--partition", metavar="NAME", help="Partition (queue).")
@click.option("-A", "--account", metavar="NAME", help="Account to charge.")
@click.option("-q", "--qos", metavar="NAME", help="Quality of service.")
@click.option("--gpus-per-node", metavar="N", help="GPUs of each node; one worker for each.")
@click.option("--cpus-per-node", type=click.IntRange(min=1), help=(
    "Cores of each node. Default: whole nodes (--exclusive), or the cores that come with the GPUs."
))  # fmt: skip
@click.option("--mem", metavar="SIZE", help="Memory of each node.")
@click.option("-a", "--array", metavar="LIST", help=(
    "Submit several jobs: each a run of its own or, with --join, all in the same run."
))  # fmt: skip
@click.option("-J", "--job-name", default="", metavar="NAME", help="Default: the script's name.")
@click.option("-o", "--output", default="", metavar="FILE", help="Default: NAME-JOB.out.")
@click.option("--sbatch", "others", multiple=True, metavar="OPTION", help="Any other option of sbatch, e.g. "
              "--sbatch=--constraint=a100; may be repeated.")  # fmt: skip
@seconds("--warn", "90s", (
    "How long before its time limit the job writes a checkpoint and goes back into the queue: at least the time of "
    "a step and a checkpoint."
))  # fmt: skip
@click.option("-n", "--workers", default="auto", show_default=True, metavar="N|auto|A:B", help=(
    "How many workers on all nodes together: N; auto, one for each GPU, or else each core; or at least A and at "
    "most B."
))  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of a worker. Affects the result's bits.")
@click.option("--run-dir", default="", metavar="DIR", help=(
    "Directory for the journal and checkpoints; %j is the job number. Default: runs/NAME-%j."
))  # fmt: skip
@click.option("--run", "run_options", multiple=True, metavar="OPTION", help="Any other option of unisono run (with "
              "--join, of unisono join), e.g. --run=--strict; may be repeated.")  # fmt: skip
@click.option("--join", "going", default="", metavar="RUN", help=(
    "Have the nodes join the active run in the directory RUN instead; without SCRIPT."
))  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the batch script without submitting it.")
@click.option("--detach", is_flag=True, help="Submit the job and print its number, without following it.")
def slurm(dry_run: bool, detach: bool, **given: Any) -> int:
    """Train SCRIPT in a Slurm job. Whatever follows -- is passed to the script:

        unisono slurm train.py --nodes 4 --time 2:00:00 -- --lr 0.01

    The job's output is shown until it is over; Ctrl-C stops showing it and leaves the job running. At its time limit,
    or when it is preempted, the run writes a checkpoint and resumes in the job's next turn with the same bits
    (unisono.Checkpoints in the script sets how often checkpoints are written).
    """
    name, text = _script(**given)
    if dry_run:
        click.echo(text, nl=False)
        return 0
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch here: log in where Slurm jobs are submitted (--dry-run prints the job)")
    job = _submit(text)
    is_array = bool(given["array"])
    if detach or is_array:
        click.echo(job)
        click.echo(f"unisono: {name} is job {job}; state: squeue -j {job}; to end it: scancel {job}", err=True)
        return 0
    return _Following(job, (given["run_dir"] or f"runs/{name}-%j").replace("%j", job)).follow()


def _script(
    *,
    script: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    nodes: str,
    time_limit: str | None,
    gpus_per_node: str | None,
    cpus_per_node: int | None,
    array: str | None,
    job_name: str,
    output: str,
    others: tuple[str, ...],
    warn: float,
    workers: str,
    threads: int | None,
    run_dir: str,
    run_options: tuple[str, ...],
    going: str,
    **wishes: str | None,
) -> tuple[str, str]:
    """Return the name of the job and its script.

    Raises:
        UsageError: there is no such script, or an option does not fit.
    """
    check_text("one of the options", *others, *run_options, run_dir, output, job_name)
    if not re.fullmatch(r"\d+(-\d+)?", nodes):
        raise UsageError(f"--nodes must be a number, or A-B; got {nodes!r}")
    for option in others:
        if not option.startswith("-"):
            raise UsageError(f"--sbatch takes an option of sbatch verbatim, --sbatch=--{option}; got {option!r}")
    unisono = (sys.executable, "-P", "-m", "unisono")
    own = ["--workers", workers] * (workers != "auto") + ["--threads", str(threads)] * (threads is not None)
    if going:
        if script or module:
            raise UsageError("unisono slurm --join RUN runs the run's own script; give no other")
        name = job_name or f"join-{Path(going).resolve().name}"
        if threads is not None:
            raise UsageError("unisono slurm --join RUN takes the run's number of threads; leave out --threads")
        place = str(Path(going).resolve())
        command = [*unisono, "join", place, "--run-dir", place, "--wait", WAIT, *own, *run_options]
    else:
        words = script_arguments(script, module, arguments)
        name = job_name or (module or Path(words[0]).stem)
        front = ["-m", words[1]] if module else [words[0]]
        rest = words[2:] if module else words[1:]
        command = [*unisono, "run", *own, *run_options, *front, *(["--", *rest] if rest else [])]
    if cpus_per_node:
        cores = [f"--cpus-per-task={cpus_per_node}"]
    else:
        cores = [] if gpus_per_node else ["--exclusive"]
    log = output or (f"{name}-%A_%a.out" if array else f"{name}-%j.out")
    directives = [
        *options({"job_name": name, "nodes": nodes, "time": time_limit, **wishes, "gpus_per_node": gpus_per_node}),
        "--ntasks-per-node=1",
        *cores,
        *options({"array": array, "output": log}),
    ]
    if going:
        return name, join_script(
            [*directives, "--no-kill", "--no-requeue", f"--signal=TERM@{math.ceil(warn)}", *others], command
        )
    directives += [*REQUEUE, f"--signal=B:TERM@{math.ceil(warn)}", *others]
    return name, run_script(directives, command, run_dir or f"runs/{name}-%j")


def _submit(text: str) -> str:
    """Submit a job; return its number.

    Raises:
        UsageError: Slurm refuses the job; says why.
    """
    done = run_bound(["sbatch", "--parsable"], SLURM_S, given=text.encode())
    if done.code is None:
        raise UsageError(f"sbatch has not answered within {SLURM_S:.0f} s; see sinfo and squeue")
    if done.code:
        raise UsageError(f"Slurm rejects the job: {done.errors.strip().removeprefix('sbatch: error: ')}")
    return done.output.strip().partition(";")[0]


class _Following:
    """Shows the state and the output of a job until it is over."""

    def __init__(self, job: str, run_dir: str) -> None:
        self._job = job
        self._run_dir = run_dir
        self._shown = ""
        self._output = Path()
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a block may end within a character

    def follow(self) -> int:
        """Return the exit code of the job. Ctrl-C leaves the job to itself, with exit code 130."""
        try:
            while True:
                facts = self._facts()
                state = facts["JobState"]
                self._output = Path(facts.get("StdOut", "/dev/null"))
                self._show(state_words(self._job, facts))
                self._copy()
                if state in OVER:
                    return _exit_code(facts)
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            click.echo(
                f"\nunisono: job {self._job} continues; its output: tail -f {self._output}; to end it with a "
                f"checkpoint: unisono stop {shlex.quote(self._run_dir)}; to end it at once: scancel {self._job}",
                err=True,
            )
            return 130

    def _facts(self) -> dict[str, str]:
        """Return what Slurm says of the job, by name.

        Raises:
            UsageError: Slurm says nothing for a long time.
        """
        deadline = time.monotonic() + MAX_SILENCE_S
        why = ""
        while time.monotonic() < deadline:
            done = run_bound(["scontrol", "show", "job", self._job], SLURM_S)
            if done.code == 0 and "JobState" in (facts := job_facts(done.output)):
                return facts
            why = "no answer" if done.code is None else done.errors.strip()
            time.sleep(LOOK_S)
        raise UsageError(f"Slurm says nothing about job {self._job} any more ({why}); see squeue -j {self._job}")

    def _show(self, words: str) -> None:
        if words != self._shown:
            self._shown = words
            click.echo(f"unisono: {words}", err=True)

    def _copy(self) -> None:
        """Show what the job has printed since the last call."""
        try:
            with self._output.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:  # not there yet
            return
        self._position += len(data)
        click.echo(self._decoder.decode(data), nl=False)


def job_facts(text: str) -> dict[str, str]:
    """Return what ``scontrol show job`` says, by name. A line that has one path may have blanks in it."""
    return dict(re.findall(r"(\w+)=(\S*)", text)) | dict(re.findall(r"^ *(StdOut)=(.*?) *$", text, re.MULTILINE))


def state_words(job: str, facts: dict[str, str]) -> str:
    state = facts["JobState"]
    turns = int(facts.get("Restarts", "0") or 0)
    again = f", turn {turns + 1}" if turns else ""
    match state:
        case "PENDING":
            reason = facts.get("Reason", "None")  # "None" until Slurm has looked at the job
            return f"job {job} waits in the queue{'' if reason == 'None' else f' ({reason})'}{again}"
        case "RUNNING" | "CONFIGURING":
            return f"job {job} runs on {facts.get('NodeList', '')}{again}"
        case _:
            after = f"; to resume from its newest checkpoint: scontrol requeue {job}" if state in GOES_ON else ""
            return f"job {job} is {state.lower()}{again}{after}"


def _exit_code(facts: dict[str, str]) -> int:
    code, _, number = facts.get("ExitCode", "1:0").partition(":")
    if facts["JobState"] == "COMPLETED":
        return 0
    return int(code) or (128 + int(number) if number not in ("", "0") else 1)
