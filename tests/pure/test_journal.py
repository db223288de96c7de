"""The journal: appended, never rewritten, readable whoever wrote it and whoever died while writing."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import signal
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unisono.core.events import EvaluationFinished, RunEnded, Seconds, StepFinished, WorkerTimes
from unisono.record.journal import (
    JOURNAL,
    Difference,
    Journal,
    Line,
    compare,
    conclude,
    events,
    from_line,
    read,
    to_line,
    truncate,
)
from unisono.record.journal.chain import links, written
from unisono.record.journal.file import BLOCK_BYTES, tail
from unisono.record.journal.lines import LineEvent
from unisono.record.journal.writing import KEPT_LINES, LINES_AT_ONCE


def step(number: int, /, **changes: Any) -> StepFinished:
    values: dict[str, Any] = {
        "step": number, "epoch": number // 3, "loss": 0.5 / (number + 1), "weight": 24.0, "samples": 24,
        "digest": f"{number:016x}", "num_steps": 9, "generation": 1, "seconds": Seconds(compute=0.1),
        "workers": {}, "logs": {},
    }  # fmt: skip
    return StepFinished(**{**values, **changes})


def numbered(*said: LineEvent) -> list[LineEvent]:
    """The events as a journal has them."""
    return [msgspec.structs.replace(event, number=number) for number, event in enumerate(said)]


def end(ok: bool = True, **changes: Any) -> RunEnded:
    return RunEnded(**{"ok": ok, "reason": "", "digests": {"model": "5f3a"} if ok else {}, **changes})


def evaluation(number: int, **totals: Any) -> EvaluationFinished:
    return EvaluationFinished(step=number, totals=totals)


def journal_of(folder: Path, *, writer: bool) -> Journal:
    journal = Journal(folder / JOURNAL)
    journal.start(writer=writer)
    return journal


def run_with(folder: Path, *said: LineEvent) -> Path:
    folder.mkdir()
    journal = journal_of(folder, writer=True)
    for event in said:
        journal.emit(event)
    return folder


def unchained(lines: Iterable[Line]) -> list[Line]:
    """Lines without the values of the chain (tests/pure/test_certificate.py looks at these)."""
    return [{key: value for key, value in line.items() if key != "chain"} for line in lines]


def numbers(folder: Path) -> list[int]:
    return [line["line"] for line in read(folder)]


# -- writing and reading -----------------------------------------------------------------------------


def test_what_was_written_is_read(tmp_path: Path) -> None:
    said = [step(0), evaluation(1, correct=93), end()]
    folder = run_with(tmp_path / "run", *said)
    assert unchained(read(folder)) == [{"line": n, **to_line(event)} for n, event in enumerate(said)]
    assert list(read(folder / JOURNAL)) == list(read(folder))
    assert list(events(folder)) == numbered(*said)


def test_the_line_of_a_step_has_these_keys_in_this_order(tmp_path: Path) -> None:
    """They are read by whatever people have written for their journals."""
    times = WorkerTimes(leaves=4, data=0.1, compute=0.2, last=Seconds(exchange=0.5))
    found = step(
        7, time=1790000000.125, workers={"w0": times}, logs={"lr": 0.1}, balance="w0 gets 5", warnings=["w1 differs"]
    )
    folder = run_with(tmp_path / "run", found, end(ok=False, reason="KeyError: 3"))
    line, last = (folder / JOURNAL).read_text().splitlines()
    assert line == (
        '{"line": 0, "kind": "step", "step": 7, "epoch": 2, "samples": 24, "digest": "0000000000000007", '
        '"loss": 0.0625, "weight": 24.0, "time": 1790000000.125, "num_steps": 9, "generation": 1, '
        '"seconds": {"data": 0.0, "compute": 0.1, "exchange": 0.0, "network": 0.0, "waiting": 0.0, '
        '"update": 0.0, "other": 0.0}, '
        '"logs": {"lr": 0.1}, "balance": "w0 gets 5", "warnings": ["w1 differs"], '
        '"chain": "c65c94e0b86709b35fc10539280f8cc1b8684a73c33970d49a0fcb166e78a043"}'
    )
    assert last == (
        '{"line": 1, "kind": "end", "ok": false, "digests": {}, "reason": "KeyError: 3", '
        '"chain": "9827701ad0981b3c0e7e383be1a58a29e686f4297d11256d8f0eec177ec73e76"}'
    )


def test_the_lines_of_older_and_newer_versions_are_read() -> None:
    """A key that a line lacks has a plain value, one that nobody knows is left out, and so is a kind."""
    found = from_line({"line": 3, "kind": "step", "step": 3, "loss": "nan", "colour": "red"})
    assert isinstance(found, StepFinished)
    assert (found.step, found.num_steps, found.workers) == (3, 0, {})
    assert math.isnan(found.loss)
    assert from_line({"kind": "end", "ok": True}) == RunEnded(ok=True, reason="", digests={})
    assert from_line({"line": 4, "kind": "dance"}) is None
    with pytest.raises(ValueError, match=r"the journal's line 5 is not a line of kind 'step': .*loss"):
        from_line({"line": 5, "kind": "step", "loss": [3]})


def test_a_new_writer_says_which_events_the_file_lacked(tmp_path: Path) -> None:
    first, second = journal_of(tmp_path, writer=True), journal_of(tmp_path, writer=False)
    for number in range(4):
        second.emit(step(number))
        if number < 2:
            first.emit(step(number))
    assert second.start(writer=True) == [step(number, number=number) for number in (2, 3)]
    assert second.start(writer=True) == []
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_numbers_that_json_has_not_stay_readable(tmp_path: Path) -> None:
    """By every reader of JSON, not only by Python's."""
    folder = run_with(tmp_path / "run", step(0, loss=math.nan, logs={"a": math.inf, "b": [-math.inf, 1.5]}))

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    (line,) = (folder / JOURNAL).read_text().splitlines()
    parsed = json.loads(line, parse_constant=refuse)
    assert parsed["loss"] == "nan"
    assert parsed["logs"] == {"a": "inf", "b": ["-inf", 1.5]}


def test_every_float_comes_back_to_the_bit(tmp_path: Path) -> None:
    losses = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2.0**60 + 512]
    folder = run_with(tmp_path / "run", *[step(n, loss=loss) for n, loss in enumerate(losses)])
    assert [line["loss"].hex() for line in read(folder)] == [loss.hex() for loss in losses]


def test_a_journal_without_a_path_keeps_nothing(tmp_path: Path) -> None:
    journal = Journal(None)
    journal.start(writer=True)
    journal.emit(step(0))
    assert journal.number == 1
    assert list(tmp_path.iterdir()) == []


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", step(0), step(1))
    whole = (folder / JOURNAL).read_bytes()
    for cut in range(1, whole.index(b"\n") + 1):
        (folder / JOURNAL).write_bytes(whole[:-cut])
        assert numbers(folder) == [0]


# -- writers that change -----------------------------------------------------------------------------


def test_only_the_writer_writes(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", step(0))
    other = Journal(folder / JOURNAL)
    other.start(writer=False)
    other.emit(step(0))
    other.emit(step(1))
    assert numbers(folder) == [0]


@pytest.mark.parametrize("missing", range(KEPT_LINES + 1))
@pytest.mark.parametrize("torn", [False, True])
def test_the_next_writer_writes_what_the_last_one_did_not(missing: int, torn: bool, tmp_path: Path) -> None:
    """Rank 0 died after a commit and before its line, or in the middle of it: no line is missing and none is twice."""
    first, second = Journal(tmp_path / JOURNAL), Journal(tmp_path / JOURNAL)
    first.start(writer=True)
    second.start(writer=False)
    total = 6
    for number in range(total):
        second.emit(step(number))
        if number < total - missing:
            first.emit(step(number))
    if torn and missing:
        with (tmp_path / JOURNAL).open("a") as file:
            file.write('{"line": 5, "kind": "st')

    second.start(writer=True)
    second.emit(step(total))
    assert numbers(tmp_path) == list(range(total + 1))
    assert [line["step"] for line in read(tmp_path)] == list(range(total + 1))


@contextlib.contextmanager
def no_room_after(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond that: of a write, what fits is written, and then comes an error."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def write_without_room(folder: Path, num_failed: int, fits: int) -> Journal:
    """One line, then so many for which there is no room."""
    journal = Journal(folder / JOURNAL)
    journal.start(writer=True)
    journal.emit(step(0))
    with no_room_after((folder / JOURNAL).stat().st_size + fits), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(1, 1 + num_failed):
            journal.emit(step(number))
    assert len(said) == (num_failed * len((folder / JOURNAL).read_text().splitlines()[0]) > fits)
    return journal


@pytest.mark.parametrize("fits", [0, 20, 300])
@pytest.mark.parametrize("num_failed", [1, 2, KEPT_LINES, KEPT_LINES + 1, 100])
def test_a_full_disk_costs_no_line(num_failed: int, fits: int, tmp_path: Path) -> None:
    """The half line that it leaves is gone when there is room again, and nothing is twice."""
    journal = write_without_room(tmp_path, num_failed, fits)
    total = 1 + num_failed + 1
    journal.emit(step(total - 1))
    assert numbers(tmp_path) == list(range(total))
    other = Journal(tmp_path / JOURNAL)
    other.go_on_at(total)
    other.start(writer=True)
    other.emit(step(total))
    assert numbers(tmp_path) == list(range(total + 1))


def test_a_step_does_not_pay_for_all_lines_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[int] = []

    def note(number: int, line: Line, before: bytes) -> tuple[str, bytes]:
        texts.append(number)
        return written(number, line, before)

    monkeypatch.setattr("unisono.record.journal.chain.written", note)
    write_without_room(tmp_path, num_failed=200, fits=20)
    assert len(texts) <= 1 + 200 * LINES_AT_ONCE
    assert max(texts) <= LINES_AT_ONCE, "those that come next, again and again"


def test_what_a_disk_had_no_room_for_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the journal, and by who compares: what is there is equal."""
    monkeypatch.setattr("unisono.record.journal.writing.MOST_KEPT_LINES", 3)
    journal = write_without_room(tmp_path, num_failed=9, fits=20)
    for line in (step(10), end()):
        journal.emit(line)
    kinds = [(line["line"], line["kind"]) for line in read(tmp_path)]
    assert kinds == [(0, "step"), (6, "gap"), *((number, "step") for number in range(7, 11)), (11, "end")]
    assert list(read(tmp_path))[1] == {"line": 6, "kind": "gap", "first": 1, "last": 6}
    whole = run_with(tmp_path / "whole", *map(step, range(11)), end())
    said = f"identical: 5 steps, model 5f3a; lines 1-6 are missing in {tmp_path}"
    assert compare(whole, tmp_path) == said
    assert compare(tmp_path, whole) == said


def test_a_difference_is_one_with_missing_lines_too(tmp_path: Path) -> None:
    a = run_with(tmp_path / "a", *map(step, range(5)), step(5, digest="beef"), end())
    b = run_with(tmp_path / "b", *map(step, range(6)), end())
    texts = (b / JOURNAL).read_text().splitlines(keepends=True)
    (b / JOURNAL).write_text("".join(text for number, text in enumerate(texts) if number not in (1, 2, 4)))
    with pytest.raises(Difference) as caught:
        compare(a, b)
    assert str(caught.value) == (
        f"step 5 is the first to differ: digest is beef in {a}, {5:016x} in {b}; lines 1-2, 4 are missing in {b}"
    )


@pytest.mark.parametrize("heard", [0, 7])
def test_the_next_writer_has_what_was_written_nowhere(heard: int, tmp_path: Path) -> None:
    """Also one that was not there yet: those who do not see the directory hand over what they keep."""
    first, other = Journal(tmp_path / JOURNAL), Journal(tmp_path / "not here" / JOURNAL)
    for journal in (first, other):
        journal.start(writer=journal is first)
    for number in range(40):
        for journal in (first, other):
            if journal is other or number < 7:
                journal.emit(step(number))
    assert first.num_written == 7
    assert other.num_written == 0
    other.note_written(heard)
    assert [json.loads(line)["line"] for line in other.unwritten()] == list(range(heard, 40))
    newcomer = Journal(tmp_path / JOURNAL)
    newcomer.go_on_at(other.number, other.unwritten())
    newcomer.start(writer=True)
    newcomer.emit(step(40))
    assert numbers(tmp_path) == list(range(41))
    other.note_written(newcomer.num_written)
    assert other.unwritten() == []


def test_only_a_few_lines_are_kept_of_those_that_are_written(tmp_path: Path) -> None:
    writer, other = Journal(tmp_path / JOURNAL), Journal(tmp_path / JOURNAL)
    writer.start(writer=True)
    for number in range(50):
        for journal in (writer, other):
            journal.emit(step(number))
        other.note_written(writer.num_written)
    assert len(writer._recent) == len(other._recent) == KEPT_LINES


def test_a_directory_that_is_gone_for_a_while_costs_no_line(tmp_path: Path) -> None:
    """Another one of its name is not taken for it."""
    is_there = True
    journal = Journal(tmp_path / JOURNAL, lambda: is_there)
    journal.start(writer=True)
    journal.emit(step(0))
    (tmp_path / JOURNAL).rename(tmp_path / "moved")
    is_there = False
    journal.emit(step(1))
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    (tmp_path / "moved").rename(tmp_path / JOURNAL)
    is_there = True
    journal.emit(step(2))
    assert numbers(tmp_path) == [0, 1, 2]


def num_bytes_read() -> int:
    """By all system calls of this process."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


@pytest.mark.parametrize("torn", ["", '{"line": 6000, "ki'])
def test_a_long_journal_is_not_read_by_who_goes_on_with_it(torn: str, tmp_path: Path) -> None:
    """Only its end is: its next writer is in the middle of a training, and all wait for it."""
    run = run_with(tmp_path / "run")
    line = json.dumps({"line": 0, **to_line(step(0, logs={"text": "x" * 1000}))})
    with (run / JOURNAL).open("w") as file:
        file.writelines(line.replace('"line": 0', f'"line": {number}') + "\n" for number in range(6000))
        file.write(torn)
    assert (run / JOURNAL).stat().st_size > 6_000_000
    before = num_bytes_read()
    truncate(run / JOURNAL, 5990)
    journal = Journal(run / JOURNAL)
    journal.go_on_at(5990)
    journal.start(writer=True)
    journal.emit(step(5990))
    conclude(run, "all are gone")
    assert num_bytes_read() - before < 1_000_000
    assert numbers(run) == list(range(5992))


@pytest.mark.parametrize("length", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_lines_of_any_length_are_found_from_the_end(length: int, tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", *(step(number, logs={"text": "x" * length}) for number in range(4)))
    with (run / JOURNAL).open("a") as file:
        file.write("y" * length)
    journal = Journal(run / JOURNAL)
    journal.go_on_at(4)
    journal.start(writer=True)
    assert numbers(run) == [0, 1, 2, 3]
    for number in (3, 1, 0):
        truncate(run / JOURNAL, number)
        assert numbers(run) == list(range(number))


@pytest.mark.parametrize("number", ["1e999999", "[" * 100_000], ids=["infinite", "deep"])
def test_a_line_whose_number_cannot_be_read_is_left_out_by_who_goes_on(number: str, tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", step(0), step(1))
    with (run / JOURNAL).open("a") as file:
        file.write(f'{{"line": {number}, "kind": "step"}}\n')
    with (run / JOURNAL).open("rb") as file:
        _, last, broken = tail(run / JOURNAL, file)
    assert last is not None
    assert last["line"] == 1
    assert broken
    truncate(run / JOURNAL, 2)
    assert numbers(run) == [0, 1]


def test_a_broken_line_at_the_end_does_not_end_a_training(tmp_path: Path) -> None:
    """It is said, and what it should have been is written again after it."""
    folder = run_with(tmp_path / "run", step(0), step(1), step(2))
    first, second, third = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    (folder / JOURNAL).write_bytes(first + second + third[:30] + b"\n" + second[:9])
    journal = Journal(folder / JOURNAL)
    for number in range(3):
        journal.emit(step(number))
    with pytest.warns(
        UserWarning,
        match=(r"a line of .* is not a line of a journal: .*; the run continues after its last complete line"),
    ):
        journal.start(writer=True)
    journal.emit(step(3))
    after = (folder / JOURNAL).read_bytes()
    assert after == first + second + third[:30] + b"\n" + third + after.splitlines(keepends=True)[-1]
    assert json.loads(after.splitlines()[-1])["line"] == 3


def test_a_journal_that_cannot_be_read_does_not_end_a_training(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).mkdir()
    journal = Journal(tmp_path / JOURNAL)
    with pytest.warns(UserWarning, match="cannot be written: .*; training continues"):
        journal.start(writer=True)
    journal.emit(step(0))
    assert journal.number == 1


def test_a_writer_that_is_none_any_more_and_is_again(tmp_path: Path) -> None:
    one, other = Journal(tmp_path / JOURNAL), Journal(tmp_path / JOURNAL)
    for writer in (one, other, one):
        for journal in (one, other):
            journal.start(writer=journal is writer)
        for _ in range(3):
            for journal in (one, other):
                journal.emit(step(journal.number))
    assert numbers(tmp_path) == list(range(9))


def test_a_log_whose_name_is_half_a_character_does_not_end_a_training(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, writer=True)
    for number in range(300):
        journal.emit(step(number, logs={"\ud800": 1.0}))
    assert numbers(tmp_path) == list(range(300))
    assert len([line for line in read(tmp_path) if line["logs"]]) == 300


def test_a_newcomer_goes_on_at_the_line_of_the_others(tmp_path: Path) -> None:
    """What it had said before it joined (an evaluation of the start) was theirs long ago."""
    run_with(tmp_path / "run", *[step(number) for number in range(7)])
    newcomer = Journal(tmp_path / "run" / JOURNAL)
    newcomer.emit(evaluation(0, correct=1))
    newcomer.go_on_at(7)
    newcomer.start(writer=True)
    newcomer.emit(step(7))
    assert numbers(tmp_path / "run") == list(range(8))
    assert {line["kind"] for line in read(tmp_path / "run")} == {"step"}


# -- comparing ---------------------------------------------------------------------------------------


def test_equal_runs_are_called_identical(tmp_path: Path) -> None:
    """Whatever the workers, the generations and the times were."""
    a = run_with(tmp_path / "a", step(0), evaluation(1, correct=3), step(1), end())
    b = run_with(
        tmp_path / "b",
        step(0, generation=4, seconds=Seconds(compute=9.0), workers={"w0": WorkerTimes(leaves=3)}),
        evaluation(1, correct=3),
        step(1, logs={"lr": 1.0}),
        end(reason="finished"),
    )
    assert compare(a, b) == "identical: 2 steps, model 5f3a"


def test_runs_that_have_not_ended(tmp_path: Path) -> None:
    a, b = (run_with(tmp_path / name, step(0), step(1)) for name in "ab")
    assert compare(a, b) == "identical so far: 2 steps, neither has ended"


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            [step(0), step(1, digest="beef"), step(2), end()],
            "step 1 is the first to differ: digest is 0000000000000001 in {a}, beef in {b}",
        ),
        (
            [step(0), step(1, loss=0.25 + 2**-54)],
            "step 1 is the first to differ: loss is 0.25 in {a}, 0.25000000000000006 in {b}",
        ),
        ([step(0), step(1, weight=23.0)], "step 1 is the first to differ: weight is 24.0 in {a}, 23.0 in {b}"),
        (
            [step(0), step(1), step(2)],
            "equal for 3 steps; then {a} has finished, and {b} ends (it was stopped or killed, or is still running)",
        ),
        (
            [step(0), step(1)],
            "equal for 2 steps; then {a} has step 2, and {b} ends (it was stopped or killed, or is still running)",
        ),
        ([step(0), step(1), step(2), step(3)], "equal for 3 steps; then {a} has finished, and {b} has step 3"),
        (
            [step(0), evaluation(1, n=1)],
            "equal for 1 step; then {a} has step 1, and {b} has the evaluation at step 1",
        ),
        (
            [step(0), step(1), step(2), end(digests={"model": "5f3b"})],
            "all steps are equal, the final state differs: digests is {{'model': '5f3a'}} in {a}, "
            "{{'model': '5f3b'}} in {b}",
        ),
        (
            [step(0), step(1), step(2), end(ok=False)],
            "equal for 3 steps; then {a} has finished, and {b} has failed",
        ),
    ],
)
def test_the_first_difference_is_named(theirs: list[LineEvent], said: str, tmp_path: Path) -> None:
    a, b = run_with(tmp_path / "a", step(0), step(1), step(2), end()), run_with(tmp_path / "b", *theirs)
    with pytest.raises(Difference) as caught:
        compare(a, b)
    assert str(caught.value) == said.format(a=a, b=b)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("0.0", "-0.0"), ("1", "true"), ("1", "1.0"), ("[0.0]", "[-0.0]"), ('{"n": 0}', '{"n": false}')],
)
def test_values_are_compared_as_they_are_written(ours: str, theirs: str, tmp_path: Path) -> None:
    """Equal numbers of Python may have other bits; the chains of these journals differ as well."""
    a, b = run_with(tmp_path / "a", step(0)), run_with(tmp_path / "b", step(0))
    for run, value in ((a, ours), (b, theirs)):
        line = json.loads((run / JOURNAL).read_text())
        (run / JOURNAL).write_text(json.dumps({**line, "totals": json.loads(value)}) + "\n")
    chains = [next(links(read(run))).value for run in (a, b)]
    assert chains[0] != chains[1]
    with pytest.raises(Difference, match="step 0 is the first to differ: totals is"):
        compare(a, b)
    assert compare(b, b) == "identical so far: 1 step, neither has ended"


def test_evaluations_are_compared(tmp_path: Path) -> None:
    a, b = (run_with(tmp_path / name, step(0), evaluation(1, correct=count)) for name, count in (("a", 93), ("b", 94)))
    with pytest.raises(Difference) as caught:
        compare(a, b)
    assert "the evaluation at step 1 is the first to differ: totals is {'correct': 93}" in str(caught.value)


def test_the_step_at_which_only_one_run_has_failed_is_the_one_to_look_into(tmp_path: Path) -> None:
    whole = run_with(tmp_path / "whole", step(0), step(1))
    failed = run_with(tmp_path / "failed", step(0), end(ok=False, reason="nan"))
    for first, second, number in ((whole, failed, 0), (failed, whole, 1)):
        with pytest.raises(Difference, match="equal for 1 step; then ") as found:
            compare(first, second)
        assert found.value.step == 1
        assert [bool(digest) for digest in found.value.digests] == [number == 0, number == 1]


def test_runs_that_failed_have_ended(tmp_path: Path) -> None:
    """A run that failed has no digests of what it tracked, and has ended nevertheless."""
    a, b = (run_with(tmp_path / name, step(0), end(ok=False, reason=name)) for name in "ab")
    assert compare(a, b) == f"identical: 1 step, both failed: {a}: a; {b}: b. The reasons are not compared"
    assert compare(a, a) == "identical: 1 step, both failed: a"
    killed = run_with(tmp_path / "killed", step(0))
    for pair in ((a, killed), (killed, a)):
        with pytest.raises(Difference) as caught:
            compare(*pair)
        words = "equal for 1 step; then {} has failed, and {} ends (it was stopped or killed, or is still running)"
        assert str(caught.value) == words.format(a, killed)


def test_runs_that_tracked_nothing_have_ended(tmp_path: Path) -> None:
    a, b = (run_with(tmp_path / name, step(0), end(digests={})) for name in "ab")
    assert compare(a, b) == "identical: 1 step"


@pytest.mark.parametrize("text", ["", '{"line": 0, "kind": "st'], ids=["nothing", "torn"])
def test_what_holds_no_line_is_no_journal(text: str, tmp_path: Path) -> None:
    a, b = run_with(tmp_path / "a", step(0)), tmp_path / "b"
    b.write_text(text)
    with pytest.raises(ValueError, match="b is not a journal"):
        compare(a, b)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    a = run_with(tmp_path / "a", step(0))
    with pytest.raises(OSError, match="nowhere"):
        compare(a, tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{nonsense", "[1]", "7", '{"step": 1}', '{"kind": 3}', "\xff"])
def test_a_broken_line_is_named(text: str, tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", step(0))
    with (folder / JOURNAL).open("ab") as file:
        file.write(text.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"line 2 of .*journal.jsonl is not a line of a journal: "):
        compare(folder, folder)
    conclude(folder, "all are gone")
    assert (folder / JOURNAL).read_bytes().count(b"\n") == 2, "nothing is appended to what cannot be read"


# -- a run whose members are gone --------------------------------------------------------------------


def test_the_end_is_written_for_those_who_could_not(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", step(0), step(1))
    with (run / JOURNAL).open("a") as file:
        file.write('{"line": 2, "kin')  # its writer was killed
    conclude(run, "all are gone")
    conclude(run, "again")
    *steps, last = read(run)
    assert [line["step"] for line in steps] == [0, 1]
    assert unchained([last]) == [{"line": 2, "kind": "end", "ok": False, "reason": "all are gone", "digests": {}}]


def test_no_end_is_written_where_there_is_one_or_nothing(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", step(0), end())
    before = (run / JOURNAL).read_bytes()
    conclude(run, "all are gone")
    assert (run / JOURNAL).read_bytes() == before
    conclude(tmp_path, "all are gone")
    assert not (tmp_path / JOURNAL).exists()
