"""The fixture ``same_bits``: trials of a training, as `unisono check` makes them, and golden bits."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unisono.core.errors import UnisonoError, UsageError
from unisono.core.fingerprints import RESULTS, other_arithmetic
from unisono.core.words import count, exit_words
from unisono.record.journal import JOURNAL, Difference, compare, read
from unisono.record.rundir import read_facts
from unisono.testing import golden as goldens
from unisono.testing.golden import GoldenBits
from unisono.testing.runs import Faults
from unisono.tools.check.records import StateRecord
from unisono.tools.check.telling import culprit_words, finding_words
from unisono.tools.check.trial_diff import differences
from unisono.tools.check.trials import ALONE, KILL, Runner, Trial, TrialOutcome
from unisono.tools.check.verdict import CheckVerdict, check_script
from unisono.tools.trialrun import Script

__all__ = ["SameBits", "trials_of"]

Training = str | os.PathLike[str] | Callable[..., Any]


@dataclass(frozen=True)
class _Tried:
    """A training that is tried: its name and text for messages, and how to run it."""

    name: str
    text: str
    script: Script


class SameBits:
    """Fixture that fails a test whose training has other bits on several workers, or others than its golden ones.

    ::

        def test_the_bits(same_bits):
            same_bits("train.py", workers=(1, 3), steps=20, golden="train")

    Args:
        directory: of the test; runs are made in folders of it.
        test: the file of the test; golden bits lie beside it.
        updates: write golden bits instead of comparing with them.
    """

    def __init__(self, directory: Path, test: Path, *, updates: bool = False) -> None:
        self._directory = directory
        self._test = test
        self._updates = updates
        self._num_calls = 0

    def __call__(
        self,
        script: Training,
        *,
        workers: Sequence[int] = (1, 3),
        steps: int = 20,
        kill: bool | Faults = True,
        golden: str = "",
        arguments: Sequence[Any] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        options: Sequence[str] = (),
        threads: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        """Compute the first steps of a training alone and on other numbers of workers, and compare all bits.

        Each run is a real one (``unisono run``), and ends after ``steps`` steps. Compared are the state before each
        step, each gradient and loss of each micro-batch, each sum, the evaluations, and the journals line by line.

        Args:
            script: a path, looked for in the current folder and beside the test; or a function, as for
                `unisono.launch`.
            workers: numbers of workers; the script alone is computed in any case.
            steps: at least 2.
            kill: the first run with several workers loses one in its first step, and another one comes. `Faults`:
                these happen there instead; a worker that they kill has to be lost.
            golden: compare the bits of one worker with the golden ones of this name as well.
            arguments: of the script (words), or of the function.
            environment: more variables of the runs.
            options: more options of ``unisono run``, e.g. ``("--set", "arithmetic=compatible")``.
            threads: CPU threads of a worker.
            timeout_s: of one run.

        Raises:
            pytest.fail.Exception: bits differ; the message names the step, the micro-batch, the tensor, and where it
                can be found the line. Or the training cannot be compared, and the message says why.
            pytest.skip.Exception: there are golden bits, and none for the arithmetic of this machine; where the
                variable ``CI`` is set this is a failure.
        """
        __tracebackhide__ = True
        import pytest

        skipped = ""
        try:
            trials = trials_of(workers, kill)
            if steps < 2 or not (trials or golden):
                raise UsageError(
                    f"steps={steps} and workers={tuple(workers)} compare nothing: 2 steps are needed, and another "
                    "number of workers than 1, or golden="
                )
            tried = self._tried(script, arguments, environment, options, threads)
            with Runner(tried.script, steps, timeout_s) as runner:
                failure, alone = _compared(tried.name, runner, trials)
                if golden and not failure:
                    failure, skipped = self._compare_golden(tried, runner, alone, golden)
        except UnisonoError as error:
            failure = str(error)
        if failure:
            pytest.fail(failure, pytrace=False)
        if skipped:
            pytest.skip(skipped)

    def _tried(
        self,
        given: Training,
        arguments: Sequence[Any],
        environment: Mapping[str, str],
        options: Sequence[str],
        threads: int,
    ) -> _Tried:
        self._num_calls += 1
        folder = self._directory / f"same_bits{self._num_calls}"
        folder.mkdir()
        blank = Script(command=(), threads=threads, directory=folder, options=options, variables=dict(environment))
        if not isinstance(given, (str, os.PathLike)):
            name, text = f"{getattr(given, '__name__', 'the function')}()", ""
            with contextlib.suppress(OSError, TypeError):
                text = inspect.getsource(given)
            variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
            function = _pickled(given, arguments, folder / "function.pkl", name)
            return _Tried(name, text, replace(blank, function=function, variables=variables))
        found = [path for place in (Path.cwd(), self._test.parent) if (path := place / given).is_file()]
        if not found:
            raise UsageError(f"there is no script {os.fspath(given)} (looked in {Path.cwd()} and {self._test.parent})")
        script = replace(blank, command=[str(found[0]), *map(str, arguments)])
        return _Tried(found[0].name, found[0].read_text(errors="replace"), script)

    def _compare_golden(self, tried: _Tried, runner: Runner, alone: TrialOutcome, name: str) -> tuple[str, str]:
        """Compare with golden bits, or write them. Returns why the test fails, and why it is skipped."""
        path = goldens.golden_file(self._test, name)
        now = _bits_of(alone, runner.steps, tried.text)
        if self._updates:
            goldens.write(path, now)
            return "", ""
        known = goldens.read(path)
        if not known:
            raise UsageError(f"there is no {path}: write it with pytest --unisono-update, look at it, and commit it")
        same = next((one for one in known if one.arithmetic == now.arithmetic), None)
        if same is None:
            pairs = ((one.arithmetic, {**now.arithmetic, RESULTS: one.arithmetic.get(RESULTS, "")}) for one in known)
            other = "; or ".join(", ".join(other_arithmetic(*pair)) or "other results of the probe" for pair in pairs)
            words = (
                f"{path.name} has no golden bits for the arithmetic of this machine ({other}). Add them with pytest "
                "--unisono-update on this machine; or hold all machines to the same instructions: "
                'options=("--set", "arithmetic=compatible")'
            )
            return (words, "") if os.environ.get("CI") else ("", words)
        if same.steps != now.steps:
            raise UsageError(f"{path.name} was made with steps={same.steps}, but the test has steps={now.steps}")
        if not (difference := goldens.golden_difference(same, now)):
            return "", ""
        said = [
            f"{tried.name} has different bits from the golden ones in {path.name}:",
            *(difference, *_parting(tried, runner, alone, same), goldens.changed_words(same, now, tried.name)),
            "If the change is intended: pytest --unisono-update writes the new bits",
        ]
        return "\n".join(filter(None, said)), ""


def trials_of(workers: Sequence[int], kill: bool | Faults) -> list[Trial]:
    """Return the trials besides the script alone.

    Raises:
        UsageError: a number of workers is below 1, or a worker is to be lost where there are not two.
    """
    if not workers or min(workers) < 1:
        raise UsageError(f"workers= has numbers of workers, of at least 1 each; got {tuple(workers)}")
    faults = kill.faults if isinstance(kill, Faults) else (KILL,) * kill
    counts = list(workers)
    if 1 in counts:
        counts.remove(1)  # it is what the others are compared with
    found = []
    for number in counts:
        hurts = faults if number > 1 else ()
        name = f"{count(number, 'worker')}{', one killed' if hurts == (KILL,) else ', with faults' if hurts else ''}"
        found.append(Trial("alone, once more" if number == 1 else name, workers=number, faults=tuple(hurts)))
        faults = () if hurts else faults
    if faults and isinstance(kill, Faults):
        raise UsageError(f"kill= names faults, and workers={tuple(workers)} has no run with several workers")
    return found


def _compared(name: str, runner: Runner, trials: Sequence[Trial]) -> tuple[str, TrialOutcome]:
    """Run a training alone and in other ways. Returns what differs, in words, and the outcome alone."""
    told: list[Any] = []
    verdict = check_script(runner, told.append, trials)
    alone: TrialOutcome = told[0]
    if not verdict.keeps:
        return _broken_words(name, verdict), alone
    for found in verdict.found:
        try:
            compare(alone.run, found.run)
        except Difference as difference:
            return f"{name}, {found.trial.name}: {difference}", alone
        generations = [line["generation"] for line in read(found.run / JOURNAL) if line["kind"] == "step"]
        if any(fault.action == "kill" for fault in found.trial.faults) and max(generations, default=0) < 2:
            raise UsageError(
                f"no worker was lost in the run with {found.trial.name}, so nothing was shown: its fault was not "
                f"reached within {count(verdict.steps, 'step')}"
            )
    return "", alone


def _broken_words(name: str, verdict: CheckVerdict) -> str:
    """Return what has differed, by trial, and the line that is the reason."""
    said = [f"{name} does not have the same bits everywhere ({count(verdict.steps, 'step')} were computed):"]
    for found in (each for each in verdict.found if not each.is_same):
        has_reason = found.difference is not None or found.culprit is not None
        said += [f"{found.trial.name}: {finding_words(found)}", culprit_words(found) if has_reason else found.failure]
    return "\n".join([*said, *(f"not looked at: {each}" for each in verdict.unchecked)])


def _parting(tried: _Tried, runner: Runner, alone: TrialOutcome, golden: GoldenBits) -> list[str]:
    """Compute the golden text of a script again; return where it parts from the text of today, in words."""
    if tried.script.function is not None or not golden.script or golden.script == tried.text.splitlines():
        return []
    place, *arguments = tried.script.command
    folder = tried.script.directory / "golden"
    folder.mkdir()
    old = folder / Path(place).name
    old.write_text("\n".join([*golden.script, ""]))
    before = tried.script.variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, [str(Path(place).parent), before]))
    variables = {**tried.script.variables, "PYTHONPATH": path}
    script = replace(tried.script, command=[str(old), *arguments], directory=folder, variables=variables)
    with Runner(script, runner.steps, runner.timeout_s, runner.nurseries) as again:
        then = again.run(ALONE)
    if then.exit_code or not then.num_steps or goldens.golden_difference(golden, _bits_of(then, runner.steps, "")):
        how = exit_words(then.exit_code) if then.exit_code else "has other bits than then"
        return [f"the golden {tried.name}, run again from another folder, {how}: more than its text has changed"]
    (records,) = then.workers.values()
    return [f"{each} (golden, and now)" for each in differences(records, alone.workers)]


def _bits_of(outcome: TrialOutcome, steps: int, text: str) -> GoldenBits:
    """Return the bits of a trial with one worker."""
    (records,) = outcome.workers.values()
    states = [one.parts for one in records if isinstance(one, StateRecord)]
    fingerprint: dict[str, str] = read_facts(outcome.run).get("fingerprint") or {}
    return GoldenBits(
        arithmetic={name: each for name, each in fingerprint.items() if name not in goldens.NAMES_OF_MACHINES},
        steps=steps,
        digests=[line["digest"] for line in read(outcome.run / JOURNAL) if line["kind"] == "step"],
        state=goldens.digests_by_object(states[-1] if states else {}),
        script=text.splitlines() if len(text) <= goldens.MOST_TEXT else [],
    )


def _pickled(function: Callable[..., Any], arguments: Sequence[Any], path: Path, name: str) -> Path:
    """Pickle a call, with the module of the function by value: a test's module cannot be imported by workers.

    Raises:
        UsageError: it is no function that can be called so, or something that it needs cannot be pickled.
    """
    import cloudpickle

    try:
        inspect.signature(function).bind(*arguments)
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            path.write_bytes(cloudpickle.dumps(functools.partial(function, *arguments)))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    except Exception as error:  # of the objects that it needs, which may raise anything
        raise UsageError(f"{name} cannot be called by workers: {type(error).__name__}: {error}") from error
    return path
