"""What a terminal shows of a run: pictures of fixed form that fit, and no character that it would obey."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.screens import Terminal
from tests.pure.test_journal import evaluation, step
from tests.pure.test_overview import START, gone, joined, late, members, started, used
from unisono.core.events import Event, Problem, RunEnded, Seconds, WorkerTimes, WorkerUse
from unisono.core.words import clock_duration, harmless, number, shown_bytes
from unisono.record.overview import CurvePoint, Overview, OverviewBuilder, Recent, WorkerNow
from unisono.views.report import html
from unisono.views.watch.terminal import drawing
from unisono.views.watch.terminal.base import is_progress, progress_line, summary
from unisono.views.watch.terminal.canvas import Canvas, colours_wanted, is_drawable, shows_unicode
from unisono.views.watch.terminal.curve import draw_curve
from unisono.views.watch.terminal.drawing import draw
from unisono.views.watch.terminal.screens import PAGES, Looked, draw_page, turned
from unisono.views.watch.terminal.text import Line, cut, plain, width

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def universal_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def run_of(num_workers: int, num_hosts: int = 1) -> Overview:
    """The overview of a run in which all wait for w0, and the third worker was lost."""
    ids = [f"w{number}" for number in range(num_workers)]
    builder = OverviewBuilder("r1", "runs/digits", "digits.py", START)
    first: list[Event] = [started(), *(joined(each, host=f"node{at % num_hosts}") for at, each in enumerate(ids))]
    first.append(members(1, *ids))
    for event in first:
        builder.take(event)
    slow, fast = Seconds(compute=0.09, exchange=0.008, other=0.002), Seconds(compute=0.06, waiting=0.032, other=0.008)
    workers = {
        each: WorkerTimes(leaves=8, last=fast if at else slow, waits_for="w0" if at else "", waits_s=0.03)
        for at, each in enumerate(ids)
    }
    for at in range(400):
        news = {"step": at, "bytes": 2_500_000, "seconds": 0.25} if at == 300 else {}
        loss = 2.3 * math.exp(-at / 80) + 0.02 * (at * 7919 % 13) / 13
        builder.take(
            step(
                at, loss=loss, num_steps=1200, samples=128, seconds=Seconds(compute=0.1), workers=workers,
                logs={"lr": 0.002}, checkpoint=news, time=START + at / 10, generation=1,
            )
        )  # fmt: skip
    builder.take(msgspec.structs.replace(evaluation(350, right=345), time=START + 36))
    builder.take(used("node0", START + 39, w0=WorkerUse(cores=0.97, memory_bytes=512_000_000)))
    if num_workers > 2:
        builder.take(gone("w2", host=f"node{2 % num_hosts}", time=START + 39, step=399))
        builder.take(members(2, *(each for each in ids if each != "w2")))
    return builder.overview(START + 41)


def test_rounds_of_local_steps_are_called_so() -> None:
    overview = msgspec.structs.replace(run_of(2), unit="round")
    shown = ["".join(text for text, _ in line) for line in draw(overview, 120, 25)]
    assert any("400 of 1200 rounds" in line for line in shown), shown
    assert any("rounds/s" in line for line in shown), shown
    assert not any("steps/s" in line for line in shown), shown


@pytest.mark.parametrize(
    "changed", [{}, {"num_steps": 0}, {"num_steps": 0, "epoch": 3}, {"loss": None}, {"unit": "round"}]
)
def test_a_line_of_progress_is_known_as_one(changed: dict[str, Any]) -> None:
    """And no other line of a run, nor what a worker prints."""
    overview = msgspec.structs.replace(run_of(2), **changed)
    line = f"2026-11-28 16:55:03 unisono: {progress_line(overview)}"
    assert is_progress(line)
    assert not is_progress(f"[w0] {line}")
    ended = RunEnded(time=START + 50, ok=True, reason="finished", digests={}, step=399)
    assert not is_progress(f"2026-11-28 16:55:03 unisono: {summary(overview, ended)}")


@pytest.mark.parametrize(
    ("name", "overview", "columns", "rows", "unicode"),
    [
        ("80x20", run_of(3), 80, 20, True),
        ("120x25-two-hosts", run_of(4, 2), 120, 25, True),
        ("40x16", run_of(2), 40, 16, True),
        ("80x20-64-workers", run_of(64, 8), 80, 20, True),
        ("80x20-ascii", run_of(2), 80, 20, False),
        ("80x10", run_of(2), 80, 10, True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_picture_of_a_run(name: str, overview: Overview, columns: int, rows: int, unicode: bool) -> None:
    """Look at the files: UNISONO_GOLDEN=1 writes them."""
    lines = draw(overview, columns, rows, unicode=unicode)
    path = GOLDEN / f"terminal-{name}.txt"
    if os.environ.get("UNISONO_GOLDEN"):
        path.write_text(plain(lines) + "\n")
    assert plain(lines) + "\n" == path.read_text()
    assert all(width(row) <= columns for row in plain(lines).splitlines())
    assert len(lines) <= rows
    assert unicode or plain(lines).isascii()


TEXT = st.text(max_size=30)
NUMBER = st.floats(-1e300, 1e300)
OVERVIEWS = st.builds(
    Overview,
    run_dir=TEXT,
    script=TEXT,
    state=st.sampled_from(["starting", "training", "waiting", "failed", "finished", "odd\x1b[2J"]),
    reason=TEXT,
    time=st.floats(0, 2e9),
    started=st.floats(0, 2e9),
    step=st.integers(-1, 10**12),
    num_steps=st.integers(0, 10**12),
    loss=st.none() | NUMBER,
    loss_is=st.sampled_from(["", "nan", "-inf"]),
    logs=st.dictionaries(TEXT, NUMBER, max_size=5),
    samples_per_s=st.floats(0, 1e15),
    steps_per_s=st.floats(0, 1e9),
    left_s=st.none() | st.floats(0, 1e12),
    curve=st.lists(st.builds(CurvePoint, st.integers(0, 10**9), NUMBER, NUMBER, NUMBER), max_size=20).map(
        lambda points: [
            CurvePoint(at, min(each.low, each.high), max(each.low, each.high), each.low)
            for at, each in zip(sorted({point.step for point in points}), points, strict=False)
        ]
    ),
    workers=st.lists(
        st.builds(
            WorkerNow,
            worker_id=TEXT,
            host=TEXT,
            device=TEXT,
            state=TEXT,
            share=st.floats(0, 1),
            rank=st.none() | st.integers(0, 99),
            waits_for=TEXT,
            memory_bytes=st.integers(0, 10**15),
            cores=st.floats(0, 1e4),
            seconds=st.builds(Seconds, *[], compute=st.floats(0, 1e9), waiting=st.floats(0, 1e9)),
        ),
        max_size=30,
    ),
    recent=st.lists(st.builds(Recent, time=st.floats(0, 2e9), text=TEXT, level=TEXT), max_size=8),
)


@settings(max_examples=40)
@given(OVERVIEWS, st.integers(1, 200), st.integers(1, 60), st.booleans(), st.sampled_from(PAGES))
def test_a_picture_fits_and_obeys_nobody(overview: Overview, columns: int, rows: int, unicode: bool, page: str) -> None:
    pictures = [
        draw(overview, columns, rows, unicode=unicode),
        draw_page(overview, Looked(page), "a note\x1b[2J\nmore", columns, rows, unicode=unicode)[0],
        draw_page(overview, Looked(has_help=True), "", columns, rows)[0],
    ]
    for lines in pictures:
        assert len(lines) <= rows
        for line in lines:
            text = "".join(part for part, _ in line)
            assert width(text) <= columns
            assert harmless(text) == text
            assert "\n" not in text


def test_every_part_of_a_step_has_its_character_and_its_words() -> None:
    parts = set(Seconds.__struct_fields__)
    assert parts == set(drawing._PARTS) == set(html.PARTS)


def test_rows_stay_where_they_are_while_numbers_change() -> None:
    one, other = run_of(3), run_of(3)
    other = msgspec.structs.replace(other, step=1150, loss=1e-7, samples_per_s=3.0, steps_per_s=0.02, left_s=0.0)
    heads = [
        [line.split("  ")[0] for line in plain(draw(each, 80, 20)).splitlines() if line[:1] == "w"]
        for each in (one, other)
    ]
    assert heads[0] == heads[1]
    assert len(draw(one, 80, 20)) == len(draw(other, 80, 20))


def test_among_many_workers_those_are_shown_that_need_to_be_seen() -> None:
    builder = OverviewBuilder()
    ids = [f"w{number}" for number in range(64)]
    builder.take(members(1, *ids))
    workers = {
        each: WorkerTimes(leaves=1, last=Seconds(compute=0.1, waiting=0.1), waits_for="w40", waits_s=0.1)
        for each in ids
    }
    builder.take(step(0, workers=workers))
    builder.take(late("w50"))
    shown = plain(draw(builder.overview(START), 80, 20))
    assert "\nw40 " in shown
    assert "\nw50 " in shown
    assert "more, " in shown


# -- the curve ---------------------------------------------------------------------------------------


def curve(*losses: float) -> list[CurvePoint]:
    return [CurvePoint(at, loss, loss, loss) for at, loss in enumerate(losses)]


def test_a_curve_falls_from_the_left_to_the_right() -> None:
    lines = plain(draw_curve(curve(4.0, 3.0, 2.0, 1.0), 14, 4, unicode=False)).splitlines()
    assert lines == ["   4.0000|*", "         | *", "         |  *", "   1.0000|   *", "         +----"]


def test_the_axis_is_logarithmic_where_the_loss_falls_far() -> None:
    assert "logarithmic" in plain(draw_curve(curve(100.0, 1.0, 0.1), 80, 4))
    assert "logarithmic" not in plain(draw_curve(curve(3.0, 1.0), 80, 4))
    assert "logarithmic" not in plain(draw_curve(curve(100.0, 1.0, -0.1), 80, 4))


@pytest.mark.parametrize("losses", [[], [1.0], [0.0, 0.0], [-1e308, 1e308], [1e-320, 1e308], [5e-324], [0.0, 5e-324]])
def test_a_curve_of_extreme_numbers_is_drawn(losses: list[float]) -> None:
    assert len(draw_curve(curve(*losses), 40, 4)) == 5


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4), st.integers(2, 9))
def test_a_curve_of_any_numbers_is_drawn(losses: list[float], rows: int) -> None:
    assert len(draw_curve(curve(*losses), 40, rows)) == rows + 1


# -- text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("\x1b[2J\x1b[10;3Hup", "up"),
        ("\x9b31mred", "red"),
        ("a\x1bP$q\x1b\\b", "ab"),
        ("bell\x07 back\x08", "bell back"),
        ("right\u202eleft", "rightleft"),
        ("unfinished\x1b[", "unfinished"),
        ("unfinished\x1b", "unfinished"),
        ("a\tb", "a   b"),
        ("two\nlines", "twolines"),
        ("é 漢字 🎉", "é 漢字 🎉"),
    ],
)
def test_a_terminal_obeys_nothing_that_it_is_shown(text: str, shown: str) -> None:
    assert harmless(text) == shown


@given(st.text())
def test_nothing_that_is_harmless_has_a_control_character(text: str) -> None:
    for keeps in (False, True):
        found = harmless(text, keeps_colours=keeps)
        assert harmless(found) == harmless(text)
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in harmless(found))


def test_colours_of_output_are_kept_where_they_are_wanted() -> None:
    assert harmless("\x1b[1;31mred\x1b[0m\x1b[2J", keeps_colours=True) == "\x1b[1;31mred\x1b[0m"


@given(st.text(), st.integers(0, 40))
def test_what_is_cut_fits(text: str, columns: int) -> None:
    text = harmless(text)
    assert width(cut(text, columns)) <= columns
    assert width(text) > columns or cut(text, columns) == text


def test_numbers_are_words_of_few_characters() -> None:
    assert [clock_duration(each) for each in (7, 3600 + 184, 90_000)] == ["0:07", "1:03:04", "1 d 01:00"]
    assert [number(each) for each in (0.5, 1234.5, 1e-9, -1e9)] == ["0.5000", "1,234.5", "1.000e-09", "-1.000e+09"]
    assert [shown_bytes(each) for each in (999, 2.5e6, 5.12e8, 1e12)] == ["999 B", "2.5 MB", "512 MB", "1000 GB"]


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({}, "utf-8", True),
        ({"LANG": "de_DE.UTF-8"}, "utf-8", True),
        ({"LANG": "C.utf8"}, "UTF8", True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"LC_CTYPE": "C.UTF-8"}, "utf-8", True),
        ({"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"}, "utf-8", False),
        ({"LANG": "de_DE.ISO-8859-1"}, "iso8859-1", False),
        ({"LANG": "de_DE.UTF-8"}, "ascii", False),
    ],
)
def test_a_terminal_shows_unicode_where_its_locale_says_so(
    environment: dict[str, str], encoding: str, expected: bool
) -> None:
    assert shows_unicode(environment, encoding) is expected


def test_colours_and_pictures_are_for_terminals_that_want_them() -> None:
    assert colours_wanted({"TERM": "xterm"})
    assert not colours_wanted({"TERM": "xterm", "NO_COLOR": "1"})
    assert not is_drawable({"TERM": "dumb"})
    assert not is_drawable({})


# -- the canvas --------------------------------------------------------------------------------------

WORDS = st.text("ab漢 ", max_size=90).filter(lambda text: width(text) == len(text))
PICTURES = st.lists(WORDS.map(lambda text: [(text, "bold")]), max_size=10)


@given(st.lists(st.tuples(st.lists(WORDS, max_size=4), PICTURES), min_size=1, max_size=8), st.booleans())
def test_a_canvas_shows_the_lines_in_their_order_and_the_picture_below(
    frames: list[tuple[list[str], list[Line]]], colours: bool
) -> None:
    """Whatever came before: rows that the picture does not have any more are gone."""
    terminal, canvas = Terminal(80, 24), Canvas(colours=colours)
    said: list[str] = []
    for above, picture in frames:
        picture = [[(cut(text, 80), style) for text, style in line] for line in picture]
        terminal.write(canvas.frame(above, picture, 80))
        said += [part.rstrip() for line in above for part in (line[:80], *([line[80:]] if line[80:] else []))]
        shown = [*said, *("".join(text for text, _ in line).rstrip() for line in picture)]
        assert terminal.text[: len(shown)] == shown
        assert not any(terminal.text[len(shown) :])
        assert terminal.row == len(shown)
    assert colours or not terminal.styles


def test_a_picture_that_has_not_changed_costs_nothing_and_one_that_has_only_its_change() -> None:
    canvas = Canvas(colours=True)
    picture: list[Line] = [[("a" * 50, "")], [("b" * 50, "")]]
    first = canvas.frame([], picture, 80)
    assert canvas.frame([], picture, 80) == ""
    second = canvas.frame([], [picture[0], [("c" * 50, "")]], 80)
    assert "a" * 50 in first
    assert "a" * 50 not in second
    assert "c" * 50 in second


def test_lines_that_have_become_wrapped_are_replaced_as_well() -> None:
    """A terminal that has become narrower shows the lines of before in several rows each."""
    canvas = Canvas(colours=False)
    canvas.frame([], [[("a" * 80, "")], [("b" * 30, "")]], 80)
    assert "\x1b[3A" in canvas.frame([], [[("c" * 40, "")]], 40)


def test_after_something_else_was_written_the_picture_is_drawn_anew() -> None:
    canvas = Canvas(colours=False)
    picture: list[Line] = [[("a", "")]]
    canvas.frame([], picture, 80)
    canvas.forget()
    again = canvas.frame([], picture, 80)
    assert "a" in again
    assert "A" not in again


# -- pages and keys ----------------------------------------------------------------------------------


def test_keys_turn_pages_and_scroll() -> None:
    looked = Looked()
    pages = []
    for _ in range(len(PAGES)):
        looked = turned(looked, "\t", 20)
        pages.append(looked.page)
    assert pages == [*PAGES[1:], PAGES[0]]
    assert turned(Looked(), "left", 20).page == PAGES[-1]
    assert turned(Looked(), "3", 20).page == PAGES[2]
    assert turned(turned(Looked(), "?", 20), "x", 20) == Looked()
    assert turned(Looked("events", 3), "up", 20).first == 2
    assert turned(Looked("events"), "up", 20).first == 0
    assert turned(Looked(), "x", 20) == Looked()


def test_the_message_of_an_error_of_the_library_is_said_once() -> None:
    """By the traceback that follows. A short error of the script's is said with who has failed as well."""
    words = "micro-batch 0 of step 0 was computed by two workers: it differs"
    ended = RunEnded(ok=False, reason=f"w0 failed: DivergenceError: {words}", digests={}, step=0)
    traceback = f"Traceback ...\nunisono.core.errors.DivergenceError: {words}\n"
    assert summary(Overview(), ended, traceback) == "failed: w0 failed: DivergenceError"
    assert summary(Overview(), ended) == f"failed: {ended.reason}"
    ended = RunEnded(ok=False, reason="w0 failed: KeyError: 3", digests={}, step=0)
    assert summary(Overview(), ended, "Traceback ...\nKeyError: 3\n") == "failed: w0 failed: KeyError: 3"


def test_a_page_cannot_be_scrolled_beyond_its_end() -> None:
    overview = run_of(64, 8)
    lines, looked = draw_page(overview, Looked("workers", 1000), "", 80, 24)
    assert plain(lines).splitlines()[-2].startswith("w2 ")  # the one that was lost comes last
    assert looked.first == 64 - (24 - 1 - 4 - 1)
    assert "w0 " in plain(draw_page(overview, Looked("workers"), "", 80, 24)[0])


def test_events_are_shown_in_full_with_the_newest_first() -> None:
    builder = OverviewBuilder()
    builder.take(Problem(time=START, problem="crash", text="first " + "word " * 40))
    builder.take(RunEnded(time=START + 1, ok=False, reason="KeyError: 3", digests={}))
    shown = plain(draw_page(builder.overview(START), Looked("events"), "", 60, 24)[0])
    assert shown.count("word") == 40
    assert shown.index("KeyError: 3") < shown.index("first")


def test_a_note_takes_the_place_of_the_keys() -> None:
    def footer(note: str, **looked: Any) -> str:
        return plain(draw_page(Overview(), Looked(**looked), note, 80, 24)[0]).splitlines()[-1]

    assert footer("no head answers") == "no head answers"
    assert "q quit" in footer("")
    assert "[loss]" in footer("", page="loss")
