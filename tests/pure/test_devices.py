"""Which GPU a worker computes on. There is none here: what CUDA says is made up."""

from __future__ import annotations

import pytest
import torch

from unisono.core.spec import WorkerSpec
from unisono.engine.loop.settings import choose_device

CPU = torch.device("cpu")


def gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA's current device, as the last of the list, on a machine with two GPUs."""
    chosen = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        (WorkerSpec(), 0),
        (WorkerSpec(local_rank=1), 1),
        (WorkerSpec(local_rank=3), 1),
        (WorkerSpec(local_rank=0, gpu=1), 1),  # GPU 0 is another run's
    ],
)
def test_a_worker_computes_on_its_own_gpu(spec: WorkerSpec, number: int, current: list[int]) -> None:
    assert choose_device(None, spec.gpu_number) == gpu(number)
    assert current[-1] == number


@pytest.mark.parametrize(("argument", "number"), [("cuda:1", 1), ("cuda", 0), (gpu(1), 1)])
def test_a_gpu_that_the_script_names_becomes_the_current_one(
    argument: str | torch.device, number: int, current: list[int]
) -> None:
    """Random numbers are set for the current one."""
    assert choose_device(argument, 0) == gpu(number)
    assert current[-1] == number


def test_without_a_gpu_it_is_the_cpu(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu", 0) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None, 1) == CPU
    assert choose_device("cuda:1", 0) == gpu(1)  # torch says what is wrong when it is used
    assert current == [0]
