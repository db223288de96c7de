"""Sentences about what went wrong: who, where, since when, and what to do. Values in, text out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, cast, get_args

import msgspec

from unisono.core.errors import DivergenceError, LossError
from unisono.core.words import position_words, shown_bytes, silent_exit_words

__all__ = [
    "Kind",
    "Trouble",
    "file_name",
    "kind_of",
    "kind_or_error",
    "place_of_dump",
    "sentence",
    "text",
    "what_to_do",
]

Kind = Literal[
    "hang", "crash", "error", "nan", "divergence", "corruption", "out-of-memory", "failed-join", "unreachable"
]
"""What can go wrong. crash: a process has ended without a report; error: the script has raised an exception;
corruption: a machine computes or stores wrong values."""

OUT_OF_MEMORY: Final = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate|out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cannot allocate memory",
    re.IGNORECASE,
)


MAX_ERROR: Final = 300
"""A sentence quotes so many characters of an exception."""
NOT_FINITE: Final = re.compile(r"(?:LossError: )?the loss of .* is (-?(?:inf|nan)) \(samples")


_FRAME: Final = re.compile(r'  File "(.+)", line (\d+) in (.+)$')
_LIBRARY: Final = re.compile(r"/lib(64)?/python3[^/]*/|/unisono/|^<frozen ")


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of something that went wrong, at the moment at which it is noticed."""

    kind: Kind
    worker_id: str = ""
    """The culprit; "": none is known."""
    host: str = ""
    step: int = -1
    """The step of the run that was under way; -1: none was."""
    where: str = ""
    """The position within the training in words, `unisono.core.words.position_words`."""
    seconds: float = 0.0
    """How long it has lasted already."""
    place: str = ""
    """The line of the script at which the culprit's main thread stands: ``dataset.py:33 __getitem__``."""
    error: str = ""
    """Class and message of an exception, in one line; or what is wrong, as a predicate of the culprit."""
    exit_code: int = 0
    killed_for: str = ""
    """Why the kernel has killed the process, where that is known."""
    peak_bytes: int = 0
    """The most memory that the process has had; 0: unknown."""
    limit_bytes: int = 0
    """What all processes together could have; 0: unknown."""
    then: str = ""
    """What the run does about it."""
    ends_run: bool = False
    traceback: str = ""
    """Of the exception; or the last output of the culprit."""
    detail: str = ""
    """What the culprit has written about itself: what held its memory, which values were not finite."""
    advice: str = ""
    """What to do, where more is known than what the kind says."""

    @staticmethod
    def of_gradient(
        step: int, microbatch: int, samples: Sequence[int], detail: str, worker_id: str = "", host: str = ""
    ) -> Trouble:
        """Return the trouble of a step whose gradient is not finite.

        Args:
            step: of the run.
            microbatch: the first whose gradient is not finite; -1: there is none.
            worker_id: that has computed it.
        """
        is_sum = microbatch < 0
        return Trouble(
            kind="nan",
            worker_id=worker_id,
            host=host,
            step=step,
            where=position_words(step, microbatch, samples),
            error="the gradient is not finite",
            then="the gradient of each micro-batch is: their sum is too large for its type"
            if is_sum
            else "its loss is, and so is the gradient of each micro-batch before it",
            detail=detail,
            advice=(
                "The derivatives of sqrt, norm, log and division at 0 are infinite, and numbers of 16 bits "
                "overflow early. The run continues; a script may skip such an update depending on step.loss or the "
                "gradient norm, which are equal on all workers"
            ),
        )


def kind_of(error: BaseException) -> Kind:
    """Return what an exception of a script shows."""
    if isinstance(error, DivergenceError):
        return "divergence"
    if isinstance(error, LossError) and error.microbatch >= 0:
        return "nan"
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return "out-of-memory"
    if isinstance(error, (RuntimeError, OSError)) and OUT_OF_MEMORY.search(str(error)):
        return "out-of-memory"
    return "error"


def kind_or_error(name: str) -> Kind:
    """Return the kind of that name; "error" for a name that is none."""
    return cast("Kind", name) if name in get_args(Kind) else "error"


def sentence(trouble: Trouble) -> str:
    """Return what has happened, in one sentence that names the culprit."""
    then = f"; {trouble.then}" if trouble.then else ""
    return _sentence(trouble).rstrip(".") + then


def text(trouble: Trouble) -> str:
    """Return what has happened and what to do."""
    return ". ".join(filter(None, (sentence(trouble), what_to_do(trouble))))


def _sentence(trouble: Trouble) -> str:
    who, where = _who(trouble), f" in {trouble.where}" if trouble.where else ""
    match trouble.kind:
        case "hang" | "unreachable" | "corruption" if trouble.error:
            return f"{who} {trouble.error}"
        case "hang":
            since = f"for {trouble.seconds:.0f} s"
            if trouble.place:
                return f"{who} hung{where}: its main thread has been in {trouble.place} {since}"
            return f"{who} hung{where}: it has made no progress {since}"
        case "crash":
            place = f": it was in {trouble.place}" if trouble.place else ""
            return f"{who} {silent_exit_words(trouble.exit_code)}{where}{place}"
        case "nan":
            found = NOT_FINITE.match(trouble.error)
            what = f"the loss is {found[1]}" if found else trouble.error
            whose = f", which {who} has computed" if trouble.worker_id else ""
            return f"{what}{where}{whose}"
        case "out-of-memory":
            return f"{who} ran out of memory{where}" + _for_memory(trouble)
        case "failed-join":
            return f"{who} could not join the run: {trouble.error}"
        case "divergence":
            return _parts(trouble.error)[0]
        case _:
            return f"{who} failed{where}: {_short(trouble.error)}"


def _for_memory(trouble: Trouble) -> str:
    if trouble.killed_for:
        had = f" when it had {shown_bytes(trouble.peak_bytes)}" if trouble.peak_bytes else ""
        return f": {trouble.killed_for}{had}"
    return f": {_short(trouble.error)}" if trouble.error else ""


def _parts(error: str) -> tuple[str, str]:
    """Return the first sentence of an error of this library, without its class, and the rest, which says what to do."""
    first, _, rest = error.removeprefix("DivergenceError: ").partition(". ")
    return first, rest.rstrip(".")


def _short(error: str) -> str:
    return error if len(error) <= MAX_ERROR else f"{error[:MAX_ERROR].rstrip()} ..."


def _who(trouble: Trouble) -> str:
    where = f" on host {trouble.host}" if trouble.host else ""
    if not trouble.worker_id:
        return f"a worker{where}" if where else "a worker"
    return f"{trouble.worker_id}{where}"


def place_of_dump(output: Sequence[str]) -> str:
    """Return the line of the script that native code was called from when it failed, as faulthandler has written it.

    Args:
        output: the last lines of a process; "" is returned where these have no such stack.
    """
    begin = next((number for number, line in enumerate(output) if line.startswith("Current thread 0x")), None)
    if begin is None:
        return ""
    found = []
    for line in output[begin + 1 :]:
        if (frame := _FRAME.match(line)) is None:
            break
        found.append((frame[1], f"{frame[1].rpartition('/')[2]}:{frame[2]} {frame[3]}"))
    own = [place for file, place in found if not _LIBRARY.search(file)]
    return next(iter(own or [place for _, place in found]), "")


def what_to_do(trouble: Trouble) -> str:
    """Return what to do about it, in one or two sentences without the last full stop."""
    if trouble.advice:
        return trouble.advice.rstrip(".")
    who = trouble.worker_id or "the worker"
    match trouble.kind:
        case "hang":
            return (
                f"The stack of {who} in the evidence shows the line to look at; if the script may take that long "
                "there, raise --set kill-after=TIME"
            )
        case "unreachable":
            return "Look at the network between the machines: `unisono doctor` measures it"
        case "crash" if trouble.exit_code in (-9, -15):
            return (
                "Nothing on the machine suggests that memory was the reason: somebody, or the job scheduler there, "
                "sent the signal"
            )
        case "crash" if trouble.exit_code < 0:
            return (
                f"Native code crashed: the last output of {who} in the evidence has the Python stack, if it could be "
                "written"
            )
        case "crash":
            return f"The script called os._exit, or native code ended it: see the last output of {who}"
        case "nan":
            return (
                "Look at these samples and at the operation: unisono replay --with anomaly names it; a lower learning "
                "rate, a warm-up or clipped gradients help if the values have been growing"
            )
        case "divergence":
            return _parts(trouble.error)[1] or "docs/guarantees.md says what a micro-batch may depend on"
        case "out-of-memory":
            return (
                "More micro-batches of the same batch need less memory (microbatches=, which affects the bits), and so "
                "do fewer workers on this machine"
            )
        case "failed-join":
            return "Fix that on the machine, and run `unisono join` there again"
        case _:
            return "The traceback in the evidence ends with the line that raised it"


def file_name(kind: str, step: int, when: str, taken: Sequence[str] = ()) -> str:
    """Return the name of a file of evidence that no other one has. Names are in the order of time.

    Args:
        when: ``20261122-130405-125`` (`unisono.record.problems.evidence_files.stamp`).
        taken: names that are given already.
    """
    stem = f"{when}-{kind}" + (f"-step{step}" if step >= 0 else "")
    name, number = f"{stem}.txt", 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}.txt"
    return name
