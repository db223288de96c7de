"""Snapshots that wait for an evaluator: who has one, what comes of it, and what becomes of it without its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from unisono.engine.checkpoint.evaluations import EvaluationOrder, Snapshots, claimed, give_up, hand_in, order_of
from unisono.system.owned import NotOwned

FOREVER = 1e9


def write(folder: Path, more: Mapping[str, bytes]) -> None:
    for name, data in more.items():
        (folder / name).write_bytes(data)


def order(number: int) -> EvaluationOrder:
    return EvaluationOrder(number=number, phases=1, step=3, samples=8, batch_size=4)


def put(run: Path, *numbers: int, patience_s: float = FOREVER) -> Snapshots:
    snapshots = Snapshots(run, patience_s)
    for number in numbers:
        snapshots.put(order(number), write)
    return snapshots


def test_without_an_evaluator_nobody_is_waited_for(tmp_path: Path) -> None:
    snapshots = put(tmp_path, 7)
    assert not snapshots.has_evaluators()
    assert snapshots.outcome(7) == b""
    assert snapshots.why(7) == "there is no evaluator any longer"
    with Snapshots(tmp_path, FOREVER).attended(), Snapshots(tmp_path, FOREVER).attended():
        assert snapshots.has_evaluators()
        assert snapshots.outcome(7) is None
    assert not snapshots.has_evaluators()


def test_the_oldest_comes_first_and_has_one_owner(tmp_path: Path) -> None:
    snapshots = put(tmp_path, 12, 3)
    assert [order_of(one).number for one in snapshots.waiting()] == [3, 12]
    first, second = snapshots.waiting()
    with claimed(first) as is_mine, claimed(first) as is_theirs, claimed(second) as is_another:
        assert (is_mine, is_theirs, is_another) == (True, False, True)
    with claimed(first) as is_mine:
        assert is_mine


def test_of_what_an_earlier_run_left_a_folder_of_the_user_stays(tmp_path: Path) -> None:
    snapshots = put(tmp_path, 7)
    for name in ("2026-01", "0000000009", ".0000000008-host-17.partial", ".0000000006.removed"):
        (tmp_path / "evaluations" / name).mkdir()
        write(tmp_path / "evaluations" / name, {"mine.csv": b"1"})
    snapshots.clear()
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == ["0000000009", "2026-01"]


def test_totals_are_there_or_the_workers_compute_them(tmp_path: Path) -> None:
    snapshots = put(tmp_path, 0, 1)
    with snapshots.attended():
        first, second = snapshots.waiting()
        hand_in(first, b"totals")
        give_up(second, "its script has failed")
        assert (snapshots.outcome(0), snapshots.outcome(1)) == (b"totals", b"")
        assert snapshots.why(1) == "its script has failed"
        assert snapshots.waiting() == []
        with claimed(first) as is_mine:
            assert not is_mine
    assert snapshots.outcome(0) == b"totals"


def test_a_snapshot_that_is_not_waited_for_any_more_takes_no_totals(tmp_path: Path) -> None:
    snapshots = put(tmp_path, 0)
    (first,) = snapshots.waiting()
    snapshots.remove(0)
    hand_in(first, b"totals")
    with claimed(first) as is_mine:
        assert not is_mine
    assert snapshots.waiting() == []
    snapshots.remove(0)


def test_a_killed_owner_has_nothing(tmp_path: Path) -> None:
    put(tmp_path, 0)
    code = (
        "import sys; from pathlib import Path; from unisono.engine.checkpoint.evaluations import Snapshots, claimed\n"
        "snapshots = Snapshots(Path(sys.argv[1]), 0.0)\n"
        "with snapshots.attended(), claimed(snapshots.waiting()[0]) as is_mine:\n"
        "    print(is_mine, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    snapshots = Snapshots(tmp_path, FOREVER)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert snapshots.has_evaluators()
        with claimed(snapshots.waiting()[0]) as is_mine:
            assert not is_mine
        os.kill(process.pid, signal.SIGKILL)
    assert not snapshots.has_evaluators()
    with claimed(snapshots.waiting()[0]) as is_mine:
        assert is_mine


def test_an_evaluator_that_does_not_get_on_is_not_waited_for(tmp_path: Path) -> None:
    snapshots = put(tmp_path, 0, patience_s=0.0)
    with snapshots.attended(), claimed(snapshots.waiting()[0]):
        assert snapshots.outcome(0) is None  # it has just begun, as far as this process has seen
        assert snapshots.outcome(0) == b""
        assert snapshots.why(0) == "its evaluator makes no progress"
        os.utime(snapshots.path(0) / "claim", (1.0, 1.0))
        assert snapshots.outcome(0) is None


def test_a_snapshot_is_whole_or_not_there(tmp_path: Path) -> None:
    def fail(folder: Path, more: Mapping[str, bytes]) -> None:
        write(folder, more)
        raise OSError("no space is left")

    snapshots = Snapshots(tmp_path, FOREVER)
    with pytest.raises(OSError, match="no space"):
        snapshots.put(order(0), fail)
    assert [*(tmp_path / "evaluations").iterdir()] == []
    put(tmp_path, 0)
    snapshots.put(order(0), fail)  # another worker has written the same
    assert len(snapshots.waiting()) == 1


def test_another_run_finds_nothing_and_evaluators_stay(tmp_path: Path) -> None:
    snapshots = put(tmp_path, 0, 1)
    (tmp_path / "evaluations" / ".0000000002-host-1.partial").mkdir()
    with snapshots.attended():
        snapshots.clear()
        assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["evaluators"]
        assert snapshots.has_evaluators()


def test_what_another_user_may_have_written_is_not_believed(tmp_path: Path) -> None:
    """A link stands for a file of somebody else: whoever may write in the directory can make one."""
    snapshots = put(tmp_path, 0)
    path = snapshots.path(0)
    (tmp_path / "elsewhere").write_bytes(b"totals")
    (path / "totals.msgpack").symlink_to(tmp_path / "elsewhere")
    assert snapshots.outcome(0) == b""
    (path / "order.msgpack").rename(path / "order")
    (path / "order.msgpack").symlink_to(path / "order")
    with pytest.raises(NotOwned):
        order_of(path)
