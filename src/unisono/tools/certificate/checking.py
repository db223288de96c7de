"""The check of a certificate against the files of its run, without computing anything again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unisono.core.errors import CheckpointError
from unisono.core.words import count
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import Manifest
from unisono.record.journal import JOURNAL
from unisono.record.rundir import RUN_FILE, read_facts
from unisono.tools.certificate.gathering import arguments_in, chained, end_in
from unisono.tools.certificate.statement import Predicate, State
from unisono.tools.certificate.states import check_regular, state_sha256, weights_sha256

__all__ = ["Checked", "check_models", "check_run", "held_steps"]


class Checked(NamedTuple):
    """What was found in the directory of a run."""

    wrong: tuple[str, ...]
    """What is not as the certificate says, in sentences, the first one first."""
    right: tuple[str, ...]
    """What is."""
    begins: dict[int, Path]
    """By step, the checkpoints that are right."""


def check_run(run: Path, said: Predicate) -> Checked:
    """Compare the journal and the checkpoints of a run with a certificate. Only reads.

    Raises:
        OSError, ValueError: the journal cannot be read.
    """
    for name in (RUN_FILE, JOURNAL):
        check_regular(run, name)
    facts = read_facts(run)
    ids = {str(facts.get("run_id")), *map(str, facts.get("earlier", ()))}
    if said.run.id not in ids:
        words = f"the certificate is for run {said.run.id}, but {run} holds run {facts.get('run_id', 'unknown')}"
        return Checked((words,), (), {})
    wrong = list(_journal(run, said))
    if words := _arguments(facts, said):
        wrong.append(words)
    right = [] if wrong else [f"the journal: {count(said.run.steps, 'step')} in a chain that matches the certificate"]
    begins: dict[int, Path] = {}
    for state in said.states:
        path = run / files.FOLDER / files.step_name(state.step)
        if not path.is_dir() or path.is_symlink():
            continue  # it may have been removed to save room
        if words := _state(path, state):
            wrong.append(words)
        else:
            begins[state.step] = path
    if begins:
        right.append(f"{count(len(begins), 'checkpoint')} of {len(said.states)}, each tensor by its SHA-256")
    return Checked(tuple(wrong), tuple(right), begins)


def held_steps(said: Predicate) -> int:
    """Return how many steps lead to a state of which the certificate has a SHA-256: of a checkpoint, or the end."""
    if said.end is not None and said.end.models:
        return said.run.steps
    return max((state.step for state in said.states), default=0)


def check_models(said: Predicate, paths: Iterable[Path]) -> list[str]:
    """Return which files do not hold the weights of a certified model, in sentences.

    Raises:
        UsageError: a file cannot be read, or holds no weights.
    """
    models = said.end.models if said.end is not None else {}
    return [
        f"{path} does not hold a certified model: its weights have the SHA-256 {', '.join(sorted(found))}, and "
        + (", ".join(f"{name} has {value}" for name, value in models.items()) or "no model is certified")
        for path in paths
        if not (found := weights_sha256(path)) & {*models.values()}
    ]


def _arguments(facts: Mapping[str, Any], said: Predicate) -> str:
    match facts.get("command"):
        case {"arguments": [_, *_] as command} if said.script.arguments is not None:
            if (found := arguments_in(command)) != said.script.arguments:
                return (
                    f"the script of the run had the arguments {shlex.join(found) or 'none'}, and the certificate says "
                    f"{shlex.join(said.script.arguments) or 'none'}"
                )
    return ""


def _journal(run: Path, said: Predicate) -> list[str]:
    """Return what is wrong with the journal. The run may have gone on since."""
    ends = {part.last + 1: part for part in said.chain}
    last = said.chain[-1].last
    wanted = {*ends, *(state.lines for state in said.states)}
    found = chained(run, wanted, {part.first for part in said.chain}, last)
    if found.wrong:
        return [found.wrong]
    known = {*said.gaps}
    if lacking := [gap for gap in found.gaps if gap not in known]:
        return [f"{lacking[0].words} of the journal is missing, but was there when it was certified"]
    for state in said.states:
        if state.chain and found.values.get(state.lines) != state.chain:
            before = max((one.lines for one in said.states if one.lines < state.lines), default=0)
            return [f"the journal is not the certified one: a line from {before} to {state.lines - 1} differs"]
    for lines, part in ends.items():
        if found.values.get(lines) != part.value:
            begin = max((one.lines for one in said.states if part.first <= one.lines <= part.last), default=part.first)
            return [f"the journal is not the certified one: a line from {begin} to {part.last} differs, or is missing"]
    if found.steps != said.run.steps:
        return [f"the certified lines of the journal are {count(found.steps, 'step')}, not {said.run.steps}"]
    if (end_in(found.end) if found.end is not None else None) != said.end:
        return ["the journal does not end as it is certified: with other digests, or another model"]
    return []


def _state(path: Path, state: State) -> str:
    """Return what is wrong with a checkpoint, in a sentence; "" if nothing is."""
    try:
        manifest: Manifest = files.verify(path)
        found = state_sha256(path, manifest)
    except (CheckpointError, OSError) as error:
        return f"the checkpoint of step {state.step} is broken: {error}"
    if found != state.sha256:
        return f"the checkpoint of step {state.step} differs: its SHA-256 is {found}, not {state.sha256}"
    return ""
