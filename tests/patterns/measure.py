"""Runs a pattern alone, on two workers and on three, and says what came of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patterns.runner import run_pattern
from tests.waiting import PATIENT, WAIT_S
from tests.workers.processes import Seat, Team
from unisono.core.words import count
from unisono.record.journal import Difference, compare
from unisono.testing import run_workers

__all__ = ["CLASSES", "TEAMS", "Verdict", "measure", "table"]

CLASSES = {
    "identical": "the same bits, alone and on workers",
    "refused": "an error of the library says what is wrong, wherever the bits would differ",
    "failed": "another error ended a run",
    "different": "all ended well, and something differs: silent",
}
TEAMS = (2, 3)
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
    bits: tuple[Mapping[str, str], ...]
    """Of each process that ended well."""


@dataclass(frozen=True)
class Verdict:
    """What came of a pattern."""

    kind: str
    """One of `CLASSES`."""
    detail: str


def measure(name: str, folder: Path, teams: Sequence[int] = TEAMS) -> Verdict:
    """Run a pattern alone and on teams of these sizes. ``folder`` is made, and holds the runs afterwards."""
    folder.mkdir(parents=True)
    return _judge([_run_alone(name, folder), *(_run_team(name, size, folder) for size in teams)])


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
        with contextlib.redirect_stderr(output), contextlib.suppress(Exception):
            run_pattern(name, directory, endings)


def _run_alone(name: str, folder: Path) -> Ran:
    directory, endings = folder / "alone", folder / "alone-endings"
    endings.mkdir()
    with Team(1, _train_alone, name, directory, endings, deadline_s=WAIT_S) as team:
        team.results()
    return _ran("alone", directory, endings, output="")


def _run_team(name: str, size: int, folder: Path) -> Ran:
    directory, endings = folder / f"workers-{size}", folder / f"workers-{size}-endings"
    endings.mkdir()
    script = Path(__file__).with_name("runner.py")
    arguments = [name, os.fspath(endings)]
    try:
        outcome = run_workers(script, size, directory=directory, arguments=arguments, options=OPTIONS, timeout_s=WAIT_S)
    except TimeoutError as error:
        return Ran(f"{size} workers", directory, "failed", str(error), ())
    return _ran(f"{size} workers", directory, endings, outcome.output, failed=outcome.exit_code != 0)


def _ran(name: str, directory: Path, endings: Path, output: str, *, failed: bool = False) -> Ran:
    found = [json.loads(path.read_text()) for path in sorted(endings.iterdir())]
    bits = tuple(ending["bits"] for ending in found if ending["error"] is None)
    errors = [ending for ending in found if ending["error"] is not None]
    if not failed and not (errors and name == "alone"):
        return Ran(name, directory, "well", _warnings(output), bits)
    causes = [ending for ending in errors if ending["error"] not in CONSEQUENCES]
    refusals = [ending for ending in causes if ending["is_library"] and ending["error"] not in ACCIDENTS]
    if refusals:
        return Ran(name, directory, "refused", _words(refusals), bits)
    if not causes and DESERTED in output:
        return Ran(name, directory, "refused", _words(errors), bits)
    return Ran(name, directory, "failed", _words(causes or errors) or output[-2000:], bits)


def _words(errors: Iterable[Mapping[str, Any]]) -> str:
    return next((f"{error['error']}: {error['message']}" for error in errors), "")


def _warnings(output: str) -> str:
    return next((line for line in output.splitlines() if "Warning:" in line), "")


# -- judging -----------------------------------------------------------------------------------------


def _judge(runs: list[Ran]) -> Verdict:
    well = [run for run in runs if run.ended == "well"]
    if difference := _difference(well):
        warned = next((f" (warned: {run.message})" for run in well if run.message), "")
        return Verdict("different", difference + warned)
    for kind in ("failed", "refused"):
        stopped = [run for run in runs if run.ended == kind]
        if stopped:
            where = "" if len(stopped) == len(runs) else f"[{', '.join(run.name for run in stopped)} only] "
            return Verdict(kind, where + stopped[0].message)
    return Verdict("identical", "")


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
