"""The life of a run: it begins when it is made, and ends with the script, whichever way the script ends."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono
from tests.workers.static_team import AloneRun
from unisono import Checkpoints
from unisono.core.errors import RunDirectoryError, UsageError
from unisono.record import checkpoint_files as files
from unisono.record.history import History
from unisono.record.journal import compare, read
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.more

Script = Callable[..., str]

TRAINING = """
    import atexit, multiprocessing, os, sys, torch, unisono

    how = sys.argv[1]

    def train(directory, num_steps=4, **options):
        run = unisono.Run(directory, seed=1, checkpoint=unisono.Checkpoints(every_steps=100), **options)
        return run, go_on(run, num_steps)

    def go_on(run, num_steps):
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=num_steps):
            for number, batch in enumerate(step):
                if (step.number, number) == (2, 1):
                    if how == "error":
                        raise ValueError("a bad sample")
                    if how == "inner break":
                        break
                    if how == "inner exit":
                        sys.exit(3)
                    if how == "with inner exit 0":
                        sys.exit(0)
                step.backward(model(batch).mean())
            if step.number == 2:
                if how in ("exit 0", "with exit 0"):
                    sys.exit()
                if how in ("exit 3", "with exit"):
                    sys.exit(3)
                if how == "raise exit":
                    raise SystemExit(5)
                if how == "interrupt":
                    raise KeyboardInterrupt
                if how == "os._exit":
                    os._exit(7)
                if how in ("break", "inner break"):
                    break
        return model

    hook = sys.excepthook
    if how.startswith("with"):
        with unisono.Run(how, seed=1, checkpoint=unisono.Checkpoints(every_steps=100)) as run:
            go_on(run, 4)
        assert sys.excepthook is hook
    elif how == "children":
        for name, steps in (("well", 4), ("badly", 0)):
            child = multiprocessing.get_context("fork").Process(target=train, args=(name, steps))
            child.start()
            child.join()
            print(name, child.exitcode, flush=True)
    elif how == "twice":
        for number in range(2):
            run, _ = train(f"{how}-{number}")
    else:
        run, _ = train(how)
    if how == "caught":
        try:
            sys.exit(4)
        except SystemExit:
            pass
    if how == "close":
        run.close()
        run.close()
        assert sys.excepthook is hook
        sys.exit(3)
    if how == "atexit":
        atexit.register(lambda: 1 / 0)
    if how == "fork" and os.fork() > 0:
        os.wait()
    if how == "late error":
        raise ValueError("after the training")
"""
ONE_AFTER_THE_OTHER = """
    import gc, os, sys, torch, unisono

    with unisono.Run() as run:  # imports what a training needs
        run.track(model=torch.nn.Linear(2, 1))
        list(run.steps([0], batch_size=1, microbatches=1, max_steps=0))
    gc.freeze()  # else each fork takes a second to clear all modules
    for how in sys.argv[1:]:
        if (pid := os.fork()) == 0:
            output = os.open(f"{how}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = ["train.py", how]
            break
        print(how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sep=": ", flush=True)
    else:
        sys.exit()
    exec(compile(open("train.py").read(), "train.py", "exec"))
"""
ENDS: dict[str, tuple[int, str, str, int]] = {
    "end": (0, "finished", "", 4),
    "with": (0, "finished", "", 4),
    "close": (3, "finished", "", 4),
    "caught": (0, "finished", "", 4),
    "atexit": (0, "finished", "", 4),
    "fork": (0, "finished", "", 4),
    "break": (0, "finished", "", 3),
    "exit 0": (0, "finished", "", 3),
    "exit 3": (3, "finished", "", 3),
    "with exit 0": (0, "finished", "", 3),
    "with inner exit 0": (1, "failed", "ExitInside: sys.exit(0) was called within the inner loop of step 2", 2),
    "with exit": (3, "failed", "SystemExit: 3", 2),
    "interrupt": (-2, "failed", "KeyboardInterrupt: ", 2),
    "error": (1, "failed", "ValueError: a bad sample", 2),
    "late error": (1, "failed", "ValueError: after the training", 4),
    "inner break": (1, "failed", "StepError: the inner loop of step 2 was left before its end", 2),
    "inner exit": (1, "failed", "StepError: the inner loop of step 2 was left before its end", 2),
    "raise exit": (5, "finished", "", 3),
    "os._exit": (7, "stopped", "", 2),
}
"""How the script ends: its exit code, the state and the reason in the journal, and the number of steps there."""
SHOWN = ("interrupt", "error", "late error", "inner break", "inner exit", "with inner exit 0", "atexit")
"""How the script ends with a traceback."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which one script has been run alone, in each of the ways; forks save the import of torch."""
    return tmp_path_factory.mktemp("ends")


@pytest.fixture
def codes(ends: Path, mark: str) -> dict[str, int]:
    """The exit codes of the script, by the way it ends."""
    if not (ends / "codes").exists():
        (ends / "train.py").write_text(textwrap.dedent(TRAINING))
        (ends / "all.py").write_text(textwrap.dedent(ONE_AFTER_THE_OTHER))
        command = Command([sys.executable, "all.py", *ENDS, "children", "twice"], ends, mark)
        try:
            assert command.wait() == 0, command.err
        finally:
            command.end()
        (ends / "codes").write_text("\n".join(command.out))
    pairs = [line.rpartition(": ") for line in (ends / "codes").read_text().splitlines()]
    return {how: int(code) for how, _, code in pairs}


@pytest.mark.parametrize("how", ENDS)
def test_a_run_that_is_alone_ends_with_its_script(how: str, codes: dict[str, int], ends: Path) -> None:
    code, state, reason, num_steps = ENDS[how]
    output = (ends / f"{how}.txt").read_text()
    assert codes[how] == code, output
    found = History(ends / how).status()
    assert (found["state"], found.get("reason", "")[: len(reason)]) == (state, reason), output
    kinds = [line["kind"] for line in read(ends / how)]
    assert kinds == ["step"] * num_steps + ["end"] * (state != "stopped")
    assert ("Traceback" in output) == (how in SHOWN), output
    early = "unisono: a training loop was left early, after 3 of 4 steps\n"
    early = (
        "unisono: the script ended within a training loop (SystemExit: 0) after 3 of 4 steps\n"
        if "with" in how
        else early
    )
    assert output.count(early) == (state == "finished" and num_steps == 3), output


def test_the_last_checkpoint_is_there_and_the_bits_are_those_of_a_with(codes: dict[str, int], ends: Path) -> None:
    assert codes["end"] == 0
    assert compare(ends / "end", ends / "with").startswith("identical: 4 steps")
    for how in ("end", "with", "close"):
        assert [files.step_of(path) for path in files.complete(ends / how / files.FOLDER)] == [4], how
    assert [files.step_of(path) for path in files.complete(ends / "exit 0" / files.FOLDER)] == [3]


def test_an_exception_is_shown_once_with_its_micro_batch(codes: dict[str, int], ends: Path) -> None:
    assert codes["error"] == 1
    lines = (ends / "error.txt").read_text().splitlines()
    assert lines[-2:-1] == ["ValueError: a bad sample"]
    assert lines[-1].startswith("(in step 2, micro-batch 1, samples ")
    assert (ends / "inner break.txt").read_text().count("Traceback") == 1


def test_runs_in_processes_of_multiprocessing_end_as_well(codes: dict[str, int], ends: Path) -> None:
    """These processes skip the interpreter's shutdown."""
    assert codes["children"] == 0
    output = (ends / "children.txt").read_text()
    assert output.splitlines()[0] == "well 0"
    assert output.splitlines()[-1] == "badly 1"
    assert History(ends / "well").status()["state"] == "finished"


def test_the_second_run_of_a_process_ends_the_first(codes: dict[str, int], ends: Path) -> None:
    assert codes["twice"] == 0, (ends / "twice.txt").read_text()
    assert [History(ends / f"twice-{number}").status()["state"] for number in range(2)] == ["finished", "finished"]


PROMPT = """
import torch, unisono
run = unisono.Run("run", seed=1)
model = torch.nn.Linear(2, 1)
run.track(model=model)
def train(spoil=lambda step: None):
    for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=2):
        for batch in step:
            model(batch).mean().backward()
        spoil(step)

train()
no_such_name
{last}
print("it goes on after", run.num_workers)
"""


@pytest.mark.parametrize(
    ("last", "num_steps"),
    [("train()", 4), ("train(lambda step: step.no_such_name)", 3)],
    ids=["a wrong line", "a failed loop"],
)
def test_at_a_prompt_an_exception_ends_nothing(last: str, num_steps: int, tmp_path: Path) -> None:
    """Not the run: a loop that it has left counts as left by `break`, behind the step that was under way."""
    command = [sys.executable, "-q", "-i"]
    prompt = PROMPT.format(last=last)
    done = subprocess.run(command, input=prompt, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert "it goes on after 1" in done.stdout, done.stderr
    assert "NameError: name 'no_such_name' is not defined" in done.stderr
    found = History(tmp_path / "run").status()
    assert (found["state"], found["step"]) == ("finished", num_steps - 1), done.stderr


# -- in this process ---------------------------------------------------------------------------------


def train(run: Any, num_steps: int = 2, spoil: Callable[[Any], None] = lambda step: None) -> None:
    model = torch.nn.Linear(2, 1)
    run.track(model=model)
    for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=num_steps):
        for batch in step:
            step.backward(model(batch).mean())
        spoil(step)


def test_a_cell_that_is_run_twice_ends_its_first_run_and_says_what_was_wrong(tmp_path: Path) -> None:
    def stop(step: Any) -> None:
        raise KeyboardInterrupt

    first = AloneRun(tmp_path / "run", seed=1)
    with pytest.raises(KeyboardInterrupt):
        train(first, spoil=stop)
    second = AloneRun(tmp_path / "run", seed=1, overwrite=True)
    with pytest.raises(UsageError, match="after the end of the run: the script, or another run in it, ended it"):
        train(first)
    train(second)
    second.close()
    assert [line["kind"] for line in read(tmp_path / "run")] == ["step", "step", "end"]
    run = AloneRun(tmp_path / "third")
    run.track(model=(model := torch.nn.Linear(2, 1)))
    for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4):
        for batch in step:
            step.backward(model(batch).mean())
            break
        break
    with pytest.warns(UserWarning, match="the previous run was still open.*the inner loop of step 0 was left"):
        AloneRun().close()


def test_a_run_within_another_s_block_leaves_that_one_open() -> None:
    with AloneRun(seed=1) as outer:
        with AloneRun(seed=2) as inner:
            train(inner)
        train(outer)


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path: Path) -> None:
    with AloneRun(tmp_path) as run:
        train(run)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    try:
        before = threading.enumerate(), sys.excepthook
        with pytest.raises(RunDirectoryError):
            AloneRun(tmp_path)
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (2, False)
        assert (threading.enumerate(), sys.excepthook) == before
        AloneRun(tmp_path, overwrite=True).close()  # nobody holds the directory
    finally:
        torch.set_num_threads(1)


def test_a_directory_whose_run_has_crashed_in_its_first_step_is_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(AttributeError), AloneRun(tmp_path) as run:
            train(run, spoil=lambda step: step.no_such_name)
        assert [line["kind"] for line in read(tmp_path)] == ["end"]
    with AloneRun(tmp_path) as run:
        train(run)
    with pytest.raises(RunDirectoryError, match="holds another run"):
        AloneRun(tmp_path)


# -- on workers --------------------------------------------------------------------------------------

ON_WORKERS = """
    import sys, torch, unisono

    def train(run):
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=5):
            for batch in step:
                model(batch).mean().backward()
                if sys.argv[1] == "error" and step.number == 3:
                    raise ValueError("a bad sample")

    if sys.argv[1] == "with":
        with unisono.Run(seed=1) as run:
            train(run)
    else:
        run = unisono.Run(seed=1)
        train(run)
    """


@pytest.mark.usefixtures("nursery")
def test_workers_end_their_run_with_the_script_also_after_a_kill(script: Script, tmp_path: Path) -> None:
    name = tmp_path / script(ON_WORKERS)
    whole = run_workers(name, 1, directory=tmp_path / "with", arguments=["with"])
    faults = Faults().kill("w1", at="after_backward", step=2)
    hurt = run_workers(name, 2, directory=tmp_path / "without", arguments=["without"], faults=faults)
    assert (whole.exit_code, hurt.exit_code) == (0, 0), hurt.output
    assert compare(tmp_path / "with", tmp_path / "without").startswith("identical: 5 steps")
    assert History(tmp_path / "without").status()["state"] == "finished"


@pytest.mark.usefixtures("nursery")
def test_workers_end_their_run_with_an_exception(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    command = unisono("run", script(ON_WORKERS), "-n", 2, "--run-dir", "run", "--", "error")
    assert command.wait() == 1
    told = command.line("unisono: failed: ")
    assert " failed at step 3, micro-batch " in told
    assert told.endswith("ValueError: a bad sample")
    assert command.err[-1].startswith("(in step 3, micro-batch ")
    assert (History(tmp_path / "run").status()["state"], History(tmp_path / "run").status()["step"]) == ("failed", 2)


def test_a_function_of_launch_ends_its_run_when_it_has_returned(
    script: Script, tmp_path: Path, mark: str, nursery: None
) -> None:
    name = script(
        """
        import torch, unisono

        def main():
            run = unisono.Run("run", seed=1)
            model = torch.nn.Linear(2, 1)
            run.track(model=model)
            for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4):
                for batch in step:
                    model(batch).mean().backward()
            return step.loss

        if __name__ == "__main__":
            print("loss", unisono.launch(main, workers=2))
        """
    )
    command = Command([sys.executable, name], tmp_path, mark)
    try:
        assert command.wait() == 0, command.err
    finally:
        command.end()
    assert command.out[-1].startswith("loss ")
    assert History(tmp_path / "run").status()["state"] == "finished"


FORGETS = """
    import torch, unisono

    run = unisono.Run(seed=1)
    model = torch.nn.Linear(2, 1)
    run.track(model=model)
    for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=10**9):
        if step.number == 0:
            best = 0.0
        for batch in step:
            step.backward(model(batch).mean())
        best = max(best, step.loss)
    """


@pytest.mark.usefixtures("nursery")
def test_a_replacement_that_lacks_a_variable_of_the_steps_before_says_so(script: Script, tmp_path: Path) -> None:
    name = tmp_path / script(FORGETS)
    faults = Faults().kill("w1", at="after_backward", step=2)
    outcome = run_workers(name, 2, directory=tmp_path / "run", faults=faults)
    assert outcome.exit_code == 1
    assert "NameError: name 'best' is not defined" in outcome.output
    assert re.search(r"\(this worker joined the run and began at step \d+: variables that the script", outcome.output)


def test_a_run_that_is_resumed_and_lacks_a_variable_says_so(tmp_path: Path) -> None:
    def go(resume: str | None) -> None:
        with AloneRun(tmp_path, resume=resume, checkpoint=Checkpoints(every_steps=1)) as run:
            train(run, 2 if resume is None else 4, lambda step: None if step.number < 2 else {}[step.number])

    go(None)
    with pytest.raises(KeyError) as caught:
        go("auto")
    assert caught.value.__notes__ == [
        "(the run was resumed from a checkpoint and began at step 2: variables that the script sets in earlier steps "
        "do not exist here, and its own counters start again. step.index and step.number count from the beginning)"
    ]
