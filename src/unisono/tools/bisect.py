"""The commit since which a script has other bits: git's own bisect, in a worktree of its own.

Nothing of the user's checkout is touched: its files, index, HEAD, branches and a bisect of its own stay as they are.
git keeps the state of a bisect by worktree, and that of this one goes with it. Hooks do not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unisono.core.errors import UsageError
from unisono.core.words import exit_words, without_evidence
from unisono.record.explaining import changed_lines
from unisono.record.journal import Difference, compare
from unisono.system.lifetime import run_bound, scratch_folder
from unisono.tools.check.trial_diff import differences
from unisono.tools.check.trials import ALONE, Runner, TrialOutcome
from unisono.tools.trialrun import Script

__all__ = ["bisect", "progress"]

GIT_S: Final = 300.0
LAST_LINES: Final = 8
_RESULT: Final = re.compile(r"^# (?:possible )?first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)


def bisect(
    ends: tuple[str, str],
    command: Sequence[str],
    steps: int,
    *,
    links: Sequence[str],
    limit_s: float,
    say: Callable[[str], None],
) -> list[str]:
    """Find the commit since which the first steps of a script have other bits. Blocks until the commits have run.

    Each runs once, on one worker, and the good one twice.

    Args:
        ends: the good and the bad commit, as git names them.
        command: the script and its arguments, in the current folder.
        links: untracked files and folders of the current folder that each commit gets, as links.
        limit_s: of one run.
        say: is told each commit that was tried.

    Returns:
        The commit, where its bits differ first, and what it has changed, in words; empty: both have the same bits.

    Raises:
        UsageError: there is no such repository, commit or script; the good or the bad one cannot run; the good one has
            not the same bits twice.
    """
    folder = Path.cwd().resolve()
    top = Path(_git(folder, "rev-parse", "--show-toplevel").strip()).resolve()
    words = ("rev-parse", "--verify", "--end-of-options")
    good, bad = (_git(top, *words, f"{one}^{{commit}}").strip() for one in ends)
    with scratch_folder("unisono-bisect-") as scratch, _worktree(top, scratch / f"tree{os.getpid()}", good) as tree:
        here = tree / folder.relative_to(top)
        variables = {"PYTHONPATH": _search_path(top, tree)}
        script = Script(command=command, directory=scratch, folder=here, variables=variables)
        with Runner(script, steps, limit_s) as runner:
            links_here = {here / name: folder / name for name in links}
            return _Bisect(ends[0], runner, tree, links_here, say).found(good, bad)


@dataclass
class _Bisect:
    """Runs commits in a worktree, and asks git for the next one.

    Args:
        name: of the good commit.
        links: the links that each commit gets, and what they lead to.
    """

    name: str
    runner: Runner
    tree: Path
    links: dict[Path, Path]
    say: Callable[[str], None]
    _parted: dict[str, list[str]] = field(default_factory=dict)
    """By commit, where it has other bits than the good one."""

    def found(self, good: str, bad: str) -> list[str]:
        reference = self._needed(good)
        if not self._differs(reference, bad, self._needed(bad)):
            return []
        if again := self._differs(reference, good, self._needed(good)):
            raise UsageError(
                f"the script does not give the same bits twice at {self.name}, so no commit can be named: {again[0]}; "
                "`unisono check SCRIPT` there names the line"
            )
        self._git("bisect", "start", bad, good, "--")
        tried: set[str] = set()
        while not (commits := progress(self._git("bisect", "log"))):
            commit = self._git("rev-parse", "HEAD").strip()
            if commit in tried:
                raise UsageError(f"git bisect does not continue from {commit[:12]}: does it come from {self.name}?")
            tried.add(commit)
            self._git("bisect", self._judged(reference, commit), may_fail=True)  # as where only skipped ones are left
        parted = next((self._parted[commit] for commit in commits if commit in self._parted), [])
        if len(commits) > 1:
            hidden = "one of these commits, of which some cannot run: "
            return [hidden + ", ".join(self._named(commit) for commit in commits), *parted]
        return [f"commit {self._named(commits[0])}", *parted, *self._changes(commits[0])]

    def _judged(self, reference: TrialOutcome, commit: str) -> str:
        """Run a commit; return git's word for it."""
        outcome = self._run(commit)
        if failure := _failure(outcome):
            self.say(f"{self._named(commit)}: cannot run ({failure.splitlines()[-1]}), and is skipped")
            return "skip"
        return "bad" if self._differs(reference, commit, outcome) else "good"

    def _needed(self, commit: str) -> TrialOutcome:
        """Run a commit that has to run."""
        outcome = self._run(commit)
        if failure := _failure(outcome):
            raise UsageError(
                f"the script cannot run at {commit[:12]}, with which the others are compared:\n{failure}\nThe worktree "
                "has what git has; --link PATH adds a file or folder of this one, e.g. data"
            )
        return outcome

    def _run(self, commit: str) -> TrialOutcome:
        """Compute the steps of a commit, and leave the worktree as git has it."""
        self._git("checkout", "--quiet", "--detach", commit)
        try:
            folder = self.runner.script.folder
            if folder is not None and not folder.is_dir():
                return TrialOutcome(ALONE, 1, "its folder is not there", {}, [])
            for link, target in self.links.items():
                if not os.path.lexists(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(target)
            return self.runner.run(ALONE)
        finally:  # git would not overwrite what the script has written
            self._git("reset", "--hard", "--quiet")
            self._git("clean", "-ffdxq")  # of a link, the link only

    def _differs(self, good: TrialOutcome, commit: str, outcome: TrialOutcome) -> list[str]:
        """Return where a commit has other bits than the good one, in words; empty: it has the same."""
        short = commit[:12]
        try:
            compare(good.run, outcome.run)
        except Difference as difference:
            words = str(difference).replace(str(good.run), self.name).replace(str(outcome.run), short)
            (records,) = good.workers.values()
            more = [f"{each} ({self.name}, and {short})" for each in differences(records, outcome.workers)]
            self._parted[commit] = [words, *more]
        self.say(f"{self._named(commit)}: {'other bits' if commit in self._parted else f'the bits of {self.name}'}")
        return self._parted.get(commit, [])

    def _changes(self, commit: str) -> list[str]:
        """Return which lines of Python a commit has changed, in words."""
        found, names = [], self._git("diff", "--name-only", "-z", f"{commit}^", commit, "--", "*.py")
        for name in filter(None, names.split("\0")):
            now, before = (self._git("show", f"{one}:{name}", may_fail=True) for one in (commit, f"{commit}^"))
            if changed := changed_lines((now, before), (name, f"{name} before")):
                found.append(changed)
        return found

    def _named(self, commit: str) -> str:
        return self._git("log", "-1", "--format=%h %s", commit).strip()

    def _git(self, *words: str, may_fail: bool = False) -> str:
        return _git(self.tree, *words, may_fail=may_fail)


def progress(log: str) -> list[str]:
    """Return the commits that ``git bisect log`` names as its result; empty: it goes on. Several: commits that were
    skipped hide which of them it is.
    """
    return _RESULT.findall(log)


def _failure(outcome: TrialOutcome) -> str:
    """Return why a commit cannot be judged; "": it can be."""
    if outcome.exit_code:
        lines = without_evidence(outcome.output.rstrip().splitlines())[-LAST_LINES:]
        return "\n".join(lines) or f"it {exit_words(outcome.exit_code)}"
    return "" if outcome.num_steps else "it trains no step"


def _search_path(top: Path, tree: Path) -> str:
    """Return a ``PYTHONPATH`` by which Python finds a project's packages in the worktree, where it finds them in the
    checkout: because of this variable, or of an installation for development.
    """
    inside = [path for one in sys.path if one and (path := Path(one).resolve()).is_relative_to(top)]
    found = [str(path) for one in inside if (path := tree / one.relative_to(top)).is_dir()]
    return os.pathsep.join(filter(None, [*found, os.environ.get("PYTHONPATH", "")]))


@contextlib.contextmanager
def _worktree(top: Path, path: Path, commit: str) -> Iterator[Path]:
    """Make a worktree, and remove it at the end, with what git has noted of it."""
    try:
        _git(top, "worktree", "add", "--quiet", "--detach", str(path), commit)
        yield path
    finally:
        ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            _git(top, "worktree", "remove", "--force", "--force", str(path), may_fail=True)
        finally:
            for number, handler in ignored.items():
                signal.signal(number, handler)


def _git(folder: Path, *words: str, may_fail: bool = False) -> str:
    """Return what git prints.

    Raises:
        UsageError: there is no git, or it fails.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *words]
    try:
        done = run_bound(command, GIT_S, environment={**own, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"})
    except OSError as error:
        raise UsageError(f"--bisect asks git, which cannot be started: {error.strerror}") from None
    if done.code and not may_fail:
        raise UsageError(f"git {words[0]} fails: {done.errors.strip() or exit_words(done.code)}")
    return done.output
