"""What the tests' own processes do when something goes wrong with them."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from tests.workers import conftest, processes
from tests.workers.conftest import _nurseries, run_nursery


def test_a_process_that_hangs_before_its_body_begins_shows_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was forked while another thread held a lock."""
    arrivals = multiprocessing.get_context("fork").SimpleQueue()

    def hang_early(parent: int) -> None:
        arrivals.put(None)
        threading.Event().wait()

    monkeypatch.setattr(processes, "_end_with_parent", hang_early)
    with processes.Team(2, lambda seat: seat.rank, deadline_s=0.0) as team:
        for _ in range(2):
            arrivals.get()
        with pytest.raises(AssertionError, match=r"(?s)process 0:.*in hang_early.*process 1:.*in hang_early"):
            team.results()
    arrivals.close()


def test_a_team_that_cannot_be_started_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = processes.Team._start

    def start_one(self: processes.Team, rank: int, *arguments: object) -> processes._Process:
        if rank == 1:
            raise BlockingIOError("no more processes")
        started.append(start(self, rank, *arguments))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(processes.Team, "_start", start_one)
    with pytest.raises(BlockingIOError):
        processes.Team(2, lambda seat: seat.hear())
    with pytest.raises(ValueError, match="closed"):
        _ = started[0].process.exitcode


def test_a_nursery_is_forgotten_after_a_test_that_fails() -> None:
    before = list(_nurseries)
    fake = ["sh", "-c", "echo listens; exec sleep 60"]
    with pytest.raises(ZeroDivisionError), run_nursery("nowhere", before=fake):
        raise ZeroDivisionError
    assert _nurseries == before


def test_a_nursery_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "WAIT_S", 0.0)
    with (
        pytest.raises(AssertionError, match="no nursery within 0 s"),
        run_nursery("nowhere", before=["sh", "-c", "exec sleep 60"]),
    ):
        pass
