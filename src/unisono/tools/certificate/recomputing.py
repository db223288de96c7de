"""Stretches of a run, computed again and compared with its certificate.

Each stretch is a run of its own, in a directory of its own: it begins at a checkpoint of the certified run or at step
0, writes a checkpoint where the stretch ends, and a journal. Both are compared with the certificate: the chain over the
lines, and the SHA-256 of the state. The inspector here only says where it ends, and compares step by step with the
journal of the certified run, where that is there, so that an error is found at its step.
"""

from __future__ import annotations

import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from unisono.core.errors import CheckpointError, StopInspection
from unisono.core.events import StepResult
from unisono.core.fingerprints import other_arithmetic
from unisono.core.replay_rules import seconds_left
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.core.words import count, duration
from unisono.engine.rounds.taps import Loop
from unisono.record import checkpoint_files as files
from unisono.record.journal import Line, read
from unisono.record.journal.chain import BEGIN, links
from unisono.record.rundir import read_facts
from unisono.script.inspected import run_inspected
from unisono.script.inspecting import Inspector
from unisono.system.arithmetic import name_of
from unisono.system.fingerprint import fingerprint
from unisono.system.owned import write_whole
from unisono.system.process import tell
from unisono.tools.certificate.gathering import data_in, end_in
from unisono.tools.certificate.statement import Gap, Predicate
from unisono.tools.certificate.states import state_sha256
from unisono.tools.certificate.stretches import Stretch
from unisono.tools.replay.replaying import Against
from unisono.tools.trialrun import Script, trial_run

__all__ = ["OTHER_ARITHMETIC", "Recomputing", "Target", "Wanted", "compared", "recomputed", "wanted_of"]

DIFFERS: Final = 1
NOT_THERE: Final = 2
OTHER_ARITHMETIC: Final = 4
"""Exit code where this machine computes in another way, so that nothing was computed."""
TELL_EVERY_S: Final = 5.0
VERSION: Final = re.compile(r"[0-9]+(\.[0-9a-z]+){0,4}")
MOST_S: Final = 1e9


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the inspector."""

    name: str
    run: str
    """The directory of the certified run; "": it is not there."""
    first: int
    last: int
    to_end: bool
    """The script is to come to its end."""
    saves: list[int]
    """Steps of which a checkpoint is written."""
    arithmetic: dict[str, str]
    result: str
    """The file for the exit code and the words with which the computation is stopped."""


class Result(msgspec.Struct, frozen=True):
    """How the computation of a stretch has ended."""

    code: int
    """0, or an exit code."""
    words: str
    """What is wrong."""
    seconds: float
    """From the first step on, without the start of the script."""


class Recomputing(Inspector):
    """Ends a run where a stretch ends, and compares its steps with the certified run's journal.

    Args:
        settings: a `Wanted` as JSON.
    """

    def __init__(self, settings: str) -> None:
        self._wanted = wanted = msgspec.json.decode(settings, type=Wanted)
        self._against = Against(Path(wanted.run)) if wanted.run else None
        self._began = self._told = time.monotonic()
        self._has_begun = False
        self._saves = frozenset(wanted.saves)
        self._is_over = False
        """The state at the end of the stretch is on the disk."""

    def before_loop(self, loop: Loop) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._began = self._told = time.monotonic()
        here = fingerprint(str(loop.device))
        if others := other_arithmetic(self._wanted.arithmetic, here):
            raise self._stop(
                OTHER_ARITHMETIC,
                "this machine computes differently from the run, so its bits would differ: "
                f"{'; '.join(others)}.{_remedy(self._wanted.arithmetic, here)} Nothing was computed",
            )

    def after_step(self, result: StepResult) -> None:
        if self._against is not None:
            _, difference = self._against.compare(result)
            if difference:
                raise self._stop(DIFFERS, difference)
        if (now := time.monotonic()) - self._told >= TELL_EVERY_S:
            self._told = now
            done, total = result.step + 1 - self._wanted.first, self._wanted.last - self._wanted.first
            left = seconds_left(done, total, now - self._began)
            more = f", {duration(left)} left" if left is not None else ""
            tell(f"unisono: {self._wanted.name}: {done} of {total} steps{more}")

    def saves_at(self, step: int) -> bool:
        return step in self._saves

    def saved(self, step: int) -> None:
        self._is_over = step == self._wanted.last and not self._wanted.to_end

    def before_step(self, step: int) -> None:
        # Not at once: after a loop the script may write this checkpoint again (`run.save`), as it did in the run.
        if self._is_over:
            raise self._stop(0, "")

    def at_end(self) -> None:
        self._note(0, "")

    def _stop(self, code: int, words: str) -> StopInspection:
        self._note(code, words)
        return StopInspection("", code)

    def _note(self, code: int, words: str) -> None:
        found = Result(code, words, time.monotonic() - self._began)
        write_whole(Path(self._wanted.result), msgspec.json.encode(found))


def _remedy(run: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return what makes this machine equal, as far as that is known."""
    words = []
    torch, python = run.get("torch", "").partition("+")[0], run.get("python", "")
    if run.get("torch") != here.get("torch") and VERSION.fullmatch(torch):
        words.append(f"pip install torch=={torch}")
    if python != here.get("python") and VERSION.fullmatch(python):
        words.append(f"use Python {python}")
    if run.get("instructions") == "AVX2" and here.get("instructions") == "AVX512" and not name_of(here):
        words.append("set ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2")
    return f" To make it equal: {'; '.join(words)}." if words else ""


class Target(NamedTuple):
    """What is computed again."""

    said: Predicate
    run: Path | None
    """The directory of the certified run, if its journal is right."""
    begins: Mapping[int, Path]
    """Its checkpoints that are right, by step."""
    folder: str
    arguments: Sequence[str]
    """SCRIPT ... or -m MODULE ..., from that folder."""
    threads: int
    variables: Mapping[str, str]
    workers: int
    without: str
    """The file of the samples that the run leaves out; "": none."""


def recomputed(target: Target, stretch: Stretch, directory: Path) -> Result:
    """Compute a stretch again, and compare it with the certificate. Blocks until it is done.

    Args:
        directory: an empty one, for what the computation writes.
    """
    name = _named(stretch)
    wanted = wanted_of(target.said, target.run, stretch, directory)
    hint = (
        ". This stretch began at a checkpoint: if --all finds nothing, the script does not resume exactly (it has a "
        "counter of its own)"
        if stretch.first
        else ""
    )
    known = {one.sha256 for one in target.said.states if one.step == stretch.first}
    code = _run(target, target.begins.get(stretch.first), msgspec.json.encode(wanted).decode(), directory, name)
    file, start = Path(wanted.result), target.begins.get(stretch.first)
    result = msgspec.json.decode(file.read_bytes(), type=Result) if file.exists() else Result(0, "", 0.0)
    if result.code:
        return replace(result, words=f"{result.words}{hint}") if result.code == DIFFERS else result
    if code:
        words = f"{name} could not be computed: the script ended with exit code {code}"
        return replace(result, code=max(NOT_THERE, code), words=words)
    try:
        wrong = compared(target.said, stretch, directory / "run")
        if start is not None and not wrong and (other := state_sha256(start, files.verify(start))) not in known:
            wrong = f"they began with a state whose SHA-256 is {other}: the checkpoint has changed in the meantime"
    except (OSError, ValueError) as error:
        return replace(result, code=NOT_THERE, words=f"{name} could not be compared: {error}")
    words = f"{name} are not what was certified: {wrong}{hint}"
    return replace(result, code=DIFFERS, words=words) if wrong else result


def wanted_of(said: Predicate, run: Path | None, stretch: Stretch, directory: Path) -> Wanted:
    """Return what the inspector is to do for a stretch; see `Target` and `recomputed`."""
    return Wanted(
        name=_named(stretch),
        run=str(run or ""),
        first=stretch.first,
        last=stretch.last,
        to_end=_comes_to_end(said, stretch),
        saves=sorted({*(one.step for one in said.states if stretch.first < one.step <= stretch.last), stretch.last}),
        arithmetic=dict(said.arithmetic),
        result=str(directory / "result"),
    )


def _named(stretch: Stretch) -> str:
    return f"steps {stretch.first} to {stretch.last - 1}"


def _comes_to_end(said: Predicate, stretch: Stretch) -> bool:
    return said.end is not None and stretch.last == said.run.steps


def _run(target: Target, start: Path | None, settings: str, directory: Path, name: str) -> int:
    run = directory / "run"
    if target.workers > 1:
        script = Script(
            command=target.arguments, threads=target.threads, directory=directory, folder=Path(target.folder)
        )
        code, output = trial_run(
            script, run, ("recompute", settings), workers=target.workers, resume=start, variables=target.variables,
            without=target.without, limit_s=MOST_S, name=name, steps=0,
        )  # fmt: skip
        if code:
            tell(output)
        return code
    spec = RunSpec(
        arguments=tuple(target.arguments),
        folder=target.folder,
        settings=RunSettings(
            threads=target.threads,
            run_dir=str(run),
            resume=str(start) if start is not None else "",
            without=target.without,
            inspect=f"recompute:{settings}",
        ),
    )
    return run_inspected(spec, variables=target.variables, stdout=sys.stderr.fileno())


def compared(said: Predicate, stretch: Stretch, found: Path) -> str:
    """Return what a stretch in the directory ``found`` has that is not as certified, in words; "" if all is.

    Raises:
        OSError, ValueError: its journal cannot be read.
    """
    to_end, states = _comes_to_end(said, stretch), {one.step: one for one in said.states}
    begin, last = states.get(stretch.first), states.get(stretch.last)
    first = begin.lines if begin is not None else 0
    limit = last.lines if last is not None and not to_end else said.chain[-1].last + 1
    within = [one for one in said.states if stretch.first < one.step <= stretch.last]
    expected: dict[int, str | None] = {one.lines - 1: one.chain for one in within}
    expected |= {part.last: part.value for part in said.chain if first <= part.last < limit}
    end: Line = {}
    done = stretch.first
    value = bytes.fromhex(begin.chain) if begin is not None and begin.chain else BEGIN
    for link in links(_between(read(found), first, limit, said.gaps), value, {part.first for part in said.chain}):
        end = link.line
        done = link.line["step"] + 1 if link.line["kind"] == "step" else done
        if (known := expected.pop(link.number, None)) and known != link.value.hex():
            return f"the chain up to line {link.number} of the journal is {link.value.hex()}, and not {known}"
    if missing := [number for number, known in expected.items() if known]:
        return f"line {min(missing)} of the journal was not reached"
    if done != stretch.last:
        return f"they end with step {done - 1}"
    for one in within:
        path = found / files.FOLDER / files.step_name(one.step)
        try:
            digest = state_sha256(path, files.verify(path))
        except CheckpointError as error:
            return f"the state after {count(one.step, 'step')} could not be compared: {error}"
        if digest != one.sha256:
            return f"the state after {count(one.step, 'step')} has the SHA-256 {digest}, and not {one.sha256}"
    if to_end and said.end is not None:
        for name, known in said.end.models.items():
            if (here := end.get("sha256", {}).get(name)) != known:
                return f"the weights of {name} have the SHA-256 {here}, and not {known}"
        if end_in(end) != said.end:
            return "the digests at the end, or the models, are others"
    return _described(said, read_facts(found), is_whole=stretch.first == 0 and not said.run.resumed)


def _described(said: Predicate, facts: Mapping[str, Any], *, is_whole: bool) -> str:
    """Return what the description of a run that was computed again has that is not as certified; "" if all is.

    Args:
        is_whole: both began at step 0: the recipe of a run that was resumed is that of a later loop.
    """
    data = data_in(facts)
    if data.digest and data.digest != said.data.digest:
        return f"the digest of its samples is {data.digest}, and not {said.data.digest}"
    if is_whole and (facts.get("recipe") != said.recipe or replace(data, digest=said.data.digest) != said.data):
        return f"the recipe is {facts.get('recipe')}, and not {said.recipe}"
    return ""


def _between(lines: Iterable[Line], first: int, limit: int, gaps: Sequence[Gap]) -> Iterator[Line]:
    """Yield some lines of a journal, without the values of the chain: it may have begun elsewhere."""
    for line in lines:
        number = line.get("line")
        if not isinstance(number, int) or not first <= number < limit or line["kind"] == "gap":
            continue
        at = bisect_right(gaps, number, key=lambda gap: gap.first) - 1
        if at < 0 or number > gaps[at].last:
            line.pop("chain", None)
            yield line
