"""Certificate of a run, gathered from its directory."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from unisono.core.errors import CheckpointError, UsageError
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import Manifest
from unisono.record.journal import JOURNAL, Line, read
from unisono.record.journal.chain import BEGIN, Link, links
from unisono.record.rundir import LOCK_FILE, RUN_FILE, check_schema, is_going, read_facts
from unisono.system.fingerprint import MOST_SCRIPT, script_checksum, script_file
from unisono.system.owned import read_regular
from unisono.tools.certificate.statement import (
    ChainPart,
    Data,
    End,
    Gap,
    Predicate,
    RunFacts,
    Script,
    State,
    Statement,
    subjects,
)
from unisono.tools.certificate.states import check_regular, state_sha256

__all__ = ["Chained", "arguments_in", "chained", "data_in", "end_in", "gathered"]

NO_PART: Final = ("host",)
"""Of the versions that a run notes, what no certificate says."""
MODULES: Final = ("-m", "--callable")
"""Words before the name of a module, where a script has none of its own."""


@dataclass
class Chained:
    """What the journal of a run has."""

    parts: list[ChainPart] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    values: dict[int, str] = field(default_factory=dict)
    """By number of lines, the chain up to the last of them, for those that were asked for."""
    steps: int = 0
    end: Line | None = None
    """The line with which the script has reached its end."""
    wrong: str = ""
    """The first line that is not as it was written, or is missing without a word, in a sentence; "": there is none."""

    def add(self, link: Link, wanted: Collection[int]) -> None:
        """Add the next line that counts.

        Args:
            wanted: see `chained`.
        """
        value, kind = link.value.hex(), link.line["kind"]
        if self.parts and not link.begins:
            self.parts[-1] = replace(self.parts[-1], last=link.number, value=value)
        else:
            if link.number > (after := self.parts[-1].last + 1 if self.parts else 0):
                self.gaps.append(Gap(after, link.number - 1))
            made = "training" if link.is_told else "afterwards"
            self.parts.append(ChainPart(first=link.number, last=link.number, value=value, made=made))
        if link.number + 1 in wanted:
            self.values[link.number + 1] = value
        if kind == "step":
            step = link.line.get("step")
            if not isinstance(step, int) or (step != self.steps and not self.gaps):
                self.wrong = self.wrong or f"line {link.number} of the journal is that of step {step}, not {self.steps}"
            self.steps = step + 1 if isinstance(step, int) else self.steps
        self.end = link.line if kind == "end" else None


def chained(run: Path, wanted: Collection[int], begins_at: Collection[int] = (), last: int | None = None) -> Chained:
    """Read the journal of a run, and compute its chain: up to the end of the script, else up to the last step.

    Args:
        wanted: numbers of lines after which the value of the chain is kept.
        begins_at: lines with which the chain begins anew, besides those that say so themselves.
        last: the last line that counts; None: all do.

    Raises:
        OSError, ValueError: the journal cannot be read.
    """
    found, newest = Chained(values={0: BEGIN.hex()} if 0 in wanted else {}), -1
    held: list[Link] = []  # lines that count if a step follows, or the end of the script
    for link in links(read(run), begins_at=begins_at):
        if last is not None and link.number > last:
            break
        if link.number != newest + 1 and not link.begins:
            lacking = Gap(newest + 1, link.number - 1)
            found.wrong = found.wrong or f"{lacking.words} of the journal is missing"
        if not link.is_right:
            words = f"line {link.number} of the journal ({_named(link.line)}) is not as it was written"
            found.wrong = found.wrong or words
        newest = link.number
        held.append(link)
        if link.line["kind"] == "step" or (link.line["kind"] == "end" and link.line.get("ok") is True):
            for each in held:
                found.add(each, wanted)
            held = []
    return found


def gathered(run: Path, *, words: Collection[str] = ()) -> Statement:
    """Return the statement about a run. Reads the journal and all checkpoints, and changes nothing.

    Args:
        words: what else it says: "script" (its text), "arguments".

    Raises:
        UsageError: the directory holds no run that has stopped, or its journal was changed.
    """
    for name in (RUN_FILE, JOURNAL, LOCK_FILE):
        check_regular(run, name)
    facts = read_facts(run)
    if not run.is_dir() or not facts:
        raise UsageError(f"there is no run in {run}: it has no {RUN_FILE}")
    check_schema(run)
    if is_going(run):
        raise UsageError(f"the run in {run} is still active; certify it when it has ended or was stopped")
    notes: list[str] = []
    checkpoints = _checkpoints(run, notes)
    try:
        journal = chained(run, {manifest.lines for _, manifest in checkpoints})
    except (OSError, ValueError) as error:
        raise UsageError(f"the journal of {run} cannot be read: {error}") from None
    if journal.wrong:
        raise UsageError(f"{journal.wrong}; such a run is not certified. `unisono replay` shows the true values")
    if not journal.parts:
        raise UsageError(f"the run in {run} has not done a step")
    states = [
        State(
            step=manifest.step, phase=manifest.phase, phase_step=manifest.phase_step, lines=manifest.lines,
            chain=journal.values.get(manifest.lines), sha256=state_sha256(path, manifest),
        )
        for path, manifest in checkpoints
    ]  # fmt: skip
    end = _end(journal.end, notes)
    script, data, recipe = _script(facts, words, notes), data_in(facts), facts.get("recipe")
    if data.digest is None:
        notes.append("no digest of the samples was given, so the data are not certified")
    _note_chain(journal, states, notes)
    predicate = Predicate(
        run=RunFacts(
            id=str(facts.get("run_id", "")),
            steps=journal.steps,
            has_ended=end is not None,
            resumed=len(facts.get("resumed", ())),
        ),
        recipe=recipe if isinstance(recipe, dict) else {},
        script=script,
        data=data,
        versions=_texts(facts.get("environment"), but=(*NO_PART, "script")),
        arithmetic=_texts(facts.get("fingerprint")),
        chain=journal.parts,
        gaps=journal.gaps,
        states=states,
        end=end,
        left=facts.get("left"),
        notes=notes,
    )
    return Statement(subject=subjects(predicate), predicate=predicate)


def _checkpoints(run: Path, notes: list[str]) -> list[tuple[Path, Manifest]]:
    found = []
    for path in files.complete(run / files.FOLDER):
        try:
            manifest = files.verify(path)
            if manifest.step:  # each check of the whole begins with the script, and not with a checkpoint of step 0
                found.append((path, manifest))
        except CheckpointError as error:
            notes.append(f"a checkpoint is left out, because it is broken: {error}")
    if not found:
        notes.append("the run keeps no checkpoint, so each check begins at step 0")
    return found


def _end(line: Line | None, notes: list[str]) -> End | None:
    if line is None:
        notes.append("the script has not come to its end; the certificate covers the steps that are done")
        return None
    end = end_in(line)
    if not end.models:
        notes.append("the end has no SHA-256 of a model: an earlier version wrote it, or no module was tracked")
    return end


def end_in(line: Line) -> End:
    """Return what the last line of a journal says."""
    return End(digests=_texts(line.get("digests")), models=_texts(line.get("sha256")))


def _script(facts: Mapping[str, Any], words: Collection[str], notes: list[str]) -> Script:
    command, environment = facts.get("command"), facts.get("environment")
    arguments = command.get("arguments") if isinstance(command, dict) else None
    known = environment.get("script") if isinstance(environment, dict) else None
    if not isinstance(arguments, list) or not arguments:
        notes.append("the run does not say which script it was made with")
        return Script(name="", sha256=None)
    is_module = arguments[0] in MODULES
    name = str(arguments[1] if is_module and arguments[1:] else arguments[0])
    path = script_file(arguments, str(command.get("folder", ".")) if isinstance(command, dict) else ".")
    text: bytes | None = None
    if path is not None and known == script_checksum([str(path)]):
        text = read_regular(path.resolve(), MOST_SCRIPT)
    if text is None:
        notes.append("the script's text is not certified: it is not there any more, or has changed since the run began")
    if "script" in words and text is None:
        raise UsageError("--with script: the script's text is not there any more, or has changed since the run began")
    if "script" in words and text is not None and text.decode(errors="ignore").encode() != text:
        raise UsageError("--with script: the script's text is not UTF-8, so a certificate cannot hold it")
    return Script(
        name=name if is_module else name.rpartition("/")[2],
        sha256=hashlib.sha256(text).hexdigest() if text is not None else None,
        text=text.decode() if text is not None and "script" in words else None,
        arguments=arguments_in(arguments) if "arguments" in words else None,
    )


def arguments_in(command: Sequence[Any]) -> list[str]:
    """Return the script's arguments in its command."""
    return list(map(str, command[2 if command[0] in MODULES else 1 :]))


def data_in(facts: Mapping[str, Any]) -> Data:
    """Return what a run's description says of its data."""
    recipe = facts.get("recipe")
    known = recipe if isinstance(recipe, dict) else {}
    number, order = known.get("num_samples"), known.get("order")
    said = facts.get("data")
    digest = said.get("digest") if isinstance(said, dict) else None
    return Data(
        num_samples=number if isinstance(number, int) else None,
        order=order if isinstance(order, str) else None,
        digest=digest if isinstance(digest, str) and digest else None,
    )


def _note_chain(journal: Chained, states: Sequence[State], notes: list[str]) -> None:
    for gap in journal.gaps:
        notes.append(f"the journal lacks the lines {gap.first} to {gap.last}: a disk was full, or a machine was lost")
    for part in journal.parts:
        if part.made != "training":
            notes.append(f"the lines {part.first} to {part.last} were chained by this certificate, not while training")
    if (last := max((one.step for one in states), default=0)) < journal.steps and journal.end is None:
        notes.append(f"no checkpoint holds the steps after {last}: only their lines in the journal are certified")


def _texts(value: Any, but: Collection[str] = ()) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {str(name): text for name, text in value.items() if isinstance(text, str) and name not in but}


def _named(line: Line) -> str:
    if line["kind"] == "end":
        return "the end"
    return f"{'the evaluation at' if line['kind'] == 'evaluation' else 'that of'} step {line.get('step')}"
