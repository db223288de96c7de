"""What is said on other systems than Linux. The tests run on Linux: its name is exchanged, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import unisono
from unisono.cli import _group
from unisono.core.errors import UsageError
from unisono.engine.loop.process_settings import choose_device
from unisono.script import inspected
from unisono.system import accelerators


def test_on_windows_names_and_commands_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delitem(vars(unisono), "Run", raising=False)
    with pytest.raises(UsageError, match=r"unisono needs Linux .* install it in WSL 2"):
        unisono.Run  # noqa: B018
    with pytest.raises(UsageError, match="install it in WSL 2"):
        CliRunner().invoke(_group, ["watch", "--once", "runs/one"], catch_exceptions=False, standalone_mode=False)
    assert "Usage: " in CliRunner().invoke(_group, ["--help"]).output
    assert unisono.UsageError is UsageError


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("mps", "device='mps': torch has no such device on this machine"),
        (torch.device("xpu", 0), "device='xpu:0': torch has no such device on this machine"),
    ],
)
def test_devices_that_are_not_there_are_refused_in_words(device: str | torch.device, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        choose_device(device, 0)


def test_apples_accelerator_is_used_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "_named", set())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert choose_device(None, 0) == torch.device("cpu")
    assert accelerators.built_for() == ""
    assert choose_device("mps", 0) == torch.device("mps", 0)
    assert accelerators.built_for() == "mps"


def test_a_system_without_timed_waits_for_signals_waits_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr("signal.sigtimedwait")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as child:
        assert inspected._wait_for(child) == 7
