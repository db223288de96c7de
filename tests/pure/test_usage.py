"""What a machine and its workers use: read from the system, within the limits of a container, at a bounded cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.cluster.head.story import USE_S, Uses
from unisono.cluster.machine.metering import PERIOD_S, period_s
from unisono.core.events import GpuUse, MachineUsed, WorkerUse
from unisono.system import usage
from unisono.system.capacity import machine_cores
from unisono.system.controlgroups import memory_of_groups
from unisono.system.usage import Gpus, Meter, used_cores_of_group


def spin(seconds: float) -> None:
    """Use a core for so long."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_process_that_computes_is_seen_to_use_its_core() -> None:
    meter = Meter("lab")
    outer = time.monotonic(), time.process_time()
    meter.read({"w0": os.getpid()})
    inner = time.monotonic(), time.process_time()
    spin(0.5)
    wall, core_s = time.monotonic() - inner[0], time.process_time() - inner[1]
    used = meter.read({"w0": os.getpid()})
    longest, most = time.monotonic() - outer[0], time.process_time() - outer[1]
    assert used.host == "lab"
    assert 0.8 * core_s / longest - 0.03 <= used.workers["w0"].cores <= 1.2 * most / wall + 0.03
    assert 0.4 * used.workers["w0"].cores <= used.cores
    assert used.num_cores == len(machine_cores())
    assert 1 << 20 < used.workers["w0"].memory_bytes < used.memory_total_bytes
    assert 0 < used.memory_bytes <= used.memory_total_bytes
    assert min(used.sent_bytes_per_s, used.received_bytes_per_s) >= 0


BURNS = """
import sys, time
block = bytearray(64 << 20)
print("there", flush=True)
sys.stdin.readline()
while time.process_time() < 0.5: pass
print("burnt", flush=True)
sys.stdin.readline()
"""


def test_what_a_worker_s_own_processes_use_is_the_worker_s() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BURNS], stdout=pipe, stdin=pipe, text=True, bufsize=1) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        meter, workers = Meter("lab"), {"w0": os.getpid(), "w1": child.pid}
        before = meter.read(workers)
        child.stdin.write("\n")
        child.stdout.readline()
        after = meter.read(workers)
        child.kill()
    assert before.workers["w1"].memory_bytes > 64 << 20
    assert before.workers["w0"].memory_bytes > before.workers["w1"].memory_bytes, "it is a child of this process"
    assert after.workers["w1"].cores > 0
    assert after.workers["w0"].cores >= 0.9 * after.workers["w1"].cores


def test_a_worker_that_has_ended_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert Meter("lab").read({"w0": child.pid}).workers == {}


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A container with a limit of memory and of processor time, version 2."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/not/seen/in/here\n")
    (group / "cpu.max").write_text("200000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 5000000\nuser_usec 4000000\n")
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    return tmp_path


def test_in_a_container_its_limits_count(second: Path) -> None:
    assert memory_of_groups(second) == (1_000_000, 500_000)
    assert used_cores_of_group(second) == 5.0
    meter = Meter("lab", second)
    (second / "sys/fs/cgroup/cpu.stat").write_text("usage_usec 5500000\n")
    used = meter.read({})
    assert (used.memory_bytes, used.memory_total_bytes) == (500_000, 1_000_000)
    assert used.cores > 0


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/\n")
    inner = tmp_path / "sys/fs/cgroup/memory/a/b"
    inner.mkdir(parents=True)
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (inner / "memory.usage_in_bytes").write_text("300\n")
    outer = inner.parent
    (outer / "memory.limit_in_bytes").write_text("4000\n")
    (outer / "memory.usage_in_bytes").write_text("900\n")
    (outer / "memory.stat").write_text("total_inactive_file 100\n")
    cpu = tmp_path / "sys/fs/cgroup/cpu,cpuacct/a"
    cpu.mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpuacct").symlink_to(tmp_path / "sys/fs/cgroup/cpu,cpuacct")
    (cpu / "cpuacct.usage").write_text("2500000000\n")
    assert memory_of_groups(tmp_path) == (4000, 800)
    assert used_cores_of_group(tmp_path) == 2.5


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    assert memory_of_groups(tmp_path) is None
    used = Meter("lab", tmp_path).read({})
    assert used.memory_total_bytes > 1 << 28


class Library(SimpleNamespace):
    """What ``pynvml`` has, of two GPUs."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("init")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"number {index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return f"uuid {name}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        self.calls.append(handle)
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=75, memory=20)


def test_gpus_are_asked_by_number_or_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    gpus = Gpus(["gpu-1", "gpu-GPU-7f2c"])
    assert gpus.read() == [GpuUse(utilization=0.75, memory_bytes=3 << 30, memory_total_bytes=80 << 30)] * 2
    gpus.read()
    assert library.calls == ["init", *["number 1", "uuid GPU-7f2c"] * 2]


def test_without_a_gpu_the_library_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it raises
    assert Gpus([]).read() == []
    assert Gpus(["gpu-0"]).read() == [], "the package is not installed"


def test_a_driver_that_says_no_costs_the_view_of_the_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()

    def fails() -> None:
        raise RuntimeError("NVML_ERROR_LIB_RM_VERSION_MISMATCH")

    library.nvmlInit = fails
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert Gpus(["gpu-0"]).read() == []


def test_many_machines_or_a_slow_one_are_read_more_rarely() -> None:
    assert period_s(1, 0.0001) == PERIOD_S
    assert period_s(1000, 0.0001) == 50.0, "20 messages in a second, of all machines together"
    assert period_s(1, 0.01) == 10.0, "a thousandth of a core"


def test_a_reading_of_many_workers_costs_a_few_milliseconds() -> None:
    meter = Meter("lab")
    workers = {f"w{number}": os.getpid() for number in range(64)}
    meter.read(workers)
    costs = []
    for _ in range(2 * usage.LOOK_EVERY):
        began = time.thread_time()
        meter.read(workers)
        costs.append(time.thread_time() - began)
    assert sorted(costs)[len(costs) // 2] < 0.05


def use(host: str, at: float, **workers: float) -> MachineUsed:
    return MachineUsed(
        time=at,
        host=host,
        cores=1.0,
        num_cores=4,
        memory_bytes=1,
        memory_total_bytes=2,
        sent_bytes_per_s=0.0,
        received_bytes_per_s=0.0,
        workers={name: WorkerUse(cores=cores, memory_bytes=1) for name, cores in workers.items()},
    )


def test_two_agents_of_one_machine_are_one_machine_with_the_workers_of_both() -> None:
    uses = Uses()
    uses.add("agent0", use("a", 1.0, w0=0.5))
    uses.add("agent1", use("a", 2.0, w1=0.7))
    uses.add("agent2", use("b", 2.0, w2=0.9))
    told = uses.take()
    assert [(each.host, each.time, sorted(each.workers)) for each in told if isinstance(each, MachineUsed)] == [
        ("a", 2.0, ["w0", "w1"]),
        ("b", 2.0, ["w2"]),
    ]
    assert not uses.has_news
    uses.keep(["agent0"])
    assert [each.host for each in uses.newest] == ["a"]


def test_the_use_of_many_machines_is_told_to_many_rarely() -> None:
    uses = Uses()
    uses.add("agent0", use("a", 1.0))
    assert uses.wait_s(1) == USE_S
    for number in range(125):
        uses.add(f"agent{number}", use(f"m{number}", 1.0))
    assert uses.wait_s(125) > 30
