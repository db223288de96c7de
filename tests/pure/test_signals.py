"""What a signal to the command of a machine asks for."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM, Signals

import pytest

from unisono.core.signals import AwaitEnd, EndRun, KillWorkers, LeaveRun, Reaction, StopRun, reaction

STOPS = "interrupted, with a checkpoint"


@pytest.mark.parametrize(
    ("number", "is_primary", "has_workers", "checkpoint_code", "expected"),
    [
        (SIGINT, True, True, -1, EndRun("interrupted", 130)),
        (SIGTERM, True, False, -1, EndRun("ended by SIGTERM", 143)),
        (SIGINT, True, True, 0, StopRun(STOPS, 130)),
        (SIGTERM, True, True, 75, StopRun("ended by SIGTERM, with a checkpoint", 75)),
        (SIGHUP, True, True, 75, EndRun("ended by SIGHUP", 129)),
        (SIGINT, False, True, -1, LeaveRun()),
        (SIGTERM, False, True, 75, LeaveRun()),
        (SIGHUP, False, True, -1, EndRun("ended by SIGHUP", 129)),
        (SIGINT, False, False, -1, EndRun("interrupted", 130)),
    ],
)
def test_a_first_signal(
    number: Signals, is_primary: bool, has_workers: bool, checkpoint_code: int, expected: Reaction
) -> None:
    found = reaction(
        number, num_before=0, is_primary=is_primary, has_workers=has_workers, checkpoint_code=checkpoint_code
    )
    assert found == expected


@pytest.mark.parametrize("is_primary", [True, False])
def test_a_second_signal_waits_for_nothing(is_primary: bool) -> None:
    found = reaction(SIGINT, num_before=1, is_primary=is_primary, has_workers=True, checkpoint_code=0)
    assert found == KillWorkers("ended by a second signal", 130)


def test_a_signal_to_all_tasks_of_a_job_is_decided_by_the_first_of_them() -> None:
    """The engine kills them when its patience is over; until then a second signal changes nothing."""

    def found(number: Signals, *, is_primary: bool, num_before: int = 0) -> Reaction:
        return reaction(
            number,
            num_before=num_before,
            is_primary=is_primary,
            has_workers=True,
            checkpoint_code=143,
            engine="Open MPI",
        )

    assert isinstance(found(SIGTERM, is_primary=True), StopRun)
    assert found(SIGTERM, is_primary=True, num_before=1) == AwaitEnd("")
    other = found(SIGTERM, is_primary=False)
    assert isinstance(other, AwaitEnd)
    assert other.words.startswith("SIGTERM of Open MPI: the job must end, or one of its tasks is lost")
