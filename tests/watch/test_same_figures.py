"""One run in all views: a figure that several of them show has one value."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from tests.watch.recorded import record
from unisono import cli
from unisono.cli.looking import look
from unisono.cluster.head.past_reader import Present
from unisono.core.events import Event, RunEnded, StepFinished
from unisono.core.words import clock_duration, number
from unisono.record.history import History
from unisono.record.journal import events
from unisono.record.journal.times import read_times
from unisono.record.overview import Overview, OverviewBuilder, Past, status_of
from unisono.views.page.answers import answer
from unisono.views.report import account
from unisono.views.report.account import words_of
from unisono.views.watch.prometheus import exposition
from unisono.views.watch.terminal.base import progress_line
from unisono.views.watch.terminal.drawing import header
from unisono.views.watch.terminal.plain_lines import OverviewLines, PlainTerminal
from unisono.views.watch.terminal.text import plain

LIVE = (
    *("run_id", "state", "reason", "started", "ended", "step", "first", "num_steps", "unit", "epoch", "loss", "logs"),
    *("evaluation", "samples_per_s", "steps_per_s", "left_s", "generation", "num_workers", "checkpoint_step"),
    *("digest", "digests", "efficiency", "interruptions", "interrupted_s"),
)
"""Figures of an overview that neither the folder nor the moment of looking changes."""


def told(run: Path, until: int = -1) -> list[Event]:
    """Return the events of a run in their order, as a head or a terminal hears them.

    Args:
        until: the last step; negative: all that has happened.
    """
    times = {each.step: each.workers for each in read_times(run)}
    steps = [
        msgspec.structs.replace(event, workers=times[event.step]) if isinstance(event, StepFinished) else event
        for event in events(run)
        if not isinstance(event, RunEnded)
    ]
    story = [msgspec.convert(json.loads(text), Event) for text in (run / "events.jsonl").read_text().splitlines()]
    found = sorted([*steps, *story], key=lambda event: event.time)
    if until < 0:
        return found
    last = max(at for at, event in enumerate(found) if isinstance(event, StepFinished) and event.step <= until)
    return found[: last + 1]


def figures(overview: Overview) -> dict[str, Any]:
    return {name: getattr(overview, name) for name in LIVE}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record(tmp_path / "run", num_steps=200, num_workers=3)


def test_the_files_say_what_was_told(run: Path) -> None:
    """The fold of a head and of a terminal, and that of a reader of the directory."""
    builder = OverviewBuilder("made-up-0")
    for event in told(run):
        builder.take(event)
    live, read = builder.overview(0.0), History(run).overview()
    assert figures(live) == figures(read)
    assert live.workers == read.workers
    assert builder.past() == History(run).past()


def test_a_finished_run_has_the_same_figures_in_every_view(run: Path) -> None:
    history = History(run)
    overview, found = history.overview(), account(run)
    asked = answer([history], {"get": "overview"})["overview"]
    assert figures(msgspec.convert(asked, Overview)) == figures(overview) == figures(found.overview)
    (seen,) = look(str(run))
    assert seen.overview is not None
    assert figures(seen.overview) == figures(overview)

    status = CliRunner().invoke(cli._group, ["watch", "--once", str(run), "--json"], standalone_mode=False)
    said = json.loads(status.output)
    for name in ("state", "step", "num_steps", "unit", "epoch", "loss", "generation", "started", "ended"):
        assert said[name] == getattr(overview, name), name
    assert {name: said[name] for name in status_of(overview)} == status_of(overview), "as a head says it"
    for name in ("digest", "digests"):
        assert said[name] == getattr(overview, name), name
    assert overview.efficiency is not None
    assert overview.digests == {"model": "ab" * 8}
    assert said["interruptions"] == [msgspec.to_builtins(each) for each in overview.interruptions]
    assert overview.interrupted_s == sum(each.seconds or 0.0 for each in found.interruptions)
    assert [msgspec.to_builtins(each) for each in found.presences] == said["past_workers"]
    assert history.series(["loss"], overview.step)["loss"]["mean"] == [overview.loss]

    metrics = dict(line.split(" ") for line in exposition(overview).splitlines() if line[0] != "#" and "{" not in line)
    assert float(metrics["unisono_loss"]) == overview.loss
    assert float(metrics["unisono_checkpoint_step"]) == overview.checkpoint_step

    assert msgspec.convert(answer([history], {"get": "past"})["past"], Past) == history.past()
    page = answer([history], {"get": "events", "after": -1000, "most": 1000})["events"]["events"]
    sentences = {event["sentence"]: event["level"] for event in page if "sentence" in event}
    assert [each.text for each in overview.recent if sentences.get(each.text) != each.level] == [
        "w0, w1 and w2 join: the run begins",  # of the page each by itself
        "evaluation at step 200: accuracy 0.715138",  # which the page has as a figure
    ]
    assert all(text in sentences for each in found.interruptions for text in words_of(each))

    out = io.StringIO()
    lines = OverviewLines(out)
    lines.take(overview)
    assert out.getvalue().rstrip().endswith(f" unisono: finished: {progress_line(overview)}")
    assert found.sentence == f"Finished 200 steps in {found.sentence.partition(' in ')[2]}"
    assert found.sentence.endswith("on 3 workers.")


@pytest.mark.parametrize("until", [0, 50, 150])
def test_a_run_that_trains_has_the_same_figures_in_lines_in_the_picture_and_for_the_page(run: Path, until: int) -> None:
    now = 0.0
    out = io.StringIO()
    log = PlainTerminal(out, io.StringIO(), clock=lambda: now, wall=lambda: now)
    builder = OverviewBuilder()
    for event in told(run, until):
        now += 1000.0  # each step has a line
        log.emit(event)
        builder.take(event)
    overview = builder.overview(now)
    line = out.getvalue().splitlines()[-1]
    assert line.endswith(f" unisono: {progress_line(overview)}")
    picture = plain(header(overview, 120, unicode=True))
    assert overview.loss is not None
    assert overview.left_s is not None
    for shown in (
        f"{until + 1} of 200 steps",
        f"loss {number(overview.loss)}",
        f"{overview.samples_per_s:,.0f} samples/s",
        f"{clock_duration(overview.left_s)} left",
    ):
        assert re.search(rf"(^| ){re.escape(shown)}", picture, re.MULTILINE), (shown, picture)
        assert shown in line
    present = Present(lambda: overview, lambda: Past([], [], []))
    page = answer([present], {"get": "overview"})["overview"]
    assert figures(msgspec.convert(page, Overview)) == figures(overview)
    curve = answer([present], {"get": "series", "names": ["loss"]})["series"]["loss"]
    assert curve["mean"] == [point.mean for point in overview.curve]
