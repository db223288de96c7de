"""Which GPU a worker computes on. There is none here: what CUDA says is made up."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.core.errors import UsageError
from unisono.core.spec import WorkerSpec
from unisono.engine.loop.process_settings import choose_device
from unisono.strategies.delay import underway
from unisono.system import accelerators

CPU = torch.device("cpu")


def gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA's current device, as the last of the list, on a machine with two GPUs."""
    chosen = [0]
    monkeypatch.setattr(accelerators, "built_for", lambda: "cuda")
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
    with pytest.raises(UsageError, match="torch has no such device on this machine, which has the CPU only"):
        choose_device("cuda:1", 0)
    assert current == [0]


def test_a_gpu_that_this_process_does_not_see_is_refused_in_words(current: list[int]) -> None:
    with pytest.raises(UsageError, match="device='cuda:2': this process sees 2 devices of this kind"):
        choose_device("cuda:2", 0)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"uuid": "GPU-1"}, {"uuid": "GPU-1"}, True),
        ({"uuid": "GPU-1"}, {"uuid": "GPU-2"}, False),
        ({}, {}, True),
    ],
)
def test_two_devices_are_on_one_card_by_its_id_and_never_by_their_number(
    one: dict[str, str], other: dict[str, str], is_same: bool, current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for properties in (one, other):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, has=properties: SimpleNamespace(**has))
        found.append({*accelerators.cards(gpu(0))})
    assert bool(found[0] & found[1]) == is_same


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC 11.4.0\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build\n", "570.86"),
        ("none", ""),
        (None, None),
    ],
)  # fmt: skip
def test_what_results_depend_on_is_said_of_a_card_of_nvidia(
    text: str | None, version: str | None, current: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver's version is hidden, as in some containers."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    monkeypatch.setattr(accelerators, "NVIDIA_DRIVER", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(text)
    found = accelerators.facts(gpu(0))
    assert {"device name", "cuda", "cudnn", "blas", "linalg"} <= {*found}
    assert found.get("driver") == version


def test_an_environment_that_ends_survivors_is_overruled_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters export such variables."""
    made = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments: object) -> None:
            made.append([os.environ[name] for name in accelerators.LOST_PEERS])

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    for name, value in zip(accelerators.LOST_PEERS, ("3", "0", "1"), strict=True):
        monkeypatch.setenv(name, value)
    _, overruled = accelerators.open_library("nccl", dist.HashStore(), 0, 2, timedelta(seconds=1))
    assert made == [["0", "0", "0"]]
    assert overruled == ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3", "TORCH_NCCL_ENABLE_MONITORING=1"]


class Streams:
    """A device's module that writes down what was launched where, and what waits for what."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self._here = threading.local()
        outer = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = "own"

            def wait_event(self, event: Any) -> None:
                outer.log.append((self.name, f"waits for {event.name}"))

        class Event:
            def record(self, stream: Any) -> None:
                self.name = f"what is on {stream.name}"
                outer.log.append((stream.name, "marked"))

        self.Stream, self.Event = Stream, Event

    def set_device(self, index: int) -> None:
        pass

    def set_stream(self, stream: Any) -> None:
        self._here.stream = stream

    def current_stream(self, device: torch.device) -> Any:
        if not hasattr(self._here, "stream"):
            self._here.stream = self.Stream(device)
            self._here.stream.name = "the script's"
        return self._here.stream


def test_sums_under_way_have_a_stream_of_their_own_and_an_event_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(underway, "combine", lambda *_: module.log.append((module.current_stream(CPU).name, "sum")))
    under_way = underway.UnderWay(SimpleNamespace(exchange=None), gpu(0))
    under_way.begin(0, None, b"", None)
    under_way.next()
    under_way.stop()
    assert module.log == [
        ("the script's", "marked"),
        ("own", "waits for what is on the script's"),
        ("own", "sum"),
        ("own", "marked"),
        ("the script's", "waits for what is on own"),
        ("own", "marked"),  # when the thread ends
        ("the script's", "waits for what is on own"),
    ]
