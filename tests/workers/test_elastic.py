"""Workers join and leave a run that is going, at known steps, and not one bit changes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono, served_by, wait_until_gone
from tests.workers.gates import Gates
from tests.workers.journals import canonical
from unisono.cli.reach import ask_status, find
from unisono.core.efficiency import SETTLED, SKIPPED
from unisono.record.journal import JOURNAL, compare, read, times
from unisono.testing import Faults, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = Path(__file__).with_name("small_training.py")
STEPS = 60


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker, all the time."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    with served_by(standing_nursery):
        outcome = run_workers(SCRIPT, 1, directory=folder, arguments=["--steps", str(STEPS)])
    assert outcome.exit_code == 0, outcome.output
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def on_two_cores() -> list[str]:
    """What starts a command on two cores: of A to B workers, it starts as many as there are cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    code = f"import os, sys; os.sched_setaffinity(0, {cores}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code]


def start(
    unisono: Unisono,
    run_dir: Path,
    gates: Gates | None,
    workers: object,
    *options: object,
    before: Sequence[str] = (),
) -> Command:
    place = ("--gates", gates.folder) if gates is not None else ()
    arguments = ("-n", workers, "--run-dir", run_dir, *options, "--", "--steps", STEPS, *place)
    return unisono("run", SCRIPT, *arguments, before=before)


def join(unisono: Unisono, run_dir: Path, workers: int, *options: object) -> Command:
    url = json.loads((run_dir / "head.json").read_text())["url"]
    return unisono("join", url, "--token-file", run_dir / "token", "-n", workers, *options)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read(run_dir) if line["kind"] == "step"]


def sizes(run_dir: Path) -> list[int]:
    """How many workers did each step."""
    return [len(workers) for workers in times.by_step(run_dir).values()]


def pid_of(worker_id: str, run_dir: Path) -> int:
    workers = ask_status(find(str(run_dir)))["workers"]
    return int(next(worker["pid"] for worker in workers if worker["worker_id"] == worker_id))


def finish(command: Command, run_dir: Path, calm: Path) -> None:
    assert command.wait() == 0, command.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert canonical(calm) == canonical(run_dir)


def start_with_guest(unisono: Unisono, run_dir: Path, gates: Gates) -> tuple[Command, Command]:
    """A run of two, and a machine that has joined it with one; all are at gate 20."""
    command = start(unisono, run_dir, gates, 2)
    gates.wait(3)
    guest = join(unisono, run_dir, 1)
    gates.open(3, command.generation("w2 joins; generation 2 with 3 workers"))
    gates.wait(20)
    return command, guest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("exchange", ["shared", "gloo"])
def test_a_machine_joins_and_leaves(
    exchange: str, number: signal.Signals, unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    """`unisono join` adds two workers to two; Ctrl-C there takes them away again, at the end of a step."""
    with Gates(tmp_path / "gates", (3, 20, 40, 58)) as gates:
        command = start(unisono, run_dir, gates, 2, "--exchange", exchange)
        gates.wait(3)
        guest = join(unisono, run_dir, 2)
        gates.open(3, command.generation("; generation 2 with"))
        gates.open(20, command.generation("with 4 workers"))
        gates.wait(40)
        guest.process.send_signal(number)
        gates.open(40, command.generation("w2 and w3 leave"))
        assert guest.wait() == 0, guest.err
        assert any("the workers of this machine leave at the end of the step" in line for line in guest.err)
        assert "all workers of this machine have left" in guest.out[-1]
        gates.open(58)
        finish(command, run_dir, calm)
    counts = sizes(run_dir)
    assert counts[:4] == [2, 2, 2, 2]
    assert counts[40] == 4
    assert counts[-1] == 2


def test_the_journal_is_written_by_whoever_sees_the_directory(
    unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    """Those who are left do not; the next that does writes what they have done meanwhile, whatever its rank."""
    with Gates(tmp_path / "gates", (3, 20, 40)) as gates:
        command = start(unisono, run_dir, gates, 1, "--max-restarts", 0)
        gates.wait(3)
        join(unisono, run_dir, 1, "--run-dir", tmp_path / "elsewhere")
        gates.open(3, command.generation("w1 joins; generation 2 with 2 workers"))
        gates.wait(20)
        os.kill(pid_of("w0", run_dir), signal.SIGKILL)
        gates.open(20, command.generation("with 1 worker", after="w1 joins"))
        gates.wait(40)
        assert len(steps_of(run_dir)) in (19, 20)  # w0 was at the gate, or about to say that step 19 is done
        join(unisono, run_dir, 1)
        gates.open(40, command.generation("w2 joins"))
        finish(command, run_dir, calm)
    lines = list(read(run_dir))
    assert [line["line"] for line in lines] == list(range(len(lines)))
    assert {line["kind"] for line in lines} == {"step", "evaluation", "end"}
    known = times.by_step(run_dir)
    assert 30 not in known, "nobody could write the times of the workers then, and they are not handed over"
    assert len(known[max(known)]) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_a_machine_whose_workers_were_sent_away_leaves_at_the_first_signal(
    unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    with Gates(tmp_path / "gates", (3, 20, 50)) as gates:
        command, guest = start_with_guest(unisono, run_dir, gates)
        pid = pid_of("w2", run_dir)
        assert unisono("scale", run_dir, 2).wait() == 0
        gates.open(20, command.generation("w2 leaves"))
        wait_until_gone({pid}, time.monotonic() + WAIT_S)
        guest.process.send_signal(signal.SIGINT)
        assert guest.wait() == 0, guest.err
        assert "all workers of this machine have left" in guest.out[-1]
        gates.open(50)
        finish(command, run_dir, calm)


def test_the_machine_that_joined_is_gone(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """`kill -9` of the joined command takes its workers with it; the run continues with its own."""
    with Gates(tmp_path / "gates", (3, 20)) as gates:
        command, guest = start_with_guest(unisono, run_dir, gates)
        guest.process.kill()
        command.line("is gone")
        gates.open(20, command.generation("generation 3 with 2 workers"))
        finish(command, run_dir, calm)
    assert sizes(run_dir)[19] == 3
    assert sizes(run_dir)[-1] == 2


def test_scale_up_and_down(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """`unisono scale` makes two workers four, and four workers one, while they train."""
    with Gates(tmp_path / "gates", (3, 20, 40)) as gates:
        command = start(unisono, run_dir, gates, 2)
        gates.wait(3)
        grow = unisono("scale", run_dir, 4)
        assert grow.wait() == 0, grow.err
        assert "scaled to 4 workers, from 2" in grow.out[0]
        gates.open(3, command.generation("; generation 2 with"))
        gates.open(20, command.generation("with 4 workers"))
        gates.wait(40)
        shrink = unisono("scale", run_dir, 1)
        assert shrink.wait() == 0, shrink.err
        gates.open(40, command.generation("w1, w2 and w3 leave"))
        finish(command, run_dir, calm)
    counts = sizes(run_dir)
    assert counts[3] == 2
    assert counts[40] == 4
    assert counts[-1] == 1


def test_stop_ends_the_run_at_the_end_of_a_step(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """`unisono stop`: what was trained is complete and in the journal, and the command says that it was stopped."""
    with Gates(tmp_path / "gates", (20,)) as gates:
        command = start(unisono, run_dir, gates, 3)
        gates.wait(20)
        before = ask_status(find(str(run_dir)))["generation"]
        stop = unisono("stop", run_dir)
        assert stop.wait() == 0, stop.err
        assert "the run ends at the end of the step" in stop.out[0]
        gates.open(20, before + 1)
        assert command.wait() == 0, command.err
        assert "stopped by `unisono stop`" in command.out[-1]
    digests = [line["digest"] for line in steps_of(run_dir)]
    assert 20 < len(digests) < STEPS
    assert digests == [line["digest"] for line in steps_of(calm)][: len(digests)]


def test_one_here_wait_for_two(unisono: Unisono, run_dir: Path, calm: Path) -> None:
    """``--workers 1 --wait-for 2``: not a step before the second machine is there, and the first line to paste."""
    command = start(unisono, run_dir, None, 1, "--wait-for", 2)
    command.line("1 of 2 workers are there; the run starts when all 2 are")
    assert "the line that `unisono watch --once " in command.line("more workers can join, on this machine")
    assert ask_status(find(str(run_dir)))["state"] == "waiting"
    guest = join(unisono, run_dir, 1)
    finish(command, run_dir, calm)
    assert guest.wait() == 0, guest.err
    assert set(sizes(run_dir)) == {2}


def test_a_run_that_could_never_begin_is_refused(unisono: Unisono, run_dir: Path) -> None:
    command = start(unisono, run_dir, None, "1:2", "--wait-for", 3)
    assert command.wait() == 2
    assert "--wait-for 3 is more than the 2 workers" in command.err[-1]
    assert not run_dir.exists()


def test_a_run_grows_by_itself_to_measure_another_worker(
    unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path
) -> None:
    """``--workers 1:2 --efficiency 0.7`` begins with one, although there is room for two. The bits are the same."""
    with Gates(tmp_path / "gates", (SKIPPED + SETTLED + 1,)) as gates:
        command = start(unisono, run_dir, gates, "1:2", "--set", "efficiency=0.7", before=on_two_cores())
        command.line("scaled to 2 workers, from 1: to measure what one more adds (--set efficiency=0.7)")
        gates.open(SKIPPED + SETTLED + 1, command.generation("w1 joins"))
        finish(command, run_dir, calm)
    assert set(sizes(run_dir)[: SKIPPED + SETTLED]) == {1}
    assert 2 in sizes(run_dir)


def test_efficiency_without_a_range_is_refused(unisono: Unisono, run_dir: Path) -> None:
    command = start(unisono, run_dir, None, 2, "--set", "efficiency=0.7")
    assert command.wait() == 2
    assert "give --workers A:B as well" in command.err[-1]


def test_at_least_two_at_most_four(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """``--workers 2:4`` takes two of three that join; the last one takes the place of one that dies."""
    with Gates(tmp_path / "gates", (3, 20, 40, 58)) as gates:
        command = start(unisono, run_dir, gates, "2:4", "--max-restarts", 0, before=on_two_cores())
        gates.wait(3)
        guest = join(unisono, run_dir, 3)
        gates.open(3, command.generation("; generation 2 with"))
        gates.open(20, command.generation("with 4 workers"))
        gates.wait(40)
        ranked = [
            worker["worker_id"] for worker in ask_status(find(str(run_dir)))["workers"] if worker["rank"] is not None
        ]
        waiting = ({"w2", "w3", "w4"} - {*ranked}).pop()
        os.kill(pid_of("w1", run_dir), signal.SIGKILL)
        command.generation("with 3 workers", after="with 4 workers")
        gates.open(40)
        gates.open(58, command.generation(f"{waiting} joins"))
        finish(command, run_dir, calm)
        assert guest.wait() == 0, guest.err
    by_step = [set(workers) for workers in times.by_step(run_dir).values()]
    assert by_step[0] == {"w0", "w1"}
    assert max(map(len, by_step)) == 4
    assert by_step[-1] == {"w0", "w2", "w3", "w4"}


def test_too_few_workers_wait_for_more(unisono: Unisono, run_dir: Path, calm: Path, tmp_path: Path) -> None:
    """With fewer than the minimum the run pauses and says so; another machine joins, and it goes on."""
    with Gates(tmp_path / "gates", (5,)) as gates:
        command = start(unisono, run_dir, gates, "2:3", "--max-restarts", 0, before=on_two_cores())
        gates.wait(5, workers=2)  # one that is still in step 4 would do it again, alone
        os.kill(pid_of("w0", run_dir), signal.SIGKILL)
        command.line("paused: 1 of at least 2 workers")
        gates.open(5)
        assert ask_status(find(str(run_dir)))["state"] == "paused"
        guest = join(unisono, run_dir, 1)
        command.line("w2 joins; generation 3 with 2 workers")
        finish(command, run_dir, calm)
        assert guest.wait() == 0, guest.err
    by_step = [list(workers) for workers in times.by_step(run_dir).values()]
    assert by_step[4] == ["w0", "w1"]
    assert by_step[-1] == ["w1", "w2"]


def test_a_paused_run_can_be_stopped_and_scaled(unisono: Unisono, run_dir: Path, tmp_path: Path) -> None:
    """`unisono scale` to what is there lets a paused run go on; `unisono stop` ends one."""
    with Gates(tmp_path / "gates", (5, 20)) as gates:
        command = start(unisono, run_dir, gates, "3:3", "--max-restarts", 0)
        gates.wait(5)
        os.kill(pid_of("w2", run_dir), signal.SIGKILL)
        command.line("paused: 2 of at least 3 workers")
        gates.open(5)
        assert unisono("scale", run_dir, 2).wait() == 0
        gates.wait(20, workers=2)  # one that is still in step 19 would pause after that
        os.kill(pid_of("w1", run_dir), signal.SIGKILL)
        command.line("paused: 1 of at least 2 workers")
        gates.open(20)
        assert unisono("stop", run_dir).wait() == 0
        assert command.wait() == 0, command.err
    assert 20 < len(steps_of(run_dir)) < STEPS


ONE_TENSOR = """
    import torch, unisono

    with unisono.Run(seed=3) as run:
        model = torch.nn.Linear(12, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = list(torch.randn(54, 12, generator=torch.Generator().manual_seed(1)))
        for step in run.steps(data, batch_size=24, microbatches=8, epochs=1000, max_steps=8):
            for batch in step:
                step.backward(model(batch).square().mean(), weight=len(batch))
            optimizer.step()
"""


def test_a_loss_at_the_end_of_an_admission_finds_some_in_the_step_already(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few are left then: who is still at the boundary does not pause there, but with the others after the step."""
    name = script(ONE_TENSOR)
    calm = unisono("run", name, "-n", 1, "--run-dir", tmp_path / "calm")
    assert calm.wait() == 0, calm.err
    faults = Faults().kill("w0", step=3, at="before_combine").kill("w3", at="in_admission")
    for variable, value in faults.environment().items():
        monkeypatch.setenv(variable, value)
    options = ["--workers", "4:4", "--exchange", "two-level", "--set", "simulate-hosts=2"]
    hurt = unisono("run", *options, "--run-dir", tmp_path / "hurt", name)
    hurt.line("paused: 3 of at least 4 workers")
    assert hurt.wait() == 0, hurt.err
    assert compare(tmp_path / "calm", tmp_path / "hurt").startswith("identical: 8 steps")


TRAINS = """
    import torch, unisono

    with unisono.Run(seed=3) as run:
        model = torch.nn.Linear(12, 1)
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        data = torch.ones(48, int(open("width").read()))
        for step in run.steps(data, batch_size=24, microbatches=4, epochs=10**9):
            for x in step:
                step.backward(model(x).square().mean())
"""


def test_a_machine_none_of_whose_workers_can_take_part_is_told_why_and_the_run_goes_on(
    unisono: Unisono, script: Callable[[str], str], run_dir: Path, tmp_path: Path
) -> None:
    """One has another text of the script, one lacks a file: neither has computed anything, and both have failed."""
    name = script(TRAINS)
    (tmp_path / "width").write_text("12")
    command = unisono("run", name, "-n", 1, "--run-dir", run_dir)
    command.line("generation 1 with 1 worker")
    said = {}
    for place, text in (("edited", "# One more line.\n"), ("lacking", "")):
        (tmp_path / place).mkdir()
        (tmp_path / place / name).write_text((tmp_path / name).read_text() + text)
        url = json.loads((run_dir / "head.json").read_text())["url"]
        guest = unisono(
            *("join", url, "--token-file", run_dir / "token", "-n", 2),
            *("--folder", tmp_path / place, "--run-dir", run_dir),
        )
        assert guest.wait() == 1, guest.err
        said[place] = guest.line("none of its workers could take part")
    assert "has a different text of the script" in said["edited"]
    assert "FileNotFoundError" in said["lacking"]
    assert unisono("stop", run_dir).wait() == 0
    assert command.wait() == 0, command.err
    assert not any("replaces it" in line for line in command.err)


def with_newcomer(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of generation 3, whose first step may not be done."""
    if not (run_dir / JOURNAL).exists():
        return []
    return [line for line in steps_of(run_dir) if line["generation"] == 3]


def test_the_journal_names_who_was_admitted_with_a_warning(
    unisono: Unisono, script: Callable[[str], str], run_dir: Path, tmp_path: Path
) -> None:
    """In the line of the first step that it takes part in, and a comparison of two runs does not look at it."""
    name = script(TRAINS)
    (tmp_path / "width").write_text("12")
    command = unisono("run", name, "-n", 2, "--set", "allow-different-script=yes", "--run-dir", run_dir)
    command.line("generation 1 with 2 workers")
    (tmp_path / name).write_text((tmp_path / name).read_text() + "# edited\n")
    os.kill(pid_of("w1", run_dir), signal.SIGKILL)
    command.line("generation 3 with 2 workers")
    deadline = time.monotonic() + WAIT_S
    while len(with_newcomer(run_dir)) < 50:
        assert time.monotonic() < deadline, command.err
        ask_status(find(str(run_dir)))
    assert unisono("stop", run_dir).wait() == 0
    assert command.wait() == 0, command.err
    noted = [line for line in steps_of(run_dir) if "warnings" in line]
    assert noted == with_newcomer(run_dir)[:1]
    assert "has a different text of the script" in noted[0]["warnings"][0]
    without = tmp_path / "without"
    without.mkdir()
    lines = [{key: line[key] for key in line if key != "warnings"} for line in read(run_dir)]
    (without / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare(run_dir, without).startswith("identical")


EDITED = """
    import torch, unisono
    from unisono.cluster.worker import member

    with unisono.Run(seed=3) as run:
        model = torch.nn.Linear(12, 1)
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        batch = 24 if member.spec().worker_id in ("w0", "w1") else 12
        for step in run.steps(torch.ones(48, 12), batch_size=batch, microbatches=4, epochs=10**9):
            for x in step:
                step.backward(model(x).square().mean())
"""


def test_a_newcomer_with_another_recipe_is_refused_and_the_run_goes_on(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an edit of the script: its micro-batches would be others."""
    for variable, value in Faults().kill("w1", step=3, at="after_backward").environment().items():
        monkeypatch.setenv(variable, value)
    run_dir = tmp_path / "run"
    command = unisono("run", script(EDITED), "-n", 2, "--max-restarts", 1, "--run-dir", run_dir)
    command.line("a different recipe from the run")
    assert command.line("batch_size ").split()[-3:] == ["batch_size", "24", "12"]
    command.line("generation 4 with 1 worker")
    assert unisono("stop", run_dir).wait() == 0
    assert command.wait() == 0, command.err


FIRST_ONES_END = """
    import os, runpy
    from unisono.cluster.worker import member

    me = member.current()
    if me.worker_id == "w0":
        os.close(os.open("beginning", os.O_RDONLY))
        os._exit(1)
    me.ready(0)
    me.store.call("num_keys", [])  # and it was heard
    os.close(os.open("beginning", os.O_WRONLY))
    runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_a_machine_that_joins_is_told_what_the_run_was_told(
    option: str, unisono: Unisono, script: Callable[[str], str], tmp_path: Path
) -> None:
    """Its worker is the one that begins here: where the run is to go on from, or in a directory of another run."""
    run_dir = tmp_path / "run"
    training = Path(__file__).with_name("checkpointed_training.py")
    before = run_workers(training, 1, directory=run_dir, arguments=["--steps", "4", "--every", "2"])
    assert before.exit_code == 0, before.output
    os.mkfifo(tmp_path / "beginning")
    name = script(FIRST_ONES_END.format(path=str(training)))
    options = ["--resume", run_dir] if option == "--resume" else ["--overwrite", "--run-dir", run_dir]
    command = unisono("run", "-n", 1, "--max-restarts", 0, *options, name, "--", "--steps", 6, "--every", 0)
    deadline = time.monotonic() + WAIT_S
    while not (run_dir / "head.json").exists():
        assert time.monotonic() < deadline
        os.sched_yield()
    guest = join(unisono, run_dir, 1)
    assert command.wait() == 0, command.err
    assert guest.wait() == 0, guest.err
    lines = steps_of(run_dir)
    assert len(lines) == 6
    assert {line["generation"] for line in lines[4:]} == {1}
    assert [line["digest"] for line in lines[:4]] == before.digests
    kept = [line for line in before.lines if line["kind"] == "step" and line in lines]
    assert len(kept) == (4 if option == "--resume" else 0), "the steps of before are kept, or made again"
