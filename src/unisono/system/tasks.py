"""Task: what ``srun`` or ``mpiexec`` tells a process about its place in a job of several processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import select
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TextIO

import msgspec

from unisono.core.errors import UsageError

__all__ = [
    "FIRST_SPECIAL_STEP",
    "TAKEN",
    "Engine",
    "Task",
    "counts",
    "here",
    "is_for_person",
    "refuse_others",
    "refuse_unknown",
]

Engine = Literal["Slurm", "Open MPI", "MPICH"]

FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
"""Slurm numbers the steps of ``srun`` from 0; batch scripts and interactive shells have a number from here on."""
_UNKNOWN: Final = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "Flux"),
    ("PALS_RANKID", "PMI_SIZE", "Cray PALS"),
    ("PMI_RANK", "PMI_SIZE", "a process manager of MPI"),
)
"""Variables with a task's number and with the number of tasks, and who sets them."""
TAKEN: Final = "UNISONO_TASK"
"""Set where the task is a run's already: a run that a script starts in a worker is a run of its own."""
PMI_TIMEOUT_S: Final = 10.0
MAX_PMI_LINE: Final = 4096


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes that ``srun`` or ``mpiexec`` has started together."""

    engine: Engine
    rank: int
    size: int
    local_rank: int = 0
    """Position among the tasks of its machine."""
    local_size: int = 1
    """Number of tasks of its machine."""
    job: str = ""
    """Equal for all tasks of one start of the job, and for no others; "" where the engine does not say."""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all tasks are on this machine."""
        return self.local_size == self.size

    @property
    def ends_with_a_task(self) -> bool:
        """Whether the engine ends all tasks where one is lost."""
        return self.engine != "Slurm"

    @property
    def command(self) -> str:
        """What has started the tasks."""
        return "srun" if self.engine == "Slurm" else "mpiexec"


def here(environment: Mapping[str, str]) -> Task | None:
    """Return this process's task; None where it was started by itself, as a batch script or a shell is.

    The tasks of ``mpiexec`` come first: under Slurm ``mpiexec`` itself uses ``srun``, whose variables they inherit.
    """
    if TAKEN in environment:
        return None
    try:
        return _open_mpi(environment) or _hydra(environment) or _slurm(environment)
    except ValueError:  # the variables are not what they should be: another program's
        return None


def is_for_person(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether a stream is a terminal that a person looks at.

    Open MPI gives task 0 a pseudo-terminal, whose other end is the output file of the job. ``srun`` gives a task one
    only where a person asks for it (``srun --pty bash``).
    """
    is_task = TAKEN in environment or "OMPI_COMM_WORLD_RANK" in environment or "MPI_LOCALRANKID" in environment
    return not is_task and stream.isatty()


def refuse_others(environment: Mapping[str, str]) -> None:
    """Refuse to run alone in one of several processes that a starter has started whose tasks are not known by `here`.

    Each of them would train alone.

    Raises:
        UsageError: there are several.
    """
    refuse_unknown(environment)
    size = environment.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in environment and size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"this script uses unisono.Run, and was started by torchrun: its {size} processes would "
            f"train the same thing {size} times. Start it with unisono run SCRIPT --workers {size}"
        )


def refuse_unknown(environment: Mapping[str, str]) -> None:
    """Refuse to go on in one of several tasks of a starter of MPI programs whose variables `here` does not understand.

    Raises:
        UsageError: there are several, as far as they say.
    """
    if TAKEN in environment or here(environment) is not None:
        return
    for rank, size, starter in _UNKNOWN:
        number = environment.get(size, "")
        if environment.get(rank, "").isdecimal() and number != "1":
            raise UsageError(
                f"{starter} has started this process as task {environment[rank]} of {number or 'several'} ({rank}), "
                "but Unisono does not know how its tasks find each other: each would train alone. Start `unisono run` "
                f"once, and `unisono join` in the other tasks; or take {rank} out of the environment if this process "
                "is meant to be alone"
            )


def counts(text: str) -> list[int]:
    """Return the numbers of ``2(x3),1``, as Slurm writes a number for each node: 2, 2, 2, 1.

    Raises:
        ValueError: it is no such text.
    """
    numbers: list[int] = []
    for part in text.split(","):
        number, _, times = part.removesuffix(")").partition("(x")
        numbers += [int(number)] * int(times or 1)
    return numbers


def _open_mpi(given: Mapping[str, str]) -> Task | None:
    if "OMPI_COMM_WORLD_RANK" not in given:
        return None
    names = ("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return Task(
        engine="Open MPI",
        rank=int(given["OMPI_COMM_WORLD_RANK"]),
        size=int(given["OMPI_COMM_WORLD_SIZE"]),
        local_rank=int(given.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")),
        local_size=int(given.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")),
        job=_digest(given.get(name, "") for name in names),
    )


def _hydra(given: Mapping[str, str]) -> Task | None:
    """Return a task of the process manager of MPICH and Intel MPI. (Slurm sets some of its variables as well.)"""
    if "PMI_RANK" not in given or "MPI_LOCALRANKID" not in given:
        return None
    return Task(
        engine="MPICH",
        rank=int(given["PMI_RANK"]),
        size=int(given["PMI_SIZE"]),
        local_rank=int(given["MPI_LOCALRANKID"]),
        local_size=int(given.get("MPI_LOCALNRANKS", "1")),
        job=_digest([_key_value_space(int(given["PMI_FD"])) if "PMI_FD" in given else ""]),
    )


def _slurm(given: Mapping[str, str]) -> Task | None:
    step = given.get("SLURM_STEP_ID", given.get("SLURM_STEPID", ""))
    if not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP or "SLURM_PROCID" not in given:
        return None
    node = int(given.get("SLURM_NODEID", "0"))
    per_node = counts(given.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    # The number of a job stays the same when the job is queued again; an array's elements have numbers of their own.
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT")
    return Task(
        engine="Slurm",
        rank=int(given["SLURM_PROCID"]),
        size=int(given.get("SLURM_STEP_NUM_TASKS", given.get("SLURM_NTASKS", "1"))),
        local_rank=int(given.get("SLURM_LOCALID", "0")),
        local_size=per_node[node] if node < len(per_node) else 1,
        job=_digest([step, *(given.get(name, "") for name in names)]),
    )


def _digest(marks: Iterable[str]) -> str:
    """Return a name for a job, fit for a file; "" where no mark is known."""
    known = [mark for mark in marks if mark]
    return hashlib.sha256("\0".join(known).encode()).hexdigest()[:16] if known else ""


@functools.cache  # the manager answers only once
def _key_value_space(descriptor: int) -> str:
    """Return the name of the job's key-value space, the only mark by which MPICH's jobs differ; "" if it is not told.

    Speaks the process manager's protocol (PMI 1: lines of text) for this one question, and takes its leave: what
    happens to the process afterwards is seen by the manager as for any program without MPI.
    """
    with contextlib.suppress(OSError, ValueError):
        for question in ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=get_my_kvsname", "cmd=finalize"):
            os.write(descriptor, f"{question}\n".encode())
            answer = _line(descriptor)
            if question == "cmd=get_my_kvsname":
                name = answer.partition("kvsname=")[2].split(" ")[0]
        return name
    return ""


def _line(descriptor: int) -> str:
    """Return one line. Raises OSError: there is none within `PMI_TIMEOUT_S`."""
    line = bytearray()
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], PMI_TIMEOUT_S)
        byte = os.read(descriptor, 1) if readable else b""
        if not byte or len(line) > MAX_PMI_LINE:
            raise OSError("the process manager does not answer")
        line += byte
    return line.decode(errors="replace").strip()
