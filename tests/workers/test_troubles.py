"""What the head does with a problem: it is said at once, all are asked, and whatever fails then, the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tests.waiting import WAIT_S
from unisono.cluster.head import troubles
from unisono.cluster.head.connections import ConnectionsByName, Line
from unisono.cluster.head.directory import Directory
from unisono.cluster.head.table import Table
from unisono.cluster.head.troubles import MOST_FILES, Troubles
from unisono.core.events import Announcement, Event, Problem, WorkerLate
from unisono.core.messages import Ailing, Holds, Inquire, MemberInfo, Message, Statement, WriteEvidence
from unisono.core.policy import Policy
from unisono.core.spec import RunSpec
from unisono.membership.roster import Agent, State, Worker, WorkerState
from unisono.record.problems import evidence_files
from unisono.record.problems.kinds import Trouble
from unisono.record.rundir import RUN_FILE

pytestmark = pytest.mark.more

HANG = Trouble(kind="hang", worker_id="w1", host="b", step=4, where="step 4", seconds=60.0)
TOKEN = "the-token-of-this-run"


def member(worker_id: str) -> Worker:
    info = MemberInfo(worker_id=worker_id, host="b", pid=1, device="cpu")
    return Worker(worker_id=worker_id, state=WorkerState.HOLDING, agent="agent0", info=info)


class Lines(ConnectionsByName):
    """Connections that keep what is sent to several."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.update(dict.fromkeys(names, cast("Line", None)))
        self.sent: list[tuple[list[str], Message]] = []

    def send_all(self, names: Iterable[str], message: Message) -> None:
        self.sent.append((list(names), message))


class Lab:
    """A head with two workers and an agent; the test answers for them."""

    def __init__(self, directory: Path, *, sees: bool = True) -> None:
        self.path = directory
        self.lines = Lines(("w0", "w1", "agent0"))
        self.events: list[Event] = []
        state = State(
            policy=Policy(start=2, maximum=2),
            agents={"agent0": Agent(agent_id="agent0", host="b", primary=True)},
            workers={name: member(name) for name in ("w0", "w1")},
        )
        seen = {"may_write": True, "is_held": sees, "seers": {} if sees else {"agent0": None}, "facts": ""}
        self.troubles = Troubles(
            cast("Table", SimpleNamespace(state=state)),
            self.lines,
            cast("Directory", SimpleNamespace(path=str(directory), **seen)),
            "run1",
            RunSpec(arguments=("train.py", f"wss://{TOKEN}@host:1")),
            TOKEN,
            self.events.append,
        )
        directory.mkdir()
        (directory / RUN_FILE).write_text('{"run_id": "run1"}')

    @property
    def told(self) -> list[Problem]:
        return [event for event in self.events if isinstance(event, Problem)]

    @property
    def announced(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Announcement)]

    @property
    def asked(self) -> list[tuple[list[str], Inquire]]:
        return [(names, message) for names, message in self.lines.sent if isinstance(message, Inquire)]

    @property
    def handed(self) -> dict[str, str]:
        return {message.name: message.text for _, message in self.lines.sent if isinstance(message, WriteEvidence)}

    def answer(self, name: str, text: str) -> None:
        self.troubles.heard(name, Statement(number=self.asked[-1][1].number, text=text))

    def files(self) -> list[str]:
        return [file.read_text() for file in sorted((self.path / "problems").glob("*.txt"))]

    async def written(self) -> None:
        """Wait until all that was begun is written, or has failed."""
        await asyncio.wait(self.troubles.tasks, timeout=WAIT_S)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that writes may have to wait for its turn."""
    monkeypatch.setattr(troubles, "END_S", WAIT_S)


def play(lab: Lab, story: Callable[[Lab], Awaitable[None]]) -> Lab:
    async def run() -> None:
        await story(lab)
        await lab.troubles.end()

    asyncio.run(run())
    return lab


def test_a_problem_is_said_before_anybody_has_answered(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        lab.troubles.take(HANG)
        assert lab.told[0].text.startswith("w1 on host b hung in step 4: it has made no progress for 60 s. ")
        assert lab.told[0].evidence.startswith("problems/")
        assert lab.asked[0][0] == ["w1", "w0", "agent0"], "the culprit first"
        for name in ("w0", "w1", "agent0"):
            lab.answer(name, f"{name} says so")
        await lab.written()

    (content,) = play(Lab(tmp_path / "run"), story).files()
    assert "[w1]\nw1 says so\n\n[w0]\nw0 says so" in content
    assert "[b]\nagent0 says so" in content, "the machine by its name"
    assert TOKEN not in content


def test_who_does_not_answer_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles, "ANSWER_S", 0.05)

    async def story(lab: Lab) -> None:
        lab.troubles.take(HANG)
        lab.answer("w0", "in the sum")
        lab.answer("agent0", "much memory")
        await lab.written()

    (content,) = play(Lab(tmp_path / "run"), story).files()
    assert (
        "[w1]\n(no answer: nothing within 0 s: its process has ended, or native code holds its interpreter)" in content
    )
    assert "[w0]\nin the sum" in content


def test_what_a_worker_has_said_when_it_was_late_names_the_line_at_which_it_hangs(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        late = Statement(number=-1, text="main thread: ...", place="dataset.py:33 __getitem__")
        lab.troubles.heard("w1", late)
        lab.troubles.take(HANG)
        lab.troubles.gone("w1")
        lab.answer("w0", "in the sum")
        lab.answer("agent0", "x")
        await lab.written()

    lab = play(Lab(tmp_path / "run"), story)
    assert "its main thread has been in dataset.py:33 __getitem__ for 60 s" in lab.told[0].text
    assert "[w1]\n(when it was late)\nmain thread: ..." in lab.files()[0]


def test_after_a_loss_the_others_are_asked_later_and_at_the_end_of_the_run_at_once(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        del lab.lines["w1"]
        lab.troubles.take(Trouble(kind="crash", worker_id="w1", exit_code=-9))
        assert lab.told
        assert not lab.asked, "they go on first"
        lab.troubles.hurry()
        assert lab.asked[0][0] == ["w0", "agent0"]
        lab.troubles.hurry()
        assert len(lab.asked) == 1

    (content,) = play(Lab(tmp_path / "run"), story).files()
    assert "w1 was killed by signal 9 (SIGKILL)" in content


def test_one_problem_is_said_once(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        for _ in range(3):
            lab.troubles.take(HANG)
        lab.troubles.take(Trouble(kind="hang", worker_id="w1", step=5))

    assert [problem.step for problem in play(Lab(tmp_path / "run"), story).told] == [4, 5]


def test_so_many_problems_have_a_file_and_all_have_a_sentence(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        for step in range(MOST_FILES + 5):
            lab.troubles.take(Trouble(kind="hang", worker_id="w1", step=step))

    lab = play(Lab(tmp_path / "run"), story)
    assert len(lab.files()) == MOST_FILES
    assert [bool(problem.evidence) for problem in lab.told] == [True] * MOST_FILES + [False] * 5


def test_a_full_disk_costs_the_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def story(lab: Lab) -> None:
        monkeypatch.setattr(evidence_files, "write_whole", no_room)
        lab.troubles.take(HANG)
        for name in ("w0", "w1", "agent0"):
            lab.answer(name, "x")
        await lab.written()

    lab = play(Lab(tmp_path / "run"), story)
    assert lab.announced == [f"{lab.told[0].evidence} could not be written: No space left on device"]


def test_a_disk_that_stands_still_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    still = threading.Event()
    monkeypatch.setattr(troubles, "write", lambda *_: still.wait(WAIT_S))
    monkeypatch.setattr(troubles, "END_S", 0.05)

    async def story(lab: Lab) -> None:
        lab.troubles.take(HANG)
        for name in ("w0", "w1", "agent0"):
            lab.answer(name, "x")

    lab = play(Lab(tmp_path / "run"), story)
    assert not still.is_set(), "the end of the head did not wait for it"
    assert lab.told
    still.set()


def test_a_directory_of_another_run_is_left_alone(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "run")
    (tmp_path / "run" / RUN_FILE).write_text('{"run_id": "another"}')

    async def story(lab: Lab) -> None:
        lab.troubles.take(HANG)

    play(lab, story)
    assert not (tmp_path / "run" / evidence_files.FOLDER).exists()


@pytest.mark.parametrize("ends_run", [False, True])
def test_where_the_head_does_not_see_the_directory_another_machine_writes(tmp_path: Path, ends_run: bool) -> None:
    """At the end of the run before that machine has gone, without waiting for answers."""

    async def story(lab: Lab) -> None:
        lab.troubles.take(Trouble(kind="hang", worker_id="w1", step=4, ends_run=ends_run))
        assert bool(lab.handed) == ends_run
        if not ends_run:
            for name in ("w0", "w1", "agent0"):
                lab.answer(name, "x")
            await lab.written()

    lab = play(Lab(tmp_path / "run", sees=False), story)
    (name,) = lab.handed
    assert lab.told[0].evidence == f"problems/{name}"
    assert TOKEN not in lab.handed[name]


def test_of_all_workers_that_have_found_a_bad_gradient_the_first_micro_batch_counts(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        lab.troubles.ails("w0", Ailing(step=7, microbatch=5, samples=[50]))
        lab.troubles.ails("w1", Ailing(step=7, microbatch=2, samples=[17, 3]))
        lab.troubles.ails("w2", Ailing(step=7, microbatch=-1))
        lab.troubles.hurry()

    (problem,) = play(Lab(tmp_path / "run"), story).told
    assert problem.text.startswith("the gradient is not finite in step 7, micro-batch 2 (samples 17, 3), which w1 ")
    assert (problem.problem, problem.worker_id, problem.step) == ("nan", "w1", 7)


def test_a_process_that_was_killed_for_its_memory_has_said_before_what_held_it(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        held = {"parameters": 10**9, "optimizer state": 2 * 10**9}
        lab.troubles.holds("w1", Holds(kinds=held, batch_size=64, microbatches=2))
        lab.troubles.take(
            Trouble(
                kind="out-of-memory",
                worker_id="w1",
                host="b",
                exit_code=-9,
                killed_for="the kernel has killed it",
                peak_bytes=8 * 10**9,
                limit_bytes=8 * 10**9,
            )
        )

    lab = play(Lab(tmp_path / "run"), story)
    assert "microbatches=8 instead of 2, so 8 samples each" in lab.told[0].text
    assert "optimizer state                   2.0 GB" in lab.files()[0]


@pytest.mark.parametrize(
    ("limit", "known", "told"), [(2, 9, True), (2, 0, True), (2, 2, False), (0, 9, False), (7, 9, False)]
)
def test_who_was_killed_within_a_control_group_of_its_own_is_told_its_limit(
    limit: int, known: int, told: bool, tmp_path: Path
) -> None:
    """And not that of the machine, which the command sees. A worker that had less was killed for something else."""

    async def story(lab: Lab) -> None:
        held = Holds(kinds={"parameters": 10**9}, batch_size=64, microbatches=2, limit_bytes=limit * 10**9)
        lab.troubles.holds("w1", held)
        trouble = Trouble(kind="out-of-memory", worker_id="w1", exit_code=-9, killed_for="the kernel has killed it")
        lab.troubles.take(msgspec.structs.replace(trouble, peak_bytes=2 * 10**9, limit_bytes=known * 10**9))

    (problem,) = play(Lab(tmp_path / "run"), story).told
    words = "because its control group ran out of memory (2.0 GB)"
    assert (words in problem.text) == told, problem.text


def test_the_last_events_are_in_the_file(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        for number in range(100):
            lab.troubles.note(Announcement(text=f"sentence {number}"))
        lab.troubles.note(WorkerLate(worker_id="w1", step=4, microbatch=2, seconds=3.5))
        lab.troubles.take(HANG)

    (content,) = play(Lab(tmp_path / "run"), story).files()
    assert "sentence 99" in content
    assert "sentence 50" not in content
    assert "late: worker_id='w1', step=4, microbatch=2, seconds=3.5" in content
