"""Batch scripts for Slurm, as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["REQUEUE", "join_script", "run_script"]

REQUEUE: Final = ("--no-kill", "--requeue", "--open-mode=append")
"""A lost node is not the end of the job; where all is lost, Slurm starts the job anew, and its output goes on."""

_RUN: Final = """\
#!/bin/sh
# Written by unisono slurm; sbatch takes it as it is.
{directives}

# Slurm asks the job to end (time limit, preemption): the run ends at the end of its step, with a checkpoint.
asked=
trap 'asked=early' TERM

{command} &
run=$!
trap 'asked=yes; kill -TERM "$run" 2>/dev/null' TERM
# A shell's child that is not yet the run would lose the signal: it gets a second for that.
[ "$asked" != early ] || {{ sleep 1; kill -TERM "$run" 2>/dev/null; }}
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do
    wait "$run"
    code=$?
done

# The run is not finished: the job goes back into the queue, and resumes from the checkpoint, with the same bits.
if [ -n "$asked" ] && [ "$code" -ne 0 ]; then
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
"""

_JOIN: Final = """\
#!/bin/sh
# Written by unisono slurm --join; sbatch takes it as it is.
{directives}

# One agent on each node. Its workers leave the run between two steps, when Slurm asks the job to end.
export SLURM_CPU_BIND=none
exec srun --ntasks-per-node=1 --no-kill --mem=0 {command}
"""


def run_script(directives: Sequence[str], command: Sequence[str], run_dir: str) -> str:
    """Return the script of a job that trains.

    Args:
        directives: options of ``sbatch``.
        command: ``unisono run`` with its options, but for the run directory.
        run_dir: the run directory; ``%j`` in it is the number of the job.
    """
    directory = '"' + _quoted_inside(run_dir).replace("%j", "$SLURM_JOB_ID") + '"'
    front, options = command[:5], command[5:]
    words = [*map(shlex.quote, front), "--run-dir", directory, "--resume", "auto", *map(shlex.quote, options)]
    return _RUN.format(directives=_directives(directives), command=" ".join(words))


def join_script(directives: Sequence[str], command: Sequence[str]) -> str:
    """Return the script of a job whose agents join a run that is going.

    Args:
        command: ``unisono join RUN`` with its options.
    """
    return _JOIN.format(directives=_directives(directives), command=shlex.join(command))


def options(given: Mapping[str, str | int | None]) -> list[str]:
    """Return options of ``sbatch`` of those that are given."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value not in (None, "")]


def _directives(words: Sequence[str]) -> str:
    return "\n".join(f"#SBATCH {word if ' ' not in word else _spaced(word)}" for word in words)


def _spaced(word: str) -> str:
    name, _, value = word.partition("=")
    return f'{name}="{value}"'


def _quoted_inside(text: str) -> str:
    """Return a text that means itself between double quotes in a shell."""
    for special in ("\\", '"', "$", "`"):
        text = text.replace(special, "\\" + special)
    return text
