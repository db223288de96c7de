"""The run that ``unisono run --resume`` goes on with."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from unisono.cli.given import script_arguments
from unisono.cli.saying import say
from unisono.core.errors import CheckpointError, UsageError
from unisono.core.settings import Instructions
from unisono.core.words import without_password
from unisono.record.checkpoint_files import FOLDER
from unisono.record.journal import JOURNAL
from unisono.record.rundir import RUN_FILE, read_facts
from unisono.record.without import kept
from unisono.system.owned import NotOwned, read_owned

__all__ = ["AUTO", "Resumed", "checked", "command_of", "own_command", "resumed", "threads_of"]

AUTO: Final = "auto"
"""Value of ``--resume``: go on with what the run directory holds, or begin there."""


class Resumed(NamedTuple):
    """The meaning of ``--resume``."""

    run_dir: str
    path: str
    """The run or the checkpoint to resume from; "" where no run is resumed."""
    facts: dict[str, Any]
    """The description of the run that is resumed."""
    folder: Path | None = None
    """The directory of this machine with that description; None: it is elsewhere, e.g. in an object store."""

    def arguments(self) -> list[str]:
        """Return the arguments of the workers of the run that is resumed. Goes to the folder where the run began.

        Raises:
            UsageError: the run's description does not name the script, or the script or its folder is gone.
        """
        wanted = "give the script: unisono run --resume DIR SCRIPT [-- ARGUMENTS]"
        command = command_of(self.facts) if self.folder is None else own_command(self.folder, wanted)
        if command is None:
            raise UsageError(f"{self.path} does not say which script it was made with; {wanted}")
        folder, arguments = command
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(f"the run began in {folder}, which cannot be used ({error.strerror}); {wanted}") from None
        words = checked(arguments)
        say(f"unisono: resuming {shlex.join(words)} in {folder}", err=True)
        return words

    def without(self) -> str:
        """Return the path of the samples that the run that is resumed leaves out; "": none, or it is elsewhere."""
        return kept(self.folder, self.facts)

    def arithmetic(self) -> Instructions | None:
        """Return the instructions that the workers of the run that is resumed were held to; None: any."""
        recipe = self.facts.get("recipe")
        asked = recipe.get("arithmetic") if isinstance(recipe, dict) else None
        return next((name for name in get_args(Instructions) if name == asked), None)


def command_of(facts: dict[str, Any]) -> tuple[str, list[str]] | None:
    """Return the folder in which a run began, and the arguments of its workers; None where that is unknown."""
    match facts.get("command"):
        case {"folder": str(folder), "arguments": [str(), *_] as arguments} if all(
            isinstance(word, str) for word in arguments
        ) and arguments != ["-m"]:
            return folder, arguments
    return None


def own_command(run: Path, wanted: str) -> tuple[str, list[str]] | None:
    """Return what `command_of` says of the run in a directory, if nobody but this user can have written it.

    Args:
        wanted: what the user may do instead.

    Raises:
        UsageError: another user has written it, or may have.
    """
    try:
        facts = json.loads(read_owned(run, RUN_FILE))
    except NotOwned as error:
        raise UsageError(
            f"{error}: the script that it names is not executed as you without your consent; {wanted}"
        ) from error
    except (OSError, ValueError):
        return None
    return command_of(facts) if isinstance(facts, dict) else None


def checked(arguments: list[str]) -> list[str]:
    """Return the arguments of a run's workers, if their script is there, from the current folder.

    Raises:
        UsageError: the script or module is gone.
    """
    is_module = arguments[0] == "-m"
    script, module = (None, arguments[1]) if is_module else (arguments[0], None)
    return script_arguments(script, module, tuple(arguments[2 if is_module else 1 :]))


def threads_of(facts: dict[str, Any]) -> int:
    """Return the threads of a worker of a run; 1 where that is unknown."""
    match facts.get("recipe"):
        case {"threads": int(threads)} if threads >= 1:
            return threads
    return 1


def resumed(place: str, run_dir: str, *, overwrite: bool) -> Resumed:
    """Find the run that is to be resumed.

    Args:
        place: a run, one of its checkpoints, the place of its copies, or `AUTO`.

    Raises:
        UsageError: there is no such run.
    """
    from unisono.engine.checkpoint.copies import absolute, is_copy

    if overwrite:
        raise UsageError("--resume continues a run, --overwrite replaces it; give only one of them")
    path = Path(place)
    if place == AUTO:
        return Resumed(run_dir, AUTO, read_facts(Path(run_dir)) if run_dir else {}, Path(run_dir))
    if is_copy(absolute(place)):
        return Resumed(run_dir, absolute(place), *_facts_of_copy(absolute(place)))
    if not path.is_dir():
        raise UsageError(f"--resume {path}: there is no such directory")
    inside = path.parent.name == FOLDER
    own = path.parent.parent if inside else path
    if not inside and not run_dir and not any((own / name).exists() for name in (RUN_FILE, JOURNAL, FOLDER)):
        raise UsageError(f"--resume {path}: there is no run in that directory")
    return Resumed(run_dir or str(own), str(path.resolve()), read_facts(own), own)


def _facts_of_copy(place: str) -> tuple[dict[str, Any], Path | None]:
    """Return the description of the run whose copies are in a place, and the directory of this machine that holds it.

    Raises:
        UsageError: the place cannot be read, or holds no copy.
    """
    from unisono.engine.checkpoint.copies import check, find

    check([place])
    try:
        newest = next(find([place]), None)
    except CheckpointError as error:
        raise UsageError(f"--resume {without_password(place)}: {error}") from error
    if newest is None:
        raise UsageError(f"--resume {without_password(place)}: there is no complete copy of a checkpoint")
    store, copy = newest
    return dict(copy.facts), store.folder_of(copy)
