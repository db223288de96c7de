"""A run that commands compute again, alone in a child process: its settings, and where it begins."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.cli.given import script_arguments
from unisono.cli.resume import checked, command_of, own_command, threads_of
from unisono.cli.saying import say
from unisono.core.errors import CheckpointError, UsageError
from unisono.core.replay_rules import ReplayStart, starts
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.record import checkpoint_files as files
from unisono.record.history import History
from unisono.record.rundir import RUN_FILE, check_schema, read_facts
from unisono.record.without import kept
from unisono.system.fingerprint import SWITCHES
from unisono.system.lifetime import scratch_folder

__all__ = ["PastRun", "past_run", "variables_of"]


class PastRun:
    """A run that is computed again up to a step. It writes nothing into the run's directory.

    Args:
        run: directory of the run.
        given: script and arguments; empty: those that the run was made with, in the folder where it began. A script
            without arguments gets those of the run.

    Raises:
        UsageError: there is no such run, or it does not say with which script it was made.
        RunDirectoryError: a newer version has written it.
    """

    def __init__(self, run: Path, given: tuple[str, ...] = ()) -> None:
        self.run = run.resolve()
        self.facts: dict[str, Any] = read_facts(self.run)
        if not self.run.is_dir() or not self.facts:
            raise UsageError(f"there is no run in {run}: it has no {RUN_FILE}")
        check_schema(self.run)
        self.folder, self.arguments = self._command(given)

    def _command(self, given: tuple[str, ...]) -> tuple[str, list[str]]:
        if given:
            command = command_of(self.facts)
            own = command[1][2 if command[1][0] == "-m" else 1 :] if command is not None else []
            if own and not given[1:]:
                say(f"unisono: {given[0]} gets the arguments of the run: {shlex.join(own)}", err=True)
            return os.getcwd(), script_arguments(given[0], None, given[1:] or tuple(own))
        wanted = "give the script after the options: ... SCRIPT [-- ARGUMENTS]"
        command = own_command(self.run, wanted)
        if command is None:
            raise UsageError(f"{self.run} does not say which script it was made with; {wanted}")
        folder, arguments = command
        before = os.getcwd()
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(f"the run began in {folder}, which cannot be used ({error.strerror}); {wanted}") from None
        try:
            return folder, checked(arguments)
        except UsageError as error:
            raise UsageError(f"{error}. A different script may be given after the options: ... SCRIPT") from None
        finally:
            os.chdir(before)

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the arithmetic of the run depended on; empty where that is unknown."""
        match self.facts.get("fingerprint"):
            case dict() as found if all(isinstance(value, str) for value in found.values()):
                return found
        return {}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that bits depend on, as the run had them."""
        match self.facts.get("environment"):
            case {"hash seed": str(seed)}:
                return variables_of(self.fingerprint, seed)
        return variables_of(self.fingerprint, "")

    def check_step(self, step: int) -> None:
        """Raise UsageError if the run has finished, and has no such step."""
        found = History(self.run).overview()
        if found.state == "finished" and step > found.step >= 0:
            raise UsageError(f"the run has no step {step}: it has finished, and its last step is {found.step}")

    def start(self, step: int) -> ReplayStart | None:
        """Return the newest whole checkpoint from which a step is computed again; None: only from the beginning.

        Says on standard error which checkpoints are broken.
        """
        found = []
        for path in files.complete(self.run / files.FOLDER):
            try:
                manifest = files.read_manifest(path)
            except CheckpointError as error:
                say(f"unisono: {error}", err=True)
                continue
            delay = manifest.recipe.get("delay", 0) if manifest.phase_step else 0
            found.append(ReplayStart(str(path), manifest.step, delay if isinstance(delay, int) else 0))
        usable = starts(found, step)
        for number, one in enumerate(usable, 1):
            try:
                files.verify(Path(one.path))
            except CheckpointError as error:
                what = "an older one is used" if number < len(usable) else "there is no older one"
                say(f"unisono: {error}; {what}", err=True)
            else:
                return one
        return None

    def spec(self, start: ReplayStart | None, directory: str, name: str, settings: str) -> RunSpec:
        """Return the settings of the run that computes it again.

        Args:
            start: where it begins; None: at the beginning.
            directory: of its own.
            name: the inspector.
            settings: the inspector's own, as JSON.
        """
        return RunSpec(
            arguments=tuple(self.arguments),
            folder=self.folder,
            settings=RunSettings(
                threads=threads_of(self.facts),
                run_dir=directory,
                resume=start.path if start is not None else "",
                without=kept(self.run, self.facts),
                inspect=f"{name}:{settings}",
            ),
        )


def variables_of(fingerprint: Mapping[str, str], hash_seed: str) -> dict[str, str]:
    """Return the environment variables that bits depend on, of a run with this fingerprint and this seed of hashes."""
    found = {name: value for name, value in fingerprint.items() if name in SWITCHES}
    return {**found, "PYTHONHASHSEED": hash_seed} if hash_seed else found


@contextmanager
def past_run(run: Path, given: tuple[str, ...] = ()) -> Iterator[tuple[PastRun, str]]:
    """Yield a run that is computed again, and a folder for it that exists meanwhile."""
    found = PastRun(run, given)
    with scratch_folder("unisono-replay-") as directory:
        yield found, str(directory)
