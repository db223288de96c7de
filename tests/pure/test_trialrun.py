"""A trial that takes long says how far it is."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from unisono.tools import trialrun


class _Process:
    """A process that ends at the third question."""

    def __init__(self) -> None:
        self._waits = 0

    def wait(self, timeout_s: float) -> int:
        self._waits += 1
        if self._waits < 3:
            raise subprocess.TimeoutExpired("trial", timeout_s)
        return 3


def test_a_trial_says_how_many_steps_it_has_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal.jsonl").write_text('{"kind":"start"}\n{"kind":"step","step":0}\n{"kind":"step","step":1}\n')
    process = cast(Any, _Process())
    assert trialrun._wait(process, tmp_path, 600.0, "with 2 workers", 8) == 3
    assert capsys.readouterr().err.splitlines() == ["unisono: with 2 workers: 2 of 8 steps after 0 s"] * 2


def test_a_trial_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        trialrun._wait(cast(Any, _Process()), tmp_path, trialrun.TELL_EVERY_S, "alone", 8)
