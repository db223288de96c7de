"""The time of a link or a host that becomes slow in mid-run goes where it belongs, and a slow worker is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import linked_training
from tests.hosts.lab import Lab, laid
from tests.workers.conftest import Command, Unisono
from tests.workers.gates import Gates
from unisono.record.history import History

SCRIPT = Path(linked_training.__file__)
JOIN, CHANGE, MEND = 2, 300, 307
"""Gates: the other host joins; something becomes slow; it ends. Before that, steps enough to know what is usual."""
STEPS = 1200
FOR_EVER = 10**9
SLOW_S = 0.1


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with laid(2) as lab:
        yield lab


def started(lab: Lab, unisono: Unisono, run_dir: Path, gates: Gates, *arguments: object) -> Command:
    """A run with a worker on each of two machines."""
    first, second = lab.machines
    options = (
        "--run-dir",
        run_dir,
        "--bind",
        first.address,
        "--set",
        "heartbeat=0.3s",
        "--set",
        "exchange-timeout=3600s",
    )
    script = ("--", "--steps", STEPS, "--gates", gates.folder, *arguments)
    command = first.start(unisono, "run", SCRIPT, "-n", 1, *options, *script)
    gates.wait(JOIN)
    token = gates.folder.parent / "token"
    token.write_text((run_dir / "token").read_text())
    url = json.loads((run_dir / "head.json").read_text())["url"]
    second.start(unisono, "join", url, "--token-file", token, "-n", 1)
    gates.open(JOIN, command.generation("with 2 workers"))
    gates.wait(CHANGE, workers=2)
    return command


def seconds_of(run_dir: Path, part: str, first: int, last: int) -> list[float]:
    """By worker, how long a part has taken in these steps together."""
    found = History(run_dir)
    found.refresh()
    rows = found.times(first, last, 1000)["values"][part]
    return [sum(column) for column in zip(*rows, strict=True)]


def said(command: Command, *words: str) -> list[str]:
    return [line for line in command.err if all(word in line for word in words)]


def test_the_time_of_a_link_that_is_slowed_in_mid_run_is_booked_as_network(
    lab: Lab, unisono: Unisono, tmp_path: Path
) -> None:
    """10 Mbit/s in one direction: both workers spend these steps on the network and hardly wait for each other."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (JOIN, CHANGE, MEND)) as gates:
        command = started(lab, unisono, run_dir, gates)
        lab.limit(0, 10)
        gates.open(CHANGE)
        gates.wait(MEND, workers=2)
        lab.mend()
        gates.open(MEND)
        assert command.wait() == 0, command.err
    slow = range(CHANGE + 1, MEND - 1)
    of_part = {part: seconds_of(run_dir, part, slow.start, slow.stop - 1) for part in ("network", "waiting")}
    for worker in range(2):
        assert of_part["network"][worker] > 0.5 * len(slow)
        assert of_part["waiting"][worker] < 0.2 * of_part["network"][worker]


def test_a_host_that_becomes_slow_in_mid_run_is_named_and_the_other_waits_for_its_worker(
    lab: Lab, unisono: Unisono, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (JOIN, CHANGE, MEND)) as gates:
        arguments = ("--slow-host", "m1", "--slow-from", CHANGE, "--slow-until", MEND + 2, "--slow-s", SLOW_S)
        command = started(lab, unisono, run_dir, gates, *arguments, "--steps", FOR_EVER)
        gates.open(CHANGE)
        gates.wait(MEND, workers=2)
        gates.open(MEND)
        command.line("is no longer slow", pattern="w1 on m1")  # after seconds, however many steps they have
        assert unisono("stop", run_dir, before=lab.machines[0].inside()).wait() == 0
        assert command.wait() == 0, command.err
    slow = range(CHANGE + 1, MEND - 1)
    waited, network = (seconds_of(run_dir, part, slow.start, slow.stop - 1)[0] for part in ("waiting", "network"))
    assert waited > 1.5 * SLOW_S * len(slow)
    assert network < 0.2 * waited
    history = History(run_dir)
    history.refresh()
    assert {row[0] for row in history.times(slow.start, slow.stop - 1, 1000)["waits_for"]} == {"w1"}
    assert said(command, "w1 on m1", "as long for a micro-batch as")
    texts = [event["text"] for event in history.events()["events"] if event["kind"] == "announcement"]
    assert any("as long for a micro-batch as" in text for text in texts)


def test_messages_are_coded_while_the_link_is_slow_and_only_then(lab: Lab, unisono: Unisono, tmp_path: Path) -> None:
    """It is found by what the kernel has measured: 100 Mbit/s for a while, and no limit before and after. (On a busy
    machine a link without a limit may look slow for some steps.)
    """
    pytest.importorskip("zstandard")
    run_dir, mend, last = tmp_path / "run", CHANGE + 40, CHANGE + 100
    with Gates(tmp_path / "gates", (JOIN, CHANGE, mend)) as gates:
        command = started(lab, unisono, run_dir, gates, "--steps", last)
        for number in range(2):
            lab.limit(number, 100)
        gates.open(CHANGE)
        gates.wait(mend, workers=2)
        lab.mend()
        gates.open(mend)
        assert command.wait() == 0, command.err
    lines = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    sent = {line["step"]: line.get("sent_bytes", 0) for line in lines if line["kind"] == "step"}
    raw = max(sent.values())
    plain = {step for step in sent if sent[step] == raw}
    fast, slow, mended = range(JOIN + 1, CHANGE), range(mend - 20, mend), range(mend + 10, last)
    assert max(sent[step] for step in {*sent} - plain) < 0.9 * raw
    assert len(plain.intersection(fast)) > 0.9 * len(fast)
    assert len(plain.intersection(slow)) < 0.1 * len(slow)
    assert len(plain.intersection(mended)) > 0.9 * len(mended)
