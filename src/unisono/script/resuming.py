"""Beginning of a run: claim its directory, and find, check and load the checkpoint that it goes on from."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from unisono.cluster.worker import member as members
from unisono.core.cadence import Position, differences, table
from unisono.core.cursor import Recipe
from unisono.core.errors import CheckpointError, RecipeError, UsageError
from unisono.core.fingerprints import RESULTS, other_results
from unisono.core.without import NO_SHARDS, Shards
from unisono.core.words import count, listed, without_password
from unisono.engine.checkpoint.copies import Copy, Store, find, in_words, is_copy, lineage
from unisono.engine.checkpoint.evaluations import Snapshots
from unisono.engine.checkpoint.loading import Loaded, newest
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.record.journal import JOURNAL, has_steps, truncate
from unisono.record.problems.witness import versions
from unisono.record.rundir import WITHOUT_FILE, RunDirectory, describe, holder, read_facts, refuse_used, sound_steps
from unisono.record.without import keep
from unisono.script.schedule import Asked
from unisono.system.arithmetic import name_of
from unisono.system.fingerprint import about_script, fingerprint, own_command
from unisono.system.process import tell

__all__ = ["Resumption", "sound_ones"]

RECIPE: Final = {
    "arithmetic",
    "batch_size",
    "drop_last",
    "first_epoch",
    "microbatches",
    "modes",
    "num_samples",
    "order",
    "seed",
    "threads",
    "wire",
}
"""The parts of a recipe that ``resume_anyway`` can name; the bits change with them."""
FIXED: Final = "parameters"
"""The part of a recipe that must be equal: the state would not fit."""


MOST_SHARDS: Final = 10_000
"""Of a data set with more, the run's description names none."""


class Resumption:
    """Begins the run of a directory, or goes on with it.

    Args:
        resume: "auto": go on with the run that the directory holds, if any; a path: with what is there; "": begin.
        may_differ: parts of the recipe that may differ from the checkpoint's.
        command: how ``unisono run`` was called (JSON); "": it was not.
        copies: where the run's checkpoints are copied to: "auto" takes the newest from there, if it is newer.
        overwrite: replace another run that the directory holds.

    Raises:
        UsageError: ``may_differ`` has a name that is not a part of the recipe.
    """

    def __init__(
        self,
        directory: RunDirectory,
        tracked: Tracked,
        *,
        resume: str,
        may_differ: Collection[str],
        command: str,
        copies: Sequence[str] = (),
        overwrite: bool,
        device: torch.device,
        threads: int,
    ) -> None:
        if FIXED in may_differ:
            raise UsageError("resume_anyway cannot include 'parameters': a state does not fit a different model")
        if unknown := sorted(set(may_differ) - RECIPE):
            raise UsageError(
                f"resume_anyway takes names of parts of the recipe ({', '.join(sorted(RECIPE))}); got {unknown[0]!r}"
            )
        self.metrics: dict[str, float] = {}
        """Of the checkpoint that the run goes on from."""
        self.checkpoint: Path | None = None
        """The one that the run goes on from."""
        self.data_digest = ""
        """Of the samples, for the run's description; "": unknown."""
        self.shards: Shards = NO_SHARDS
        """Of the data set, for the same."""
        self._directory = directory
        self._tracked = tracked
        self._resume = resume
        self._may_differ = may_differ
        self._command = command
        self._copies = copies
        self._overwrite = overwrite
        self._device = device
        self._threads = threads
        self._loaded: Loaded | None = None
        self._began: Position | None = None
        self._left = members.spec().run.settings.left

    def claim(self, run_id: str) -> None:
        """Make the directory that of this run.

        Raises:
            RunDirectoryError: the directory holds another run, or cannot be written.
        """
        self._directory.claim(
            run_id, overwrite=self._overwrite, resume=bool(self._resume), by_command=bool(self._command)
        )

    def refuse_used(self, run_id: str) -> None:
        """Raise RunDirectoryError where `claim` will, for a worker that is to begin the run; claims nothing."""
        if (path := self._directory.path) is not None and not (self._overwrite or self._resume):
            refuse_used(path, run_id)

    # -- the recipe ----------------------------------------------------------------------------------

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the part of the recipe that must be equal in the scripts of all workers.

        Args:
            recipe: of a phase of the script: its data, and its strategy.
        """
        return {**_arithmetic(os.environ), **recipe, "threads": self._threads}

    def whole_recipe(self, recipe: Recipe) -> dict[str, Any]:
        """Return the recipe of the run, against which a script that resumes from a checkpoint is compared."""
        shapes = {
            name: f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            for name, parameter in self._tracked.parameters()
        }
        return {**self.recipe(recipe), FIXED: shapes}

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of everything that this worker's arithmetic depends on."""
        return fingerprint(str(self._device))

    # -- the beginning -------------------------------------------------------------------------------

    def begin(self, run_id: str, phase: int, recipe: Recipe, asked: Asked, *, is_restart: bool) -> Position | None:
        """Claim the directory, and load the checkpoint that the run goes on from. For the one member that begins a run.

        A second call (after the other members have not waited for so long) only returns the same position.

        Args:
            asked: what the calls of the script up to this phase ask for.
            is_restart: the directory may hold steps of this very run, whose workers were all lost.

        Returns:
            The position at which the run goes on; None: at the beginning. If the position is in a later phase, only the
            models were loaded.

        Raises:
            CheckpointError: there are checkpoints, and none can be used; or this very run has done steps already.
            RecipeError: the checkpoint was made with another recipe; names the differences.
        """
        path = self._directory.path
        if path is None or self._began is not None:
            return self._began
        has_begun = is_restart and holder(path) == run_id
        self.claim(run_id)
        Snapshots(path, 0.0).clear()
        if self._loaded is None and self._resume:
            self._loaded = self._find(path, run_id, has_begun=has_begun)
        facts = self._facts(path, run_id, recipe, is_alone=not is_restart)
        if asked.without is not None:
            facts["recipe"]["without"] = {"samples": len(asked.without.samples), "sha256": asked.without.sha256}
        loaded = self._loaded
        if loaded is None:
            if has_begun and has_steps(path):
                raise CheckpointError(
                    f"all workers of the run were lost, and its journal in {path} has steps already, so it does not "
                    f"start again; to resume it: unisono run --resume {shlex.quote(str(path))}"
                )
            if self._resume:
                truncate(path / JOURNAL, 0)
            keep(path, asked.without)
            describe(path, facts)
            return None
        manifest = loaded.manifest
        _refuse_delayed_rounds(loaded.path, manifest.recipe)
        position = Position(
            phase=manifest.phase,
            step=manifest.phase_step,
            number=manifest.step,
            total=manifest.step,
            lines=manifest.lines,
        )
        if position.phase != phase:
            self._tracked.load_models(loaded.state)
            return position
        self._check(loaded, self.whole_recipe(recipe), asked.used_before)
        self._tracked.load(loaded.state)
        self._loaded = None
        self.checkpoint = loaded.path
        moved = self._move_away(
            loaded, path
        )  # before the journal is cut: it would be shorter than these checkpoints need
        self._go_on_with_journal(loaded, path)
        self.metrics = dict(manifest.metrics)
        again = {"step": position.total, "at": time.time(), "from": str(loaded.path), "run_id": run_id}
        keep(path, asked.without)
        describe(path, {**facts, "resumed": [*facts.get("resumed", []), again]})
        tell(f"unisono: resuming at step {position.total}, from {loaded.path}{moved}")
        self._began = position
        return position

    def _facts(self, path: Path, run_id: str, recipe: Recipe, *, is_alone: bool) -> dict[str, Any]:
        """Return the new description of the run."""
        before = read_facts(path)
        facts: dict[str, Any] = {"run_id": run_id, "started": time.time()}
        command = json.loads(self._command) if self._command else before.get("command")
        if command is None and is_alone:
            command = own_command()
        if command:
            facts["command"] = command
        if self._resume:
            facts["resumed"] = before.get("resumed", [])
            facts["earlier"] = before.get("earlier", [])
        if left := json.loads(self._left) if self._left else before.get("left"):
            facts["left"] = left
        facts["environment"] = {**versions(), "host": socket.gethostname(), **about_script(command)}
        data = {"digest": self.data_digest, "shards": self.shards if len(self.shards) <= MOST_SHARDS else {}}
        if data := {name: value for name, value in data.items() if value}:
            facts["data"] = data
        facts["size"] = {
            "parameter_bytes": self._tracked.num_bytes(),
            "gradient_bytes": self._tracked.gradient_bytes(),
            "is_sharded": bool(self._tracked.sharded),
        }
        return {**facts, "recipe": self.recipe(recipe), "fingerprint": self.fingerprint()}

    def _find(self, directory: Path, run_id: str, *, has_begun: bool) -> Loaded | None:
        files.take_over(directory / files.FOLDER)
        source = directory if self._resume == "auto" else Path(self._resume)
        if is_copy(self._resume):
            resumed = read_facts(directory).get("resumed", [])
            if has_begun and resumed and resumed[-1].get("run_id") == run_id:
                source = directory  # all workers were lost, after the copy was fetched
            else:
                source = self._fetch(sound_ones(list(find([self._resume])), directory), directory)
        elif self._resume == "auto" and self._copies and (newer := self._newer_copies(directory)):
            source = self._fetch(newer, directory)
        if source.resolve() == directory.resolve() and not files.complete(directory / files.FOLDER):
            return None  # the run was killed before its first checkpoint
        folder = files.find(source)
        is_named = folder.name != files.FOLDER and not files.complete(folder)  # one, which is taken in any case
        run = folder.parent.parent if is_named else folder.parent
        sound = sound_steps(run)
        loaded = newest(source, self._tracked.apart_in, most=None if is_named else sound)
        if loaded is None and sound is not None and files.complete(folder):
            raise CheckpointError(
                f"every checkpoint in {run} may hold wrong values (its journal says why the run ended): start over "
                "(--overwrite), or, if you know that one of them is right, resume from it: unisono run --resume "
                f"{shlex.quote(str(folder))}/STEP"
            )
        if loaded is None:
            raise CheckpointError(f"{run} holds no checkpoint yet")
        if sound is not None:
            doubtful = f"checkpoints of more than {count(sound, 'step')} may hold wrong values"
            if not is_named and files.step_of(files.complete(folder)[-1]) > sound:
                tell(f"unisono: {doubtful}, and are not used")
            elif is_named and loaded.manifest.step > sound:
                tell(f"unisono: {doubtful}; {folder.name} is used because it was named")
        for problem in loaded.broken:
            warnings.warn(f"{problem}; {loaded.path.name} is used instead", stacklevel=2)
        return loaded

    def _newer_copies(self, directory: Path) -> list[tuple[Store, Copy]]:
        """Return the copies of this run that are newer than the checkpoints in its directory, the newest first.

        Raises:
            CheckpointError: the copies cannot be read, and the directory holds no checkpoint.
        """
        done = files.complete(directory / files.FOLDER)
        newest_step = files.step_of(done[-1]) if done else -1
        try:
            found = list(find(self._copies))
        except CheckpointError as error:
            if not done:
                raise
            warnings.warn(f"{error}; the run continues from {done[-1]}", stacklevel=2)
            return []
        facts = read_facts(directory)
        is_new = not done and not facts.get("earlier")
        return [
            (store, copy)
            for store, copy in sound_ones(found, directory, says=False)
            if copy.step > newest_step and (is_new or lineage(copy.facts) & lineage(facts))
        ]

    def _fetch(self, found: Sequence[tuple[Store, Copy]], directory: Path) -> Path:
        """Bring the newest of these copies that is not broken into the directory, with its journal; return its path.

        Raises:
            CheckpointError: there is no copy, all are broken, or one cannot be read or written.
        """
        folder = directory / files.FOLDER
        broken: list[str] = []
        for store, copy in found:
            partial = folder / f".{files.step_name(copy.step)}-copy.partial"
            shutil.rmtree(partial, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            began = time.monotonic()
            try:
                store.fetch(copy, partial)
            except files.CheckpointDiffers as problem:
                broken.append(str(problem).replace(partial.name, copy.name))
                shutil.rmtree(partial, ignore_errors=True)
                continue
            except Exception as error:  # of any library that stands behind fsspec
                shutil.rmtree(partial, ignore_errors=True)
                raise CheckpointError(
                    f"{copy.name} of {without_password(store.url)} cannot be fetched: {in_words(error)}"
                ) from error
            for why in broken:
                warnings.warn(f"{why}; {copy.name} is used instead", stacklevel=2)
            tell(
                f"unisono: fetched {copy.name} ({copy.manifest.num_bytes / 1e6:,.1f} MB) from "
                f"{without_password(store.url)} in {time.monotonic() - began:.1f} s"
            )
            return self._take_in(copy, partial, directory)
        where = (
            without_password(self._resume) if is_copy(self._resume) else ", ".join(map(without_password, self._copies))
        )
        if broken:
            raise CheckpointError(f"no copy in {where} can be used: {'; '.join(broken)}")
        raise CheckpointError(f"{where} has no complete copy of a checkpoint")

    def _take_in(self, copy: Copy, fetched: Path, directory: Path) -> Path:
        """Make a copy that was fetched a checkpoint of the directory, and its journal the directory's."""
        for path in (*fetched.iterdir(), fetched):
            files.synchronize(path)
        final = fetched.with_name(files.step_name(copy.step))
        facts = read_facts(directory)
        others = files.complete(final.parent)
        if lineage(copy.facts) & lineage(facts):
            others = [path for path in others if files.step_of(path) > copy.step]
        files.move_away(others, broken=False)
        (fetched / JOURNAL).replace(directory / JOURNAL)
        ids = (lineage(copy.facts) | lineage(facts)) - {facts.get("run_id")}
        describe(directory, {**facts, **copy.facts, "run_id": facts.get("run_id"), "earlier": sorted(ids)})
        files.publish(fetched, final)
        return final

    def _move_away(self, loaded: Loaded, directory: Path) -> str:
        """Move away the checkpoints that are broken or newer than the loaded one; returns a sentence about them.

        Raises:
            CheckpointError: a checkpoint cannot be renamed.
        """
        folder = directory / files.FOLDER
        is_ours = loaded.path.resolve().parent == folder.resolve()
        others = [path for path in files.complete(folder) if not is_ours or files.step_of(path) > loaded.manifest.step]
        try:
            moved = files.move_away(others, broken=is_ours and bool(loaded.broken))
        except OSError as error:
            shown = ", ".join(path.name for path in others)
            raise CheckpointError(
                f"{shown} cannot be renamed in {folder}: {error.strerror or error}. The run resumes from "
                f"{loaded.path}, and newer checkpoints must be moved out of its way"
            ) from error
        if not moved:
            return ""
        if is_ours and loaded.broken:
            return f"; the broken ones are kept as {', '.join(path.name for path in moved)}"
        return f"; {count(len(moved), 'other checkpoint')} of {folder} will be removed when the run has written one"

    def _check(self, loaded: Loaded, recipe: dict[str, Any], used_before: Callable[[int, int], str]) -> None:
        manifest = loaded.manifest
        theirs = {**_arithmetic(manifest.fingerprint), **manifest.recipe}  # an older one lacks it
        if (out := theirs.pop("without", None)) != (ours := recipe.pop("without", None)):
            used = used_before(manifest.phase, manifest.phase_step) if out is None and self._left else "-"
            if used:
                raise RecipeError(_other_samples(loaded.path, out, ours, used))
        found = differences(theirs, recipe)
        refused = [row for row in found if row[0].partition(":")[0] not in self._may_differ]
        if refused:
            raise RecipeError(
                f"{loaded.path} was made with a different recipe:\n{table(refused)}\nChange the script back, for the "
                "same bits as a run that was never "
                f"stopped{self._other_way({row[0].partition(':')[0] for row in refused}, loaded.path)}"
            )
        if found:
            warnings.warn(
                f"the run continues with a different recipe, which resume_anyway allows:\n{table(found)}", stacklevel=2
            )
        before, now = manifest.fingerprint, fingerprint(str(self._device))
        others = [row for row in differences(before, now) if row[0] != RESULTS]
        others += [("result", name, "another") for name in other_results(before, now)]
        if others:
            warnings.warn(
                f"{loaded.path} was written on a machine whose arithmetic may differ, so the bits may differ as well:\n"
                f"{table(others)}",
                stacklevel=2,
            )

    def _other_way(self, names: set[str], path: Path) -> str:
        """Return what else can be done where these parts of the recipe differ; "": nothing."""
        if FIXED in names:
            return ""
        if strategy := sorted(names - RECIPE):
            return (
                f"; {listed(strategy)} cannot be named in resume_anyway, because a checkpoint has no state for a "
                "different strategy. To continue training the model with a different one, start a new run with its "
                "weights: "
                f'unisono.load_weights("{path}", model)'
            )
        allowed = sorted(names)
        options = f" or {' '.join(f'--set resume-anyway={name}' for name in allowed)}" if self._command else ""
        return f"; or allow the difference: resume_anyway={{{', '.join(map(repr, allowed))}}}{options}"

    def _go_on_with_journal(self, loaded: Loaded, directory: Path) -> None:
        theirs = loaded.path.resolve().parent.parent / JOURNAL
        if theirs.exists() and theirs != directory.resolve() / JOURNAL:
            shutil.copyfile(theirs, directory / JOURNAL)
        truncate(directory / JOURNAL, loaded.manifest.lines)


def _other_samples(path: Path, theirs: Any, ours: Any, used: str) -> str:
    """Return the error for a run that leaves out other samples than the checkpoint that it would go on from.

    Args:
        used: where the run of the checkpoint has used a sample that is left out now; "-": it is not allowed anyway.
    """
    if used != "-":
        return (
            f"{path} cannot be resumed without {ours}: the run used one of them before, in {used}. Start from the "
            "first step: unisono replay --from-beginning"
        )
    before, now = (f"without {one}" if one else "with all samples" for one in (theirs, ours))
    return (
        f"{path} was made {before}, and this run would continue {now}: its result would match neither. Continue with "
        f"the list in {WITHOUT_FILE} of the run's directory (--set without=FILE), or start over; `unisono replay RUN "
        "--without FILE --into DIR` computes what a run with all samples would have been without some"
    )


def _arithmetic(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a recipe that says which instructions were asked for; empty: none."""
    return {"arithmetic": name} if (name := name_of(environment)) else {}


def _refuse_delayed_rounds(path: Path, recipe: Recipe) -> None:
    """Refuse a checkpoint of local steps with a delay, which this version does not have.

    Raises:
        RecipeError: the recipe is of such a training.
    """
    if "replicas" in recipe and recipe.get("delay"):
        raise RecipeError(
            f"{path} was made by run.local_steps(delay={recipe['delay']}), and holds a change of a round that is not "
            "applied yet. This version has no delay for local steps: version 0.2.0 can resume such a run "
            "(pip install unisono==0.2.0). To continue training the model with this version, start a new run with its "
            "weights: "
            f'unisono.load_weights("{path}", model)'
        )


def sound_ones(found: Sequence[tuple[Store, Copy]], directory: Path, *, says: bool = True) -> list[tuple[Store, Copy]]:
    """Return the copies without those that may hold wrong values, as far as the directory of their run says so.

    A place of copies does not know it: the run was found to be doubtful after they were written.

    Raises:
        CheckpointError: no other one is left.
    """
    sound, ids = sound_steps(directory), lineage(read_facts(directory))
    if sound is None:
        return list(found)
    left = [(store, copy) for store, copy in found if copy.step <= sound or not lineage(copy.facts) & ids]
    if says and found and not left:
        raise CheckpointError(
            f"every copy may hold wrong values: {directory} says that checkpoints of more than {count(sound, 'step')} "
            "do. Start over (--overwrite), or, if you know that a copy is right, resume from it in another --run-dir"
        )
    if says and len(left) < len(found):
        tell(f"unisono: copies of more than {count(sound, 'step')} may hold wrong values, and are not used")
    return left
