"""What a run keeps on the disk, and how it goes on from there: directory, place in the journal, checkpoints."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import torch

from unisono.checkpoint import files
from unisono.checkpoint.loading import Loaded, newest
from unisono.checkpoint.saving import Saver
from unisono.decisions.cadence import Checkpoints, Place, Word, choose_writer, differences, table
from unisono.decisions.cursor import Cursor
from unisono.errors import CheckpointError, RecipeError, UsageError
from unisono.fingerprint import fingerprint
from unisono.journal import JOURNAL, MOST_KEPT_LINES, Journal, has_steps, truncate
from unisono.rundir import Lock, claim, describe, holder, make, read_facts
from unisono.training.process import Process, tell
from unisono.training.rounds import Rounds
from unisono.training.team import Team
from unisono.training.tracked import Tracked
from unisono.words import count

__all__ = ["Keeper"]

RECIPE: Final = {*(part.name for part in fields(Cursor)), "threads"}
"""What a word may change, and the bits with it."""
FIXED: Final = "parameters"
"""The part of a recipe that no word can change: the state would not fit."""
LOOK_EVERY_S: Final = 1.0
"""How often a member that has lost sight of the run's directory looks for it."""


class Keeper:
    """This member's hold of the run's directory.

    Args:
        directory: None keeps nothing.
        resume: "auto": go on with what the directory holds, if anything; a path: with what is there; "": begin.
        anyway: parts of the recipe that may differ from the checkpoint's, by the script.
        also_anyway: the same, by the command line.
        command: how ``unisono run`` was called (JSON); "": it was not.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        tracked: Tracked,
        policy: Checkpoints | None,
        resume: str,
        anyway: Collection[str],
        also_anyway: Collection[str],
        command: str,
        overwrite: bool,
        device: torch.device,
        threads: int,
    ) -> None:
        if directory is None and (policy is not None or resume):
            what = "checkpoints need" if policy is not None else "resume= needs"
            raise UsageError(f"{what} the directory of the run: unisono.Run(directory, ...), or --run-dir")
        if isinstance(anyway, str):
            raise UsageError(f"resume_anyway is a set of names, e.g. {{{anyway!r}}}, not a string")
        may_differ = {*anyway, *also_anyway}
        if FIXED in may_differ:
            raise UsageError("resume_anyway cannot hold 'parameters': a state does not fit into another model")
        if unknown := sorted(may_differ - RECIPE):
            raise UsageError(
                f"resume_anyway names parts of the recipe ({', '.join(sorted(RECIPE))}); {unknown[0]!r} is none"
            )
        self.directory = directory
        self.policy = policy
        self._tracked = tracked
        self._resume = resume
        self._anyway = may_differ
        self._command = command
        self._overwrite = overwrite
        self._device = device
        self._threads = threads
        self._lock = Lock()
        self._run_id, self._is_alone = "", True
        self._loaded: Loaded | None = None
        self._began: Place | None = None
        self._leaving = False
        self._process = Process()
        self._before: Any = None
        self.metrics: dict[str, float] = {}
        """What was logged last, by name."""
        journal = directory / JOURNAL if directory is not None else None
        self.journal = Journal(journal, self._is_there)
        self.saver = Saver(
            policy, directory, device, tracked.state, tracked.updated, journal=journal, is_there=self._is_there
        )
        self._writes = False  # for all, as they have heard
        self._misses = False  # nobody sees the directory any more, and this member has said so
        self._look_at = 0.0

    # -- life ----------------------------------------------------------------------------------------

    def enter(self, run_id: str, *, alone: bool) -> None:
        """The run begins in this process.

        Raises:
            RunDirectoryError: the directory is another run's.
        """
        self._run_id, self._is_alone = run_id, alone
        if alone and self.directory is not None:
            self._claim(self.directory)
            code = self.policy.on_signal if self.policy is not None else None
            if code is not None and threading.current_thread() is threading.main_thread():
                self._before = signal.signal(signal.SIGTERM, self._signalled)

    def close(self) -> None:
        """Whatever happened: end what was begun."""
        self.saver.close()
        if self._writes and not self._is_there():
            self._miss()
        self._lock.release()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _signalled(self, number: int, frame: Any) -> None:
        if self._leaving or not self._process.is_this:  # the second one means it; a fork has no step to finish
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._leaving = True

    def _claim(self, directory: Path) -> None:
        make(directory)
        may_change = self._overwrite or bool(self._resume)
        if may_change or holder(directory) in (None, self._run_id):
            self._lock.take(directory, self._run_id)
        try:
            claim(directory, self._run_id, overwrite=self._overwrite, resume=bool(self._resume))
        except BaseException:
            self._lock.release()
            raise

    # -- the beginning -------------------------------------------------------------------------------

    def begin(self, phase: int, cursor: Cursor) -> Place | None:
        """On the member that begins a run: claim the directory, and load what the run goes on from.

        Called again, because the others had not waited for as long as that took, it finds everything done.

        Returns:
            Where that is; None: at the beginning. When it is in a later phase, only the models were loaded.

        Raises:
            CheckpointError: there are checkpoints, and none can be used; or this very run has done steps already.
            RecipeError: the checkpoint was made with another recipe; names the differences.
        """
        if self.directory is None:
            return None
        if self._began is not None:
            return self._began
        begins_again = not self._is_alone and holder(self.directory) == self._run_id
        self._claim(self.directory)
        recipe = self._recipe(cursor)
        facts: dict[str, Any] = {"run_id": self._run_id, "started": time.time()}
        before = read_facts(self.directory)
        if command := json.loads(self._command) if self._command else before.get("command"):
            facts["command"] = command
        if self._loaded is None and self._resume:
            facts["resumed"] = before.get("resumed", [])
            self._loaded = self._find(self.directory)
        facts |= {
            "recipe": {name: value for name, value in recipe.items() if name != FIXED},
            "fingerprint": fingerprint(str(self._device)),
        }
        loaded = self._loaded
        if loaded is None:
            if begins_again and has_steps(self.directory):
                raise CheckpointError(
                    f"all workers of the run were lost, and its journal in {self.directory} has steps already, so it "
                    f"does not begin again; to go on with it: unisono run --resume {shlex.quote(str(self.directory))}"
                )
            if self._resume:
                truncate(self.directory / JOURNAL, 0)
            describe(self.directory, facts)
            return None
        manifest = loaded.manifest
        place = Place(phase=manifest.phase, step=manifest.phase_step, total=manifest.step, lines=manifest.lines)
        if place.phase != phase:
            self._tracked.load_models(loaded.state)
            return place
        self._check(loaded, recipe)
        self._tracked.load(loaded.state)
        self._loaded = None
        moved = self._set_aside(loaded, self.directory)  # first: the journal would not reach as far as these
        self._go_on_with_journal(loaded, self.directory)
        self.metrics = dict(manifest.metrics)
        again = {"step": place.total, "at": time.time(), "from": str(loaded.path)}
        facts["resumed"] = [*facts.get("resumed", []), again]
        describe(self.directory, facts)
        tell(f"unisono: goes on at step {place.total}, from {loaded.path}{moved}")
        self._began = place
        return place

    def joined(self, cursor: Cursor, rounds: Rounds) -> None:
        """This member is in the run, and the directory is claimed."""
        self.journal.go_on_at(rounds.lines, rounds.handed_over)
        if rounds.number > 0:
            self.saver.reaching = frozenset()  # the others know who writes, this member does not yet
        self.saver.recipe = self._recipe(cursor)
        self.saver.fingerprint = fingerprint(str(self._device))
        if self.directory is not None and self.directory.is_dir() and holder(self.directory) == self._run_id:
            self._lock.take(self.directory, self._run_id)
            self.saver.reaches = True
            found = files.complete(self.directory / files.FOLDER)  # what is not of this run's course is set aside
            self.saver.saved = files.step_of(found[-1]) if found else -1

    def _find(self, directory: Path) -> Loaded | None:
        files.take_over(directory / files.FOLDER)
        source = directory if self._resume == "auto" else Path(self._resume)
        if source.resolve() == directory.resolve() and not files.complete(directory / files.FOLDER):
            return None  # it was killed before its first checkpoint
        loaded = newest(source)
        if loaded is None:
            raise CheckpointError(f"{source} holds no checkpoint yet")
        for problem in loaded.broken:
            warnings.warn(f"{problem}; {loaded.path.name} is used instead", stacklevel=2)
        return loaded

    def _set_aside(self, loaded: Loaded, directory: Path) -> str:
        """Take out of the way what the directory holds of another course of the run; says so.

        Raises:
            CheckpointError: that cannot be done.
        """
        folder = directory / files.FOLDER
        is_ours = loaded.path.resolve().parent == folder.resolve()
        others = [path for path in files.complete(folder) if not is_ours or files.step_of(path) > loaded.manifest.step]
        try:
            moved = files.set_aside(others, broken=is_ours and bool(loaded.broken))
        except OSError as error:
            shown = ", ".join(path.name for path in others)
            raise CheckpointError(
                f"{shown} cannot be set aside in {folder}, which the run needs that goes on from {loaded.path}: "
                f"{error.strerror or error}"
            ) from error
        if not moved:
            return ""
        if is_ours and loaded.broken:
            return f"; what is broken can be looked at: {', '.join(path.name for path in moved)}"
        return f"; {count(len(moved), 'other checkpoint')} of {folder} will be removed when the run has written one"

    def _check(self, loaded: Loaded, recipe: dict[str, Any]) -> None:
        found = differences(loaded.manifest.recipe, recipe)
        refused = [row for row in found if row[0].partition(":")[0] not in self._anyway]
        if refused:
            names = sorted({row[0].partition(":")[0] for row in refused} - {FIXED})
            help_ = f"; or say that it shall differ: resume_anyway={{{', '.join(map(repr, names))}}}" if names else ""
            if help_ and self._command:
                help_ += f" or {' '.join(f'--resume-anyway {name}' for name in names)}"
            raise RecipeError(
                f"{loaded.path} was made with another recipe:\n{table(refused)}\n"
                f"Change the script back, which gives the same bits as a run that was never stopped{help_}"
            )
        if found:
            warnings.warn(f"the run goes on with another recipe, as asked for:\n{table(found)}", stacklevel=2)
        others = differences(loaded.manifest.fingerprint, fingerprint(str(self._device)))
        if others:
            warnings.warn(
                f"{loaded.path} was made where arithmetic may differ, so the bits may:\n{table(others)}", stacklevel=2
            )

    def _go_on_with_journal(self, loaded: Loaded, directory: Path) -> None:
        theirs = loaded.path.resolve().parent.parent / JOURNAL
        if theirs.exists() and theirs != directory.resolve() / JOURNAL:
            shutil.copyfile(theirs, directory / JOURNAL)
        truncate(directory / JOURNAL, loaded.manifest.lines)

    def _recipe(self, cursor: Cursor) -> dict[str, Any]:
        shapes = {
            name: f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            for name, parameter in self._tracked.parameters()
        }
        return {**self._told(cursor), FIXED: shapes}

    def recipe(self, cursor: Cursor, num_steps: int) -> dict[str, int | bool]:
        """What all workers must be told alike by their scripts."""
        return {**self._told(cursor), "steps": num_steps}

    def _told(self, cursor: Cursor) -> dict[str, int | bool]:
        return {**asdict(cursor), "threads": self._threads}

    # -- with every combine --------------------------------------------------------------------------

    def tell(self) -> Word:
        """What to say about the run's directory, and what is written there."""
        if not self.saver.reaches and self._lock.is_held and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._is_there()
        return self.saver.tell()._replace(lines=float(self.journal.num_written))

    def hear(self, words: Sequence[Word], generation: int, team: Team) -> None:
        """What all members said, by rank."""
        self.saver.hear(words, generation, team.worker_ids)
        self.journal.hear(int(max(word.lines for word in words)))
        wrote, self._writes = self._writes, self.writes(team)
        if wrote and not self.saver.reaching:
            self._miss()
        elif self._misses and self.saver.reaching:
            self._misses = False
            tell(f"unisono: the run directory {self.directory} is there again")

    def writes(self, team: Team) -> bool:
        """Whether this member writes what one writes for all: the first that sees the directory."""
        return choose_writer(team.worker_ids, self.saver.reaching) == team.rank

    def _is_there(self) -> bool:
        """Whether the directory is that of the run, as this member sees it. All hear of it with the next combine."""
        self.saver.reaches = self.directory is not None and self._lock.is_in(self.directory, self._run_id)
        return self.saver.reaches

    def _miss(self) -> None:
        if not self._misses:
            self._misses = True
            warnings.warn(
                f"no worker sees the run directory {self.directory} any more: it was removed or moved. The training "
                f"goes on and writes nothing; when the directory is there again, checkpoints and the last "
                f"{MOST_KEPT_LINES:,} lines of the journal will be written",
                stacklevel=2,
            )

    # -- on the way ----------------------------------------------------------------------------------

    def boundary(self, rounds: Rounds) -> None:
        """Between two steps, before the next: leave if that was asked for, see to the checkpoints, change the members.

        Raises:
            SystemExit: after SIGTERM, with the exit code of the policy.
        """
        if rounds.halts() or self._leaving:
            self.save_together(rounds)  # so that nothing is lost, whatever ends a pause
        if self._leaving:
            assert self.policy is not None
            raise SystemExit(self.policy.on_signal)
        rounds.boundary()
        self.saver.boundary(
            self.place(rounds), rank=rounds.team.rank, generation=rounds.team.generation, metrics=self.metrics
        )

    def save_last(self, rounds: Rounds) -> None:
        """No step follows this one at once."""
        team = rounds.team
        with team.waiting():  # for a disk, which is nobody's fault
            self.saver.save_last(
                self.place(rounds),
                rank=team.rank,
                generation=team.generation,
                worker_ids=team.worker_ids,
                metrics=self.metrics,
            )

    def save_together(self, rounds: Rounds) -> None:
        """The last checkpoint is on the disk when this returns, also if its writer is lost. Collective."""

        def work() -> None:
            self.save_last(rounds)
            self.saver.finish()

        rounds.together(work)
        self.saver.confirm()

    def place(self, rounds: Rounds) -> Place:
        return Place(phase=rounds.phase, step=rounds.step, total=rounds.total, lines=rounds.lines)
