"""The machine with the head dies, or is cut off: the run goes on, with the same bits and one journal."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.hosts.lab import Lab, laid
from tests.parts import ALL
from tests.waiting import WAIT_S
from tests.workers import small_training
from tests.workers.conftest import Command, Unisono
from tests.workers.gates import Gates
from unisono.record.journal import compare, read
from unisono.record.journal.times import by_step

SCRIPT = Path(small_training.__file__)
STEPS = 60
MACHINES = 5 if ALL else 3
CASES: Final[list[tuple[int, set[int], str]]] = [
    (2, {1}, "nothing from the head"),
    (2, {1}, "nothing to the head"),
    (2, {1}, "mended soon"),
    (2, {1}, "cut again"),
    (3, {2}, "cut"),
    (3, {1, 2}, "cut"),
    (3, {1, 2}, "cut again"),
    (3, {0}, "not mended"),
    (5, {2, 3, 4}, "cut"),
    (5, {1, 2}, "nothing to the head"),
    (5, {4}, "mended soon"),
]
"""Machines, those of the side without the head (or with it alone), and what becomes of the network."""
CUTS: Final = (
    [(seconds, 20, busy) for seconds in range(20, 36) for busy in (False, True)]
    if ALL
    else [(seconds, 1, False) for seconds in (6, 7, 8)]
)
"""How long the cable is out, `--set head-away`, and whether a program takes all cores. A connection breaks after 5 s,
so the cable is back about when the machine that is cut off gets a head of its own.
"""
QUICK: Final = ("--set", "head-away=1s", "--set", "heartbeat-timeout=4s")
"""Where machines are cut off: who is silent is lost soon, and who has lost the head goes on soon."""
JOINS = (3, 8, 13, 18)
"""Steps at whose beginning machines join, one after the other."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with laid(MACHINES) as lab:
        yield lab


@pytest.fixture(autouse=True)
def whole(lab: Lab) -> Iterator[None]:
    """After each test all machines reach each other again."""
    yield
    lab.mend()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    command = [sys.executable, "-P", "-m", "unisono", "run", "-n", "1", "--run-dir", folder, SCRIPT]
    outcome = subprocess.run([*command, "--", "--steps", str(STEPS)], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return folder


def started(
    lab: Lab,
    unisono: Unisono,
    run_dir: Path,
    gates: Gates,
    *options: object,
    machines: int,
    others: Gates | None = None,
    private: Path | None = None,
) -> list[Command]:
    """A run with a worker on each of so many machines, all in the generation that trains, at gate 20.

    Args:
        others: the gates of all machines but the first; default: the same.
        private: what the first machine has in place of the folder of the run's directory; default: all see the same.
    """
    first, *guests = lab.machines[:machines]
    own = f"mount --bind {others.folder} {gates.folder}" if others is not None else ""
    disk = f"mount --bind {private} {run_dir.parent}" if private is not None else ""
    options = ("--bind", first.address, "--set", "heartbeat=0.3s", "--set", "exchange-timeout=3600s", *options)
    script = ("--", "--steps", STEPS, "--gates", gates.folder)
    commands = [first.start(unisono, "run", SCRIPT, "-n", 1, "--run-dir", run_dir, *options, *script, set_up=disk)]
    token = gates.folder.parent / "token"
    for number, machine in enumerate(guests, 2):
        gate = JOINS[number - 2]
        gates.wait(gate)
        seen = (private or run_dir.parent) / run_dir.name
        url = json.loads((seen / "head.json").read_text())["url"]
        token.write_text((seen / "token").read_text())
        commands.append(machine.start(unisono, "join", url, "--token-file", token, "-n", 1, set_up=own))
        gates.open(gate, commands[0].generation(f"with {number} workers"))
    if others is not None:
        others.wait(20, workers=machines - 1)
    gates.wait(20, workers=machines if others is None else 1)
    return commands


def workers_at(run_dir: Path, step: int) -> set[str]:
    return set(by_step(run_dir)[step])


@pytest.mark.parametrize("machines", [2, 3])
def test_the_machine_with_the_head_dies(machines: int, lab: Lab, unisono: Unisono, calm: Path, tmp_path: Path) -> None:
    """Another machine starts the next head; the survivors finish the step; `unisono watch --once` finds the head."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (*JOINS[: machines - 1], 20, 40)) as gates:
        _, *survivors = started(lab, unisono, run_dir, gates, machines=machines)
        before = json.loads((run_dir / "head.json").read_text())["url"]
        lab.machines[0].kill()
        gates.open(20)
        gates.wait(40, workers=machines - 1)
        assert json.loads((run_dir / "head.json").read_text())["url"] != before
        status = unisono("watch", "--once", run_dir, "--json", before=lab.machines[1].inside())
        assert status.wait() == 0, status.err
        assert len(json.loads("\n".join(status.out))["workers"]) == machines - 1
        gates.open(40)
        for survivor in survivors:
            assert survivor.wait() == 0, survivor.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert len(workers_at(run_dir, 19)) == machines
    assert len(workers_at(run_dir, 59)) == machines - 1
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert len({json.dumps(event) for event in events}) == len(events), "nothing is told twice"
    (gone,) = [event for event in events if event["kind"] == "machine-gone"]
    assert gone["host"].startswith("m0-")
    lost = [event for event in events if event["kind"] == "gone" and event["how"] == "lost"]
    assert [(event["worker_id"], event["host"]) for event in lost] == [("w0", gone["host"])]
    assert "is out of reach, with the head" in lost[0]["reason"]
    joined = [event["worker_id"] for event in events if event["kind"] == "joined"]
    assert sorted(joined) == [f"w{number}" for number in range(machines)]
    assert [event["seconds"] > 0 for event in events if event["kind"] == "interruption"][-1:] == [True]
    (end,) = [event for event in events if event["kind"] == "end"]
    assert (end["ok"], end["step"], bool(end["digests"])) == (True, STEPS - 1, True)
    said = " ".join(survivors[0].err)
    assert "this machine runs the next head" in said
    assert "m0-" in said
    assert "is out of reach, with the head: the run continues without w0" in said


def test_a_machine_that_alone_saw_the_directory_dies(lab: Lab, unisono: Unisono, calm: Path, tmp_path: Path) -> None:
    """The run goes on in a directory of the machine that has the next head."""
    private, run_dir = tmp_path / "private", tmp_path / "common" / "run"
    private.mkdir()
    run_dir.parent.mkdir()
    with Gates(tmp_path / "gates", (*JOINS[:1], 20, 40)) as gates:
        _, survivor = started(lab, unisono, run_dir, gates, machines=2, private=private)
        assert not run_dir.exists()
        lab.machines[0].kill()
        gates.open(20)
        survivor.line("journal and checkpoints continue")
        gates.wait(40)
        assert json.loads((run_dir / "head.json").read_text())["run_id"]
        gates.open(40)
        assert survivor.wait() == 0, survivor.err
    assert compare(calm, run_dir).startswith("identical: 5")
    assert {line["step"] for line in read(run_dir) if line["kind"] == "step"} >= {*range(4, STEPS)}
    assert f"journal and checkpoints continue in {run_dir} of this machine" in " ".join(survivor.err)


@pytest.mark.parametrize("ahead", ["left", "right"])
def test_both_sides_of_a_cut_network_go_on_and_the_side_that_is_behind_joins_the_other(
    ahead: str, lab: Lab, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    """The left side has the first head. Both see the same directory, into which one side writes at a time."""
    run_dir = tmp_path / "run"
    steps = (20, 40, 50)
    with Gates(tmp_path / "gates", (*JOINS[:1], *steps)) as gates, Gates(tmp_path / "others", steps) as others:
        left, right = started(lab, unisono, run_dir, gates, *QUICK, machines=2, others=others)
        lab.cut({1})
        gates.open(20)
        others.open(20)
        first, second = (gates, others) if ahead == "left" else (others, gates)
        for each in (gates, others):
            each.wait(40)
        first.open(40)
        first.wait(50)
        assert len(workers_at(run_dir, 30)) == 1
        lab.mend()
        stays, moves = (left, right) if ahead == "left" else (right, left)
        moves.line("this machine joins the head at")
        second.open(40)
        second.open(50)
        first.open(50, stays.generation("with 2 workers", after="is out of reach|silent"))
        assert right.wait() == 0, right.err
        assert left.wait() == 0, left.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert len(workers_at(run_dir, 59)) == 2


def test_sides_with_a_directory_each_go_on_in_that_of_the_side_that_stays(
    lab: Lab, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    """The other directory keeps what was written there, and nobody writes into it any more."""
    private, run_dir = tmp_path / "private", tmp_path / "common" / "run"
    private.mkdir()
    run_dir.parent.mkdir()
    with Gates(tmp_path / "gates", (*JOINS[:1], 20, 40)) as gates:
        left, right = started(lab, unisono, run_dir, gates, *QUICK, machines=2, private=private)
        lab.cut({1})
        gates.open(20)
        gates.wait(40, workers=2)
        assert (run_dir / "run.json").exists()
        lab.mend()
        first_line([left, right], "keeps what was written so far")
        first_line([left, right], " is back")
        gates.open(40)
        for command in (left, right):
            assert command.wait() == 0, command.err
    stays = next(folder for folder in (private / "run", run_dir) if (folder / "run.json").exists())
    leaves = next(folder for folder in (private / "run", run_dir) if folder != stays)
    assert (leaves / "run.left.json").exists()
    assert compare(calm, stays).startswith("identical: ")
    assert max(line["step"] for line in read(stays) if line["kind"] == "step") == STEPS - 1
    assert max(line["step"] for line in read(leaves) if line["kind"] == "step") < 41


def first_line(commands: Sequence[Command], text: str) -> None:
    """Wait until one of these commands says this."""
    deadline = time.monotonic() + WAIT_S
    while not any(text in line for command in commands for line in command.err):
        assert time.monotonic() < deadline, "\n".join(line for command in commands for line in command.err)
        select.select([], [], [], 0.05)


@pytest.fixture
def load(request: pytest.FixtureRequest) -> Iterator[None]:
    """A program that takes all cores, if the test asks for it."""
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command) for _ in range((os.cpu_count() or 1) * request.param)]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.parametrize(
    ("seconds", "away_s", "load"),
    CUTS,
    indirect=["load"],
    ids=[f"{seconds}-{'busy' if busy else 'rest'}" for seconds, _, busy in CUTS],
)
@pytest.mark.usefixtures("load")
def test_two_machines_are_one_run_again_however_long_the_cable_was_out(
    seconds: int, away_s: int, lab: Lab, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (*JOINS[:1], 20, 40)) as gates:
        commands = started(lab, unisono, run_dir, gates, "--set", f"head-away={away_s}s", machines=2)
        lab.cut({1})
        gates.open(20)
        select.select([], [], [], seconds)
        said = [len(command.err) for command in commands]
        lab.mend()
        generation = generation_of_two(commands, said)
        gates.open(40, generation)
        for command in commands:
            assert command.wait() == 0, "\n".join(line for command in commands for line in command.err)
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    # Where the machine was lost and back within moments, the step that was under way then may be that of two again.
    assert len(workers_at(run_dir, 30)) in ((1, 2) if generation > BEFORE else (2,))
    assert len(workers_at(run_dir, 59)) == 2


BEFORE: Final = 2
"""The generation in which two machines train before the network is cut."""


def generation_of_two(commands: Sequence[Command], said: Sequence[int]) -> int:
    """Wait until both machines train, and return the generation in which they do.

    One of the commands announces it. Or it is that of before: the machine was back before anybody was lost, which can
    happen where the cable is out for hardly longer than a connection takes to break.

    Args:
        said: how many lines each command had printed before the network was mended.
    """
    announced = re.compile(r"\bgeneration (\d+) with (\d+) worker")
    deadline = time.monotonic() + WAIT_S
    while True:
        lines = [line for command, before in zip(commands, said, strict=True) for line in command.err[before:]]
        for found in filter(None, map(announced.search, lines)):
            if found[2] == "2":
                return int(found[1])
        newest = [list(filter(None, map(announced.search, command.err)))[-1].groups() for command in commands]
        if newest == [(str(BEFORE), "2")] * 2 and any(line.endswith(" is back") for line in lines):
            return BEFORE
        assert time.monotonic() < deadline, "\n".join(line for command in commands for line in command.err)
        assert all(command.process.poll() is None for command in commands), "\n".join(lines)
        select.select([], [], [], 0.05)


@pytest.mark.parametrize(
    ("machines", "side", "how"),
    CASES if ALL else CASES[:1],
    ids=[f"{machines}-{len(side)}-{how.replace(' ', '-')}" for machines, side, how in (CASES if ALL else CASES[:1])],
)
def test_whatever_becomes_of_the_network_the_bits_are_the_same(
    machines: int, side: set[int], how: str, lab: Lab, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    """All machines end well, with one journal, into which one side at a time has written."""
    run_dir = tmp_path / "run"
    # What the head says still arrives where nothing comes back: its workers there hear that they are lost, and end.
    is_alone = how in ("mended soon", "nothing to the head")
    options = ("--set", "head-away=60s", "--set", "heartbeat-timeout=4s") if is_alone else QUICK
    with Gates(tmp_path / "gates", (*JOINS[: machines - 1], 20, 40)) as gates:
        commands = started(lab, unisono, run_dir, gates, *options, machines=machines)
        with_head = {*range(machines)} - side if 0 not in side else side
        deaf = with_head if how == "nothing to the head" else {*range(machines)} - with_head
        lab.cut(deaf, only_from="nothing" in how)
        gates.open(20)
        gates.wait(40, workers=len(with_head) if is_alone else machines)
        if how != "not mended":
            lab.mend()
        if how == "cut again":
            first_line(commands, "this machine joins the head at")
            lab.cut(side)
            lab.mend()
            first_line(commands, " is back")
        if is_alone:
            gates.open(40, commands[0].generation("join", after="has been silent|has closed its connection"))
        else:
            if how == "cut":
                first_line(commands, "this machine joins the head at")
            gates.open(40)
        for command in commands:
            assert command.wait() == 0, command.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")
    assert len(workers_at(run_dir, 30)) < machines
