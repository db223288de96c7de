"""The terminal of a run: `unisono run` in one, and `unisono watch`, which looks at a run that goes on or has ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.screens import Terminal
from tests.pure.test_journal import end, evaluation, journal_of, step
from tests.pure.test_overview import members
from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.cli import looking
from unisono.cli.looking import as_invitation, look
from unisono.cli.reach import find
from unisono.core.errors import UsageError
from unisono.core.events import RunEnded, RunStarted, WorkerOutput
from unisono.record.overview import Overview
from unisono.views.watch.terminal import screen as screens
from unisono.views.watch.terminal.keys import Keyboard
from unisono.views.watch.terminal.live import Live
from unisono.views.watch.terminal.plain_lines import OverviewLines
from unisono.views.watch.terminal.screen import Screen

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).parent / "small_training.py"


class Pty:
    """A terminal of 80 columns and 24 rows that nobody reads, but by `until`."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.ours, (24, 80))
        self.shown = b""

    def until(self, text: str) -> str:
        """Read until the terminal was told this text; returns all that it was told."""
        while text.encode() not in self.shown:
            self._read()
        return self.shown.decode(errors="replace")

    def rest(self) -> str:
        """Read until nobody has the other side any more."""
        with contextlib.suppress(OSError):
            while True:
                self._read()
        return self.shown.decode(errors="replace")

    def _read(self) -> None:
        ready, _, _ = select.select([self.ours], [], [], WAIT_S)
        assert ready, f"nothing more within {WAIT_S:.0f} s, after {self.shown[-500:]!r}"
        data = os.read(self.ours, 65536)
        if not data:
            raise OSError("closed")
        self.shown += data

    def close(self) -> None:
        for descriptor in (self.ours, self.theirs):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LANG", "C.UTF-8")
    found = Pty()
    yield found
    found.close()


def written_to(terminal: Pty, picture: str = "a picture") -> Screen:
    return Screen(
        terminal.theirs, "utf-8", lambda columns, rows: ([[(picture, "")]], "in short"), colours=False,
        share=lambda rows: rows - 4,
    )  # fmt: skip


# -- what writes to a terminal ---------------------------------------------------------------------------


def test_a_terminal_that_nobody_reads_holds_nobody_up(terminal: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "CLOSE_S", 0.01)
    monkeypatch.setattr(screens, "MOST_LINES", 1000)
    screen = written_to(terminal)
    for number in range(5000):
        screen.put(f"line {number} " + "x" * 200)
    screen.close("the end")  # the terminal has taken a few kilobytes
    shown = terminal.until("the end")
    assert "lines are left out here: the terminal was too slow" in shown
    assert "line 4999 " in shown


def test_a_terminal_that_is_closed_is_no_error(terminal: Pty) -> None:
    screen = written_to(terminal)
    os.close(terminal.ours)
    screen.show()
    for number in range(10):
        screen.put(f"line {number}")
    screen.close("the end")
    assert screen._is_gone


def test_the_picture_stays_below_all_lines_and_what_is_said_last_below_the_picture(terminal: Pty) -> None:
    screen = written_to(terminal)
    screen.show()
    screen.put("one")
    terminal.until("a picture")
    screen.put("two")
    screen.close("the end")
    emulated = Terminal(80, 24)
    emulated.write(terminal.until("the end"))
    assert emulated.text[:4] == ["one", "two", "a picture", "the end"]


def test_after_a_stop_the_picture_is_drawn_anew_below_what_the_shell_has_written(terminal: Pty) -> None:
    screen = written_to(terminal)
    screen.show()
    terminal.until("a picture")
    os.kill(os.getpid(), signal.SIGCONT)
    screen.refresh()
    terminal.shown = b""
    again = terminal.until("a picture")
    screen.close()
    assert "A\r" not in again, "what is above the cursor is not the picture any more"


def test_in_the_background_a_line_takes_the_place_of_the_picture(
    terminal: Pty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
    screen = written_to(terminal)
    screen.show()
    screen.put("one")
    terminal.until("in short")
    screen.close("the end")
    shown = terminal.until("the end")
    assert "one" in shown
    assert "a picture" not in shown
    assert "\x1b" not in shown


@pytest.mark.usefixtures("nursery")
def test_a_run_ends_although_nobody_reads_its_terminal(
    terminal: Pty, script: Callable[[str], str], tmp_path: Path
) -> None:
    """As with a connection that hangs: the terminal takes a few kilobytes, and this prints some hundred."""
    name = script("for number in range(3000):\n    print(number, 'x' * 100)\nopen('done', 'w').close()\n")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "unisono", "run", name, "-n", "1"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        start_new_session=True,
    )
    try:
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "done").exists()


@pytest.mark.usefixtures("nursery")
def test_a_run_in_a_terminal_ends_with_its_summary(terminal: Pty, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "unisono", "run", SCRIPT, "-n", "2", "--run-dir", tmp_path / "run"],
        stdin=subprocess.DEVNULL,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        start_new_session=True,
    )
    try:
        shown = terminal.until("finished: ")
        assert process.wait(WAIT_S) == 0
        os.close(terminal.theirs)
        assert "no more events" not in shown + terminal.rest()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("colours", [True, False])
def test_a_run_in_a_terminal_shows_no_character_of_its_workers_that_a_terminal_obeys(
    terminal: Pty, monkeypatch: pytest.MonkeyPatch, colours: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")

    class Out(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return terminal.theirs

    monkeypatch.setattr(sys, "stdout", Out())
    monkeypatch.setattr(sys, "stderr", Out())
    live = Live()
    for event in (
        RunStarted(run_id="r1", directory="runs/\x1b[2Jone", step=0, recipe={}),
        members(1, "w0", "w1"),
        WorkerOutput(source="w0", text="\x1b]0;title\x07\x1b[10A\x1b[31mred\x1b[0m", is_error=False),
        WorkerOutput(source="w1", text="to standard error\x08\x08", is_error=True),
        step(0, loss=0.25),
        RunEnded(ok=False, reason="w1 has failed", digests={}, traceback="KeyError: 3\n"),
    ):
        live.emit(event)
    live.close()
    emulated = Terminal(80, 24)
    emulated.write(terminal.until("KeyError: 3"))  # raises at any sequence that the library does not write
    shown = "\n".join(emulated.text)
    assert ("31" in emulated.styles) is colours
    assert colours or not emulated.styles
    assert emulated.text[:2] == ["[w0] red", "[w1] to standard error"]
    assert "runs/one" in shown
    assert "loss 0.2500" in shown
    assert [line for line in emulated.text if line][-2:] == ["failed: w1 has failed", "KeyError: 3"]


def test_keys_come_one_by_one_and_the_terminal_is_as_before_afterwards(terminal: Pty) -> None:
    before = termios.tcgetattr(terminal.theirs)
    with Keyboard(terminal.theirs) as keys:
        os.write(terminal.ours, b"x\x1b[Bq\t")
        found = keys.wait(WAIT_S)
        while len(found) < 4:
            found += keys.wait(WAIT_S)
        assert found == ["x", "down", "q", "\t"]
        os.close(terminal.ours)
        assert keys.wait(WAIT_S) == ["q"], "a terminal that is gone ends the view"
    assert before[3] & termios.ICANON


# -- unisono watch, of a run that has ended ----------------------------------------------------------------


def ended_run(folder: Path, *, ok: bool = True, reason: str = "") -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(
        json.dumps({"run_id": "r1", "command": {"folder": "/", "arguments": ["train.py"]}})
    )
    journal = journal_of(folder, writer=True)
    for number in range(6):
        journal.emit(step(number, time=1_700_000_000.0 + number))
    journal.emit(evaluation(6, right=5))
    journal.emit(end(ok, reason=reason))
    return folder


def test_a_finished_run_is_shown_once(unisono: Unisono, tmp_path: Path) -> None:
    command = unisono("watch", ended_run(tmp_path / "run"), "--once")
    assert command.wait() == 0
    assert "finished" in command.out[0]
    assert "6 of 9 steps" in command.out[1]
    objects = unisono("watch", tmp_path / "run", "--once", "--json")
    assert objects.wait() == 0
    assert json.loads("\n".join(objects.out))["state"] == "finished"
    assert "\x1b" not in "".join(command.out)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_a_finished_run_is_told_in_lines_and_as_json(unisono: Unisono, tmp_path: Path, ok: bool, code: int) -> None:
    run = ended_run(tmp_path / "run", ok=ok, reason="" if ok else "KeyError: 3")
    lines, objects = unisono("watch", run), unisono("watch", run, "--json")
    assert (lines.wait(), objects.wait()) == (code, code)
    state = "finished" if ok else "failed"
    assert re.search(rf" unisono: {state}: 6 of 9 steps  loss 0\.0833", lines.out[-1])
    found = msgspec.json.decode("\n".join(objects.out), type=Overview)
    assert (found.state, found.step, found.evaluation) == (state, 5, {"right": 5.0})


@pytest.mark.parametrize("option", [[], ["--json"], ["--once"]], ids=str)
def test_a_reader_that_goes_is_no_error(option: list[str], tmp_path: Path, mark: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-P", "-m", "unisono", "watch", ended_run(tmp_path / "run"), *option]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_finished_run_fills_a_terminal_until_the_user_quits(tmp_path: Path, terminal: Pty, mark: str) -> None:
    run = ended_run(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "unisono", "watch", run],
        stdin=terminal.theirs,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        start_new_session=True,
    )
    os.close(terminal.theirs)
    try:
        terminal.until("q quit")
        os.write(terminal.ours, b"\t")
        terminal.until("[workers]")
        os.write(terminal.ours, b"?")
        terminal.until("the run continues")
        os.write(terminal.ours, b"xq")
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    emulated = Terminal(80, 24)
    emulated.write(terminal.rest())
    assert "finished" in emulated.text[0], "the last picture stays"
    assert not any("q quit" in line for line in emulated.text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "there is no run directory missing"),
        (["."], "there is no run in ."),
        (["one", "two"], "one run fits a terminal, got 2; --web overlays several"),
        (["ws://127.0.0.1:1"], "the invitation has no token"),
        (["http://127.0.0.1:1/"], "the invitation has no token: ws://127.0.0.1:1 is where the head listens"),
        (["ws://x@127.0.0.1:1"], "no head answers at ws://127.0.0.1:1"),
        (["--web", "missing"], "there is no run directory missing"),
        (["--web", ".", "ws://x@127.0.0.1:1"], "several runs are overlaid from their directories"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "-",
)
def test_what_cannot_be_watched_is_said_in_one_line(unisono: Unisono, arguments: list[str], words: str) -> None:
    command = unisono("watch", *arguments)
    assert command.wait() == 2
    assert (command.out, len(command.err)) == ([], 1)
    assert words in command.err[0]


def test_a_run_that_was_killed_is_said_to_be_unknown(tmp_path: Path) -> None:
    run = ended_run(tmp_path / "run")
    text = (run / "journal.jsonl").read_text().splitlines()
    (run / "journal.jsonl").write_text("\n".join(text[:-1]) + "\n")
    seen = next(look(str(run)))
    assert seen.overview is not None
    assert (seen.overview.state, seen.is_over) == ("unknown", True)
    assert "no head answers, and the journal has no end" in seen.overview.reason


# -- unisono watch, of a run that goes on --------------------------------------------------------------------


@pytest.mark.usefixtures("nursery")
def test_a_run_is_watched_from_its_directory_or_over_a_network_until_it_ends(unisono: Unisono, tmp_path: Path) -> None:
    with Gates(tmp_path / "gates", (5,)) as gates:
        run = unisono("run", SCRIPT, "-n", 2, "--run-dir", "run", "--", "--steps", 8, "--gates", gates.folder)
        gates.wait(5)
        (tmp_path / "line").write_text(find(str(tmp_path / "run")).for_looking.line)
        here = unisono("watch", "run", "--json")
        piped = ["sh", "-c", 'exec "$@" < line', "sh"]
        there = unisono("watch", "-", before=piped)
        for words in ("--once", "--json"):
            once = unisono("watch", "-", "--once", words, before=piped)
            assert once.wait() == 0
            assert once.out
        page = unisono("watch", "run", "--web")
        assert page.wait() == 0
        by_address = unisono("watch", find(str(tmp_path / "run")).page, "--once")
        assert by_address.wait() == 0
        assert "shown on a terminal only" in page.out[0]
        assert "token=" not in "".join(page.out)
        here.line('"run_id":')
        there.line(" of 8 steps  loss ")
        gates.open(5)
        assert run.wait() == 0
        assert (here.wait(), there.wait()) == (0, 0)
    assert msgspec.json.decode(here.out[-1], type=Overview).state == "finished"
    assert "finished: 8 of 8 steps" in there.out[-1]


@pytest.mark.parametrize(
    ("run", "invitation"),
    [
        ("runs/one", "runs/one"),
        ("wss://token@host:4000#00", "wss://token@host:4000#00"),
        ("http://127.0.0.1:4000/?token=r-ab%2Fc", "ws://r-ab%2Fc@127.0.0.1:4000"),
        ("https://[::1]:4000/?token=r-abc", "wss://r-abc@[::1]:4000"),
        ("http://127.0.0.1:4000/", "ws://@127.0.0.1:4000"),
    ],
)
def test_the_address_of_a_page_is_an_invitation(run: str, invitation: str) -> None:
    assert as_invitation(run) == invitation


class Head:
    """Stands for the connection to a head: gives pushes, and then an error."""

    def __init__(self, *pushes: dict[str, Any] | OSError) -> None:
        self._pushes = list(pushes)

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        push = self._pushes.pop(0)
        if isinstance(push, OSError):
            raise push
        return push


def pushed(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(Overview(**{"state": "training", **changes}))
    return {"overview": found, "events": []}


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have these heads answer, one after the other."""

    def answer(*heads: Head | OSError) -> None:
        left = list(heads)

        def watching(invitation: object) -> Head:
            head = left.pop(0)
            if isinstance(head, OSError):
                raise head
            return head

        monkeypatch.setattr(looking, "check_head", lambda invitation: None)
        monkeypatch.setattr(looking, "Watching", watching)

    return answer


def test_a_head_that_goes_away_is_said_and_looked_for_again(heads: Callable[..., None]) -> None:
    heads(
        Head(pushed(step=1), ConnectionResetError("gone")),
        ConnectionRefusedError(111, "Connection refused"),
        Head(pushed(step=2), pushed(step=3, state="finished"), ConnectionResetError("gone")),
    )
    seen = list(look("ws://token@127.0.0.1:1", sleep=lambda seconds: None))
    assert [each.overview.step if each.overview else None for each in seen] == [1, 1, 1, 2, 3, 3]
    assert seen[1].note.startswith("the head at ws://127.0.0.1:1 has closed the connection; trying again")
    assert seen[2].note.startswith("no head answers at ws://127.0.0.1:1: Connection refused; trying again")
    assert [each.is_over for each in seen] == [False] * 5 + [True]
    assert seen[3].note == ""


def test_a_head_of_a_newer_version_is_shown_as_far_as_it_is_known(heads: Callable[..., None]) -> None:
    newer = pushed(step=4)
    newer["overview"] |= {"schema": 9, "mood": "good"}
    heads(Head(newer, {"overview": {"step": "four"}}, pushed(state="finished"), OSError("gone")))
    seen = list(look("ws://token@127.0.0.1:1", sleep=lambda seconds: None))
    assert seen[0].overview is not None
    assert seen[0].overview.step == 4
    assert seen[0].note == "the head has a newer version (schema 9, this one knows 1)"
    assert "this version does not understand" in seen[1].note
    assert seen[1].overview == seen[0].overview


def test_where_the_head_is_gone_the_files_say_how_the_run_has_ended(
    heads: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heads(Head(pushed(step=1), ConnectionResetError("gone")))
    monkeypatch.setattr(looking, "find", lambda run: find("ws://token@127.0.0.1:1"))
    seen = list(look(str(ended_run(tmp_path / "run")), sleep=lambda seconds: None))
    assert [(each.overview.step, each.overview.state) for each in seen if each.overview] == [
        (1, "training"),
        (5, "finished"),
    ]


def test_a_run_whose_token_is_not_to_be_read_is_shown_from_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(run: str) -> None:
        raise UsageError("cannot read the token in run/token: Permission denied")

    monkeypatch.setattr(looking, "find", refuse)
    (seen,) = look(str(ended_run(tmp_path / "run")))
    assert seen.overview is not None
    assert seen.overview.state == "finished"
    assert "Permission denied" in seen.note


def test_lines_say_each_sentence_once_and_the_state_now_and_then() -> None:
    now = [1_700_000_000.0]
    out = io.StringIO()
    lines = OverviewLines(out, now=lambda: now[0])
    overview = Overview(state="training", step=0, num_steps=9)
    for number in range(100):
        lines.take(msgspec.structs.replace(overview, step=number))
        lines.note(f"no head answers; trying again for {number} s")
        now[0] += 1.0
    lines.close(msgspec.structs.replace(overview, state="finished", step=100))
    assert [line.partition(" unisono: ")[2] for line in out.getvalue().splitlines()] == [
        "training: 1 of 9 steps  loss -",
        "no head answers; trying again for 0 s",
        *(f"training: {number} of 9 steps  loss -" for number in (2, 3, 5, 7, 12, 22, 32, 62)),
        "finished: 101 of 9 steps  loss -",
    ]
