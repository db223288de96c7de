"""What a report says about interruptions and workers, and that its file is complete, whatever a run has named."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from unisono.core.events import Event, Interruption, RunEnded, WorkerGone, WorkerJoined
from unisono.core.words import duration
from unisono.record.overview import Interrupted, Overview, OverviewBuilder, Past, Presence
from unisono.views.report.account import Account, WorkerAccount, presences, words_of
from unisono.views.report.html import PARTS, report

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"
VOID = {"meta", "br", "img", "link", "input"}


def joined(worker_id: str, step: int, time: float, reason: str = "") -> WorkerJoined:
    about = {"host": "a", "device": "cpu", "pid": 1, "generation": 1}
    return WorkerJoined(time=time, worker_id=worker_id, step=step, reason=reason, **about)


def gone(worker_id: str, how: Any, step: int, time: float, reason: str = "") -> WorkerGone:
    return WorkerGone(time=time, worker_id=worker_id, host="a", how=how, step=step, reason=reason)


def end(time: float) -> RunEnded:
    return RunEnded(time=time, ok=True, reason="finished", digests={})


STORY: list[Event] = [
    joined("w0", 0, 100.0, "the run begins"),
    joined("w1", 0, 100.0, "the run begins"),
    gone("w1", "lost", 9, 110.0, "killed by signal 9"),
    joined("w2", 10, 110.5, "w1 was lost"),
    gone("w0", "finished", 19, 120.0),
    gone("w2", "finished", 19, 120.0),
    end(120.1),
]


def measured(step: int, seconds: float, time: float) -> Interruption:
    return Interruption(generation=2, step=step, seconds=seconds, reason="why", time=time)


def past(events: Sequence[Event]) -> Past:
    builder = OverviewBuilder()
    for event in events:
        builder.take(event)
    return builder.past()


def test_a_loss_and_its_replacement_are_one_interruption() -> None:
    (found,) = past([*STORY[:4], measured(10, 2.5, 113.0), *STORY[4:]]).interruptions
    assert (found.step, found.time, found.seconds) == (10, 110.0, 2.5)
    assert words_of(found) == [
        "w1 on a was lost after step 9: killed by signal 9",
        "w2 joins on a at step 10: w1 was lost",
    ]


def test_a_cost_that_nobody_has_measured_is_not_guessed() -> None:
    (found,) = past(STORY).interruptions
    assert (found.step, found.seconds) == (9, None)


def test_a_change_of_which_only_the_cost_is_known_has_its_reason() -> None:
    (found,) = past([measured(4, 1.5, 9.0)]).interruptions
    assert (words_of(found), found.time, found.seconds) == (["why"], 9.0, 1.5)


def test_who_is_there_at_the_beginning_and_finishes_is_no_interruption() -> None:
    assert past([joined("w0", 0, 1.0), gone("w0", "finished", 9, 2.0)]).interruptions == []


def test_each_worker_is_there_from_its_join_to_its_end() -> None:
    found = [(each.worker_id, each.joined, each.gone, each.how) for each in presences(past(STORY), end=120.1)]
    assert found == [("w0", 100.0, 120.0, "finished"), ("w1", 100.0, 110.0, "lost"), ("w2", 110.5, 120.0, "finished")]


def test_a_worker_whose_end_nobody_has_told_was_there_until_the_end() -> None:
    story: list[Event] = [joined("w0", 0, 1.0), joined("w1", 0, 2.0)]
    assert [each.gone for each in presences(past(story), end=9.0)] == [9.0, 9.0]
    story += [end(5.0), joined("w0", 3, 7.0)]
    assert [(each.joined, each.gone) for each in presences(past(story), end=9.0)] == [
        (1.0, 5.0),
        (2.0, 5.0),
        (7.0, 9.0),
    ]


class Reader(HTMLParser):
    """Reads the file as a browser would: which elements there are, whether they are closed, what the text is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.text).append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def hostile(name: str) -> Account:
    curve = {"step": [0, 1], "low": [1.0, "nan"], "high": [2.0, "inf"], "mean": [1.5, "nan"]}
    return Account(
        name=name,
        directory=Path("/runs") / "one",
        overview=Overview(
            state="failed",
            reason=HOSTILE,
            step=1,
            evaluation={HOSTILE: 0.5},
            checkpoint=HOSTILE,
            efficiency=1 / 7,
            num_workers=1,
        ),
        facts={"recipe": {HOSTILE: HOSTILE}, "environment": {"host": [HOSTILE]}},
        first=0,
        last=1,
        series={"loss": curve, f"log/{HOSTILE}": curve},
        workers=[
            WorkerAccount(worker_id=HOSTILE, host=HOSTILE, seconds=dict.fromkeys(PARTS, 1.0), share=1.0),
        ],
        since=0,
        presences=[
            Presence(
                run_id=HOSTILE, worker_id=HOSTILE, host=HOSTILE, joined=1.0, gone=2.0, how="lost", why_gone=HOSTILE
            )
        ],
        interruptions=[
            Interrupted(run_id=HOSTILE, changes=(gone(HOSTILE, "lost", 1, 1.0, HOSTILE),), measured=None),
        ],
        advice=[],
        problems=[{"text": HOSTILE, "evidence": HOSTILE}],
        notes=[HOSTILE],
    )


@pytest.mark.parametrize("names", [[HOSTILE], [HOSTILE, "two"]])
def test_nothing_that_a_run_has_named_becomes_a_part_of_the_page(names: list[str]) -> None:
    found = read(report([hostile(name) for name in names], 1.0))
    tags = [tag for tag, _ in found.seen]
    assert tags.count("script") == 3
    assert "img" not in tags
    assert HOSTILE in "".join(found.text)
    assert len(json.loads(found.scripts[1])) == 2


def test_the_script_and_its_arguments_are_shown_and_a_difference_is_marked() -> None:
    def of(name: str, checksum: str, rate: str) -> Account:
        command = {"folder": "/home", "arguments": ["train.py", "--lr", rate, "--password", "hunter2"]}
        return dataclasses.replace(
            hostile(name), facts={"command": command, "fingerprint": {"script": checksum}, "recipe": {"seed": 7}}
        )

    text = report([of("one", "a1", "0.1"), of("two", "b2", "0.1")], 1.0)
    assert "train.py --lr 0.1" in text
    assert "hunter2" not in text
    marked = re.findall(r'<tr class=differs><th scope="row">([^<]*)', text)
    assert "Text of the script" in marked
    assert not {"Script", "seed"} & {*marked}
    again = report([of("one", "a1", "0.1"), of("two", "a1", "0.2")], 1.0)
    assert "Script" in re.findall(r'<tr class=differs><th scope="row">([^<]*)', again)


def test_nothing_is_fetched_from_elsewhere() -> None:
    text = report([hostile("one")], 1.0)
    found = read(text)
    for _, attributes in found.seen:
        assert not {"src", "href", "action"} & attributes.keys()
    assert "@import" not in text
    assert not re.search(r"url\(", text)
    policy = next(a["content"] for t, a in found.seen if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("time", "said"),
    [(0.354, "0.35 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (252, "4 min 12 s"), (3599.6, "1 h 0 min"),
     (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)  # fmt: skip
def test_durations_in_words(time: float, said: str) -> None:
    assert duration(time) == said
