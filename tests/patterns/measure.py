"""Runs a pattern alone, on two workers and on three, and by the legs that it names, and says what came of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.patterns.corpus import load
from tests.patterns.runner import MIDDLE, numbers_of, run_pattern
from tests.waiting import PATIENT, WAIT_S
from tests.workers.processes import Seat, Team
from unisono.core.words import count
from unisono.record.journal import Difference, compare
from unisono.testing import Faults, run_workers

__all__ = ["CLASSES", "TEAMS", "Verdict", "measure", "table"]

CLASSES = {
    "identical": "the same bits, alone and on workers; what plain PyTorch computes, up to rounding",
    "refused": "an error of the library says what is wrong, wherever the bits would differ",
    "failed": "another error ended a run",
    "warned": "all ended well, and something differs, or is not what plain PyTorch computes: a warning says so",
    "unequal": "the same bits, but not what plain PyTorch computes: silent",
    "different": "all ended well, and something differs: silent",
}
TEAMS = (2, 3)
TOLERANCE = 1e-5
"""Weights are numbers near to 1 in float32, after a few steps: what sums in another order make of them is a tenth of
this, and a wrong weight of a micro-batch a thousandfold."""
OPTIONS = (*PATIENT, "--set", "exchange-timeout=15s")
"""Workers that wait for each other in different places are told so after this time."""
CONSEQUENCES = {"RunStopped", "PeerLost"}
"""What a worker raises because another one has failed."""
DESERTED = "left the training loop before step"
"""What the command says when one worker alone leaves the loop: no worker has raised an error of its own then."""
ACCIDENTS = {"DeadlineExceeded", "ProtocolError"}
"""What the library raises when it has failed itself."""


@dataclass(frozen=True)
class Ran:
    """How one run ended."""

    name: str
    """``alone``, ``2 workers`` ..."""
    directory: Path
    ended: str
    """``well``, ``refused`` or ``failed``."""
    message: str
    bits: tuple[Mapping[str, str], ...] = ()
    """Of each process that ended well."""
    numbers: tuple[float, ...] = ()
    """What the pattern returned."""


@dataclass(frozen=True)
class Verdict:
    """What came of a pattern."""

    kind: str
    """One of `CLASSES`."""
    detail: str


def measure(name: str, folder: Path, teams: Sequence[int] = TEAMS) -> Verdict:
    """Run a pattern alone, on teams of these sizes, and by its legs. ``folder`` is made, and holds the runs."""
    folder.mkdir(parents=True)
    pattern = load()[name]
    runs = [_run_alone(name, folder), *(_run_team(name, size, folder) for size in teams)]
    if runs[0].ended == "well":
        runs += [LEGS[leg](name, folder) for leg in pattern.legs]
    return _judge(runs, tuple(numbers_of(pattern.plain())) if pattern.plain else None)


def table(verdicts: Mapping[str, Verdict], expected: Mapping[str, str]) -> str:
    """A line for each pattern, and how many there are of each class."""
    width = max(map(len, verdicts), default=0)
    order = list(CLASSES)
    lines = []
    for name, verdict in sorted(verdicts.items(), key=lambda item: (order.index(item[1].kind), item[0])):
        wanted = expected.get(name)
        surprise = "" if wanted == verdict.kind else f"  [expected: {wanted}]"
        detail = " ".join(verdict.detail.split())
        lines.append(f"{verdict.kind:9}  {name:{width}}  {detail[:160]}{surprise}")
    counts = Counter(verdict.kind for verdict in verdicts.values())
    lines.append(f"{count(len(verdicts), 'pattern')}: " + ", ".join(f"{counts[kind]} {kind}" for kind in CLASSES))
    return "\n".join(lines)


# -- running -----------------------------------------------------------------------------------------


def _train_alone(seat: Seat, name: str, directory: Path, endings: Path) -> None:
    # As `python script.py` would be: no worker, and what it prints is not looked at.
    with (endings.parent / "output").open("w") as output, contextlib.redirect_stdout(output):
        with contextlib.redirect_stderr(output), contextlib.suppress(Exception, SystemExit):
            run_pattern(name, directory, endings, directory.name)


def _run_alone(name: str, folder: Path, called: str = "alone") -> Ran:
    directory, endings = folder / called, folder / f"{called}-endings"
    endings.mkdir()
    with Team(1, _train_alone, name, directory, endings, deadline_s=WAIT_S) as team:
        team.results()
    return _ran(called, directory, endings, output="")


def _run_team(
    name: str,
    size: int | str,
    folder: Path,
    leg: str = "",
    *,
    options: Sequence[str] = (),
    faults: Faults | None = None,
) -> Ran:
    called = leg or f"{size} workers"
    directory, endings = folder / called.replace(" ", "-"), folder / f"{called.replace(' ', '-')}-endings"
    endings.mkdir()
    script = Path(__file__).with_name("runner.py")
    arguments = [name, os.fspath(endings), leg]
    try:
        outcome = run_workers(
            script,
            size,
            directory=directory,
            arguments=arguments,
            options=(*OPTIONS, *options),
            faults=faults,
            timeout_s=WAIT_S,
        )
    except TimeoutError as error:
        return Ran(called, directory, "failed", str(error))
    return _ran(called, directory, endings, outcome.output, failed=outcome.exit_code != 0)


def _run_resumed(name: str, folder: Path) -> Ran:
    stopped = _run_alone(name, folder, "stopped")
    checkpoint = stopped.directory / "checkpoints" / f"step-{MIDDLE:010}"
    return _run_team(name, 2, folder, "resumed", options=("--resume", os.fspath(checkpoint)))


def _run_replaced(name: str, folder: Path) -> Ran:
    # It goes on when there are three again, and the third is another one.
    faults = Faults().kill("w1", step=1, at="after_backward")
    return _run_team(name, "3:3", folder, "replaced", faults=faults)


def _run_with_an_evaluator(name: str, folder: Path) -> Ran:
    return _run_team(name, 2, folder, "evaluator", options=("--evaluators", "1"))


LEGS: Final[Mapping[str, Callable[[str, Path], Ran]]] = {
    "resumed": _run_resumed,
    "replaced": _run_replaced,
    "evaluator": _run_with_an_evaluator,
}
"""By the name of a leg: alone up to the middle, then on two workers; three workers of which one is killed in the second
step and replaced; two workers, and one process that evaluates for them."""


def _ran(name: str, directory: Path, endings: Path, output: str, *, failed: bool = False) -> Ran:
    found = [json.loads(path.read_text()) for path in sorted(endings.iterdir())]
    bits = tuple(ending["bits"] for ending in found if ending["error"] is None)
    errors = [ending for ending in found if ending["error"] is not None]
    if not failed and not (errors and name == "alone"):
        warned = next((warning for ending in found for warning in ending["warnings"]), "")
        numbers = next((tuple(ending["numbers"]) for ending in found), ())
        return Ran(name, directory, "well", warned, bits, numbers)
    causes = [ending for ending in errors if ending["error"] not in CONSEQUENCES]
    refusals = [ending for ending in causes if ending["is_library"] and ending["error"] not in ACCIDENTS]
    if refusals:
        return Ran(name, directory, "refused", _words(refusals))
    if not causes and DESERTED in output:
        return Ran(name, directory, "refused", _words(errors))
    return Ran(name, directory, "failed", _words(causes or errors) or output[-2000:])


def _words(errors: Iterable[Mapping[str, Any]]) -> str:
    return next((f"{error['error']}: {error['message']}" for error in errors), "")


# -- judging -----------------------------------------------------------------------------------------


def _judge(runs: list[Ran], plain: tuple[float, ...] | None) -> Verdict:
    well = [run for run in runs if run.ended == "well"]
    warning = next((run.message for run in well if run.message), "")
    if difference := _difference(well):
        return Verdict("warned" if warning else "different", f"{difference} {warning}")
    for kind in ("failed", "refused"):
        stopped = [run for run in runs if run.ended == kind]
        if stopped:
            where = "" if len(stopped) == len(runs) else f"[{', '.join(run.name for run in stopped)} only] "
            return Verdict(kind, where + stopped[0].message)
    if plain is not None and (difference := _distance(runs[0].numbers, plain)):
        return Verdict("warned" if warning else "unequal", f"{difference} {warning}")
    return Verdict("identical", warning)


def _distance(numbers: tuple[float, ...], plain: tuple[float, ...]) -> str:
    """How what the run returned is another than what plain PyTorch did; empty where it is not."""
    if len(numbers) != len(plain):
        return f"{count(len(numbers), 'number')} instead of {len(plain)} of plain PyTorch"
    most = max((abs(a - b) for a, b in zip(numbers, plain, strict=True)), default=0.0)
    return "" if most <= TOLERANCE else f"differs by {most:.2g} from plain PyTorch"


def _difference(well: list[Ran]) -> str:
    """In what these runs, or the workers of one of them, differ; empty where they do not."""
    for run in well:
        for bits in run.bits[1:]:
            if bits != run.bits[0]:
                names = [name for name, value in bits.items() if run.bits[0].get(name) != value]
                return f"the workers of one run ({run.name}) end with another {', '.join(names)}"
    for run in well[1:]:
        first = well[0]
        try:
            compare(first.directory, run.directory)
        except Difference as difference:
            return (
                str(difference)
                .replace(f" in {first.directory}", f" in {first.name}")
                .replace(f" in {run.directory}", f" in {run.name}")
            )
        if run.bits[:1] != first.bits[:1]:
            names = [name for name, value in run.bits[0].items() if first.bits[0].get(name) != value]
            return f"{first.name} and {run.name} end with another {', '.join(names)}"
    return ""
