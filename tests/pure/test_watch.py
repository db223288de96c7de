"""The stream of events: every sink gets all of them, in order, and none of them can end a run."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tests.pure.test_journal import end, evaluation, step
from unisono.core.errors import UsageError
from unisono.core.events import Announcement, EvaluationFinished, Event, Once, RunStarted, StepFinished
from unisono.record.journal import JOURNAL, Journal
from unisono.views.watch import SINKS, EventStream, Sink, make, named
from unisono.views.watch.charts import since


class Kept:
    """A sink that keeps what it gets, and raises where it is told to."""

    def __init__(self, fails_at: Event | None = None, *, fails_to_close: bool = False) -> None:
        self.events: list[Event] = []
        self.num_closed = 0
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def emit(self, event: Event) -> None:
        self.events.append(event)
        if event == self._fails_at:
            raise OSError("no space")

    def close(self) -> None:
        self.num_closed += 1
        if self._fails_to_close:
            raise ValueError("closed before")


def started(step: int = 0) -> RunStarted:
    return RunStarted(run_id="r1", directory="", step=step, recipe={"microbatches": 4})


def test_all_sinks_get_all_events_in_order_and_are_closed_once() -> None:
    one, other = Kept(), Kept()
    stream = EventStream([one, other])
    said = [started(), step(0), Announcement(text="w2 joins"), evaluation(1, correct=3), end()]
    for event in said:
        stream.emit(event)
    stream.close()
    stream.close()
    assert one.events == other.events == said
    assert (one.num_closed, other.num_closed) == (1, 1)


def test_a_sink_that_raises_is_reported_once_and_gets_nothing_more() -> None:
    reports: list[str] = []
    broken, calm = Kept(step(1), fails_to_close=True), Kept()
    stream = EventStream([broken, calm], reports.append)
    for number in range(4):
        stream.emit(step(number))
    stream.close()
    assert broken.events == [step(0), step(1)]
    assert calm.events == [step(number) for number in range(4)]
    assert (broken.num_closed, calm.num_closed) == (1, 1)
    words = "the sink Kept gets no more events: its {} raised {}; the run continues"
    assert reports == [
        words.format("emit(StepFinished)", "OSError: no space"),
        words.format("close()", "ValueError: closed before"),
    ]


def test_an_interrupt_is_no_fault_of_a_sink() -> None:
    class Interrupted(Kept):
        def emit(self, event: Event) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EventStream([Interrupted()]).emit(step(0))


def news(*told: Event) -> list[Event]:
    once = Once()
    return [event for event in told if once.is_new(event)]


def test_an_event_that_is_told_again_is_let_through_once() -> None:
    """A worker that becomes rank 0 tells its last events again; what has no number always counts."""
    said = [step(number, number=number) for number in range(3)]
    joins = Announcement(text="w2 joins")
    assert news(said[0], said[1], said[1], said[0], said[2], joins, joins) == [*said, joins, joins]


def test_what_a_head_tells_is_known_whichever_head_tells_it_again() -> None:
    """Each head counts by itself: one may have told events that the next one does not know of."""
    first, second = ([Announcement(text=f"{number}", number=number, head=head) for number in range(3)] for head in "12")
    assert news(*first, *first[1:], *second, first[2], second[2]) == [*first, *second]


def test_a_run_that_begins_again_counts_its_lines_again() -> None:
    """All workers were lost, and nothing of the run was kept."""
    first, again = (msgspec.structs.replace(started(), number=number, head="1") for number in range(2))
    done = step(0, number=0)
    assert news(first, done, again, done) == [first, done, again, done]
    assert news(first, done, first, done) == [first, done], "that the run began may be told again, too"


@pytest.mark.parametrize("name", SINKS)
def test_a_row_of_the_table_makes_a_sink(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or says what to install."""
    monkeypatch.setenv("UNISONO_WEBHOOK", "https://example.org/hook")
    made, said = None, ""
    try:
        made = make(name)
    except UsageError as error:
        said = str(error)
    assert isinstance(made, Sink) or re.search(r"needs the package \w+: pip install '[\w-]+>=", said)


def test_a_sink_of_the_command_line_is_found_by_its_name_or_its_place() -> None:
    assert isinstance(named("logging=mine"), Sink)
    assert isinstance(named("tests.pure.test_watch:Kept"), Kept)
    assert named("no_such_module:Kept", is_here=False) is None, "its workers will know"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loging", "there is no sink 'loging'; known are logging, mlflow, "),
        ("terminal", "there is no sink 'terminal'"),
        ("no_such_module:Kept", "the sink no_such_module:Kept of the command line cannot be made: No module named"),
        ("tests.pure.test_watch:nothing", "cannot be made: module .* has no attribute 'nothing'"),
        ("tests.pure.test_watch:started", r"has no emit\(event\) and close\(\): RunStarted"),
    ],
)
def test_a_sink_that_is_not_there_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        named(text)


def late() -> list[StepFinished | EvaluationFinished]:
    """What a journal has of a run that asks three steps later for its evaluations after steps 2 and 4."""
    return [
        *(step(number) for number in range(4)),
        evaluation(2, right=1),
        *(step(number) for number in range(4, 7)),
        evaluation(4, right=3),
        step(7),
        evaluation(8, right=7),
    ]


def test_tools_get_an_evaluation_that_has_its_line_after_later_steps_and_get_it_once() -> None:
    said = [msgspec.structs.replace(event, number=number) for number, event in enumerate(late())]
    assert news(*said, *said) == said


@pytest.mark.parametrize("first", range(9))
def test_a_tool_that_knows_the_first_steps_gets_what_stands_after_them(first: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL)
    journal.start(writer=True)
    for event in late():
        journal.emit(event)
    told = [(type(event), event.step) for event in since(tmp_path, first)]
    start = 0 if first == 0 else late().index(step(first - 1)) + 1
    assert told == [(type(event), event.step) for event in late()[start:]]
