"""Arguments of the commands, checked before anything is started."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from unisono.core.errors import UsageError
from unisono.core.settings import parse_time
from unisono.record.rundir import ADDRESS_FILE, going, user
from unisono.system.interfaces import interfaces
from unisono.system.owned import read_regular

__all__ = [
    "address_of",
    "check_directory",
    "check_text",
    "directory_of_new_run",
    "script_arguments",
    "seconds",
]


def seconds(name: str, default: str | None, words: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return an option for a time with its unit, such as ``60s``."""
    return click.option(name, metavar="TIME", default=default, show_default=True, callback=_check_seconds, help=words)


def _check_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_time(value)
    except ValueError:
        raise UsageError(
            f"{param.opts[0]} is a time above 0 with its unit, such as 500ms, 60s, 2m or 1h; got {value!r}"
        ) from None


def check_text(what: str, *texts: str) -> None:
    """Raise UsageError for a text that is not UTF-8: it could not be sent to other processes."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            if encoding == "utf-8":
                raise UsageError(f"{what} is not UTF-8: {os.fsencode(text)!r}; use another name") from None
            raise UsageError(
                f"{what} cannot be read in this locale, whose encoding is {encoding}: {os.fsencode(text)!r}; set "
                "PYTHONUTF8=1"
            ) from None


def directory_of_new_run(script: Path, run_dir: str) -> Path | None:
    """Return the directory in which a script can only begin a new run, so that a used one is refused.

    None where that is not certain before the script runs: its text has no `Run`, or one that may replace the run in the
    directory or go on with it, or the name of the directory is computed.

    Args:
        run_dir: the directory that the command names; "": the script does.
    """
    try:
        nodes = list(ast.walk(ast.parse(script.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return None
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == "Run"]
    if len(calls) != 1 or any(_may_take_over(keyword) for keyword in calls[0].keywords):
        return None
    given = [*calls[0].args[:1], *(one.value for one in calls[0].keywords if one.arg == "directory")]
    named = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return Path(run_dir) if run_dir else Path(named[0]) if named else None


def _may_take_over(given: ast.keyword) -> bool:
    """Return whether an argument of `Run` may say that the run replaces another, or resumes it."""
    says_no = isinstance(given.value, ast.Constant) and not given.value.value
    return given.arg is None or (given.arg in ("overwrite", "resume") and not says_no)


def _name(called: ast.expr) -> str:
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def address_of(interface: str) -> str:
    """Return the address of a network interface of this machine: of IPv4, if it has one.

    Raises:
        UsageError: there is no such interface, or it has no address.
    """
    known = interfaces()
    found = [each.address for each in known if each.name == interface]
    if not found:
        names = ", ".join(f"{each.name} ({each.address})" for each in known) or "none"
        raise UsageError(f"the network interface {interface} has no address on this machine; there are {names}")
    return found[0]


def script_arguments(
    script: str | None, module: str | None, arguments: tuple[str, ...], *, command: str = "run SCRIPT [--workers N]"
) -> list[str]:
    """Return the arguments of a worker: the script or module, and its own arguments.

    Args:
        command: how it is to be called, for an error.

    Raises:
        UsageError: there is no such script or module.
    """
    if module:
        rest = [script, *arguments] if script else list(arguments)
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            raise UsageError(f"there is no module {module!r} to run; the working directory is {os.getcwd()}")
        return ["-m", module, *rest]
    if script is None:
        raise UsageError(f"which script? unisono {command} [-- ARGUMENTS]")
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory; give the script in it")
    if not path.is_file() and script.startswith("-"):
        raise UsageError(
            f"{script} is not a script, but is given where the script should be; give the script first, then -- and "
            "its arguments"
        )
    if not path.is_file():
        raise UsageError(f"there is no script {script} (looked in {os.getcwd()})")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {script} cannot be read; check its permissions")
    return [script, *arguments]


def check_directory(folder: Path, *, resumes: bool = False) -> None:
    """Check the run directory.

    Args:
        resumes: the run there is resumed. Workers that have lost their head hold its lock until they have noticed, on
            other machines for a while, so a run counts as going only where its head is known to be alive.

    Raises:
        UsageError: the directory cannot be written, or a run is going in it.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--run-dir {folder} is not a directory")
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise UsageError(f"--run-dir {folder} cannot be created: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"--run-dir {folder} cannot be written: no permission in {existing}")
    try:  # what permissions do not tell: file systems that are read-only, or not made for files
        tempfile.TemporaryDirectory(dir=existing, prefix=".unisono-").cleanup()
    except OSError as error:
        raise UsageError(f"--run-dir {folder} cannot be written: {existing}: {error.strerror or error}") from None
    if (name := user(folder)) and not (resumes and not _has_head_here(folder)):
        raise UsageError(going(folder, name))


def _has_head_here(folder: Path) -> bool:
    """Return whether the head that a directory names is a process of this machine, as far as its process id tells."""
    try:
        pid = int(json.loads(read_regular(folder / ADDRESS_FILE))["pid"])
        os.kill(pid, 0)
        return not Path("/proc/self").exists() or b"unisono.cluster.head" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return False
