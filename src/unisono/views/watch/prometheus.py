"""The overview of a run in Prometheus' text format, version 0.0.4: what the head answers at ``/metrics``.

Names and units are those of docs/tools.md. Every value is in base units (seconds, bytes, ratios from 0 to 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from unisono.core.events import MachineUsed, Seconds
from unisono.record.overview import Overview, WorkerNow

__all__ = ["CONTENT_TYPE", "NAMES", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Metric(msgspec.Struct, frozen=True):
    kind: Literal["counter", "gauge"]
    text: str


def _gauge(text: str) -> _Metric:
    return _Metric("gauge", text)


NAMES: Final[dict[str, _Metric]] = {
    "unisono_run_info": _gauge("The run: its id, directory and script. Always 1."),
    "unisono_run_state": _gauge("1 for the state that the run is in."),
    "unisono_overview_timestamp_seconds": _gauge("When these values were put together, in seconds since 1970."),
    "unisono_start_timestamp_seconds": _gauge("When the run was started, in seconds since 1970."),
    "unisono_end_timestamp_seconds": _gauge("When the run ended, in seconds since 1970."),
    "unisono_steps_total": _Metric("counter", "Steps of the run that are done."),
    "unisono_steps_planned": _gauge("Steps of the run up to the end of the script's current training loop."),
    "unisono_epoch": _gauge("Passes over the data that are complete."),
    "unisono_loss": _gauge("Loss of the newest step."),
    "unisono_log": _gauge("Newest value of a number that the script has given to step.log, by its name."),
    "unisono_evaluation": _gauge("A total of the newest evaluation, by its name."),
    "unisono_samples_per_second": _gauge("Samples trained per second, over the last steps."),
    "unisono_steps_per_second": _gauge("Steps per second, over the last steps."),
    "unisono_left_seconds": _gauge("Expected time until the end of the script's current training loop."),
    "unisono_generation": _gauge("Number of the current generation; it grows with every change of the workers."),
    "unisono_checkpoint_step": _gauge("Steps that are in the newest checkpoint."),
    "unisono_workers": _gauge("Workers, by what they are doing."),
    "unisono_worker_info": _gauge("A worker: its machine and device. Always 1."),
    "unisono_worker_is_member": _gauge("1 if the worker is a member of the current generation."),
    "unisono_worker_share_ratio": _gauge("Share of the last steps' micro-batches that the worker computed."),
    "unisono_worker_step_seconds": _gauge("Mean time of the last steps on a worker, by what it was spent on."),
    "unisono_worker_cpu_cores": _gauge("Processor cores that a worker keeps busy."),
    "unisono_worker_memory_bytes": _gauge("Memory of a worker and its own children."),
    "unisono_machine_cpu_cores": _gauge("Processor cores of a machine."),
    "unisono_machine_cpu_busy_cores": _gauge("Processor cores of a machine that are busy with anything."),
    "unisono_machine_memory_bytes": _gauge("Memory of a machine."),
    "unisono_machine_memory_used_bytes": _gauge("Memory of a machine that is not available to new programs."),
    "unisono_machine_sent_bytes_per_second": _gauge("Data that a machine sends over its networks."),
    "unisono_machine_received_bytes_per_second": _gauge("Data that a machine receives over its networks."),
    "unisono_gpu_utilization_ratio": _gauge("Share of the time in which a GPU was busy."),
    "unisono_gpu_memory_bytes": _gauge("Memory of a GPU."),
    "unisono_gpu_memory_used_bytes": _gauge("Memory of a GPU that is in use."),
}
"""Every metric, in the order in which they are written."""

_STATES: Final = ("starting", "training", "paused", "waiting", "finished", "stopped", "failed", "unknown")

_Sample = tuple[str, Mapping[str, str], float]
"""Name of the metric, labels, value."""


def exposition(overview: Overview) -> str:
    """Return a run's metrics in Prometheus' text format. What is not known is left out."""
    by_name: dict[str, list[str]] = {name: [] for name in NAMES}
    for name, labels, value in _samples(overview):
        by_name[name].append(f"{name}{_labels(labels)} {_number(value)}")
    lines: list[str] = []
    for name, samples in by_name.items():
        if samples:
            metric = NAMES[name]
            lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}", *samples]
    return "".join(f"{line}\n" for line in lines)


def _samples(overview: Overview) -> Iterator[_Sample]:
    about = {"run_id": overview.run_id, "run_dir": overview.run_dir, "script": overview.script}
    yield "unisono_run_info", about, 1
    for state in dict.fromkeys((*_STATES, overview.state)):
        yield "unisono_run_state", {"state": state}, state == overview.state
    for name, value in _numbers(overview):
        yield name, {}, value
    for metric, values in (("unisono_log", overview.logs), ("unisono_evaluation", overview.evaluation)):
        for name, value in values.items():
            yield metric, {"name": name}, value
    states = [worker.state for worker in overview.workers]
    for state in sorted(set(states)):
        yield "unisono_workers", {"state": state}, states.count(state)
    for worker in overview.workers:
        yield from _of_worker(worker)
    for machine in overview.machines:
        yield from _of_machine(machine)


def _numbers(overview: Overview) -> Iterator[tuple[str, float]]:
    loss = overview.loss if overview.loss is not None else float(overview.loss_is) if overview.loss_is else None
    known: Iterable[tuple[str, float | None, bool]] = (
        ("unisono_overview_timestamp_seconds", overview.time, overview.time > 0),
        ("unisono_start_timestamp_seconds", overview.started, overview.started > 0),
        ("unisono_end_timestamp_seconds", overview.ended, overview.ended > 0),
        ("unisono_steps_total", overview.step + 1, True),
        ("unisono_steps_planned", overview.num_steps, overview.num_steps > 0),
        ("unisono_epoch", overview.epoch, overview.step >= 0),
        ("unisono_loss", loss, True),
        ("unisono_samples_per_second", overview.samples_per_s, True),
        ("unisono_steps_per_second", overview.steps_per_s, True),
        ("unisono_left_seconds", overview.left_s, True),
        ("unisono_generation", overview.generation, True),
        ("unisono_checkpoint_step", overview.checkpoint_step, overview.checkpoint_step >= 0),
    )
    for name, value, is_known in known:
        if is_known and value is not None:
            yield name, value


def _of_worker(worker: WorkerNow) -> Iterator[_Sample]:
    own = {"worker": worker.worker_id}
    yield "unisono_worker_info", {**own, "machine": worker.host, "device": worker.device}, 1
    yield "unisono_worker_is_member", own, worker.rank is not None
    yield "unisono_worker_share_ratio", own, worker.share
    for part in Seconds.__struct_fields__:
        yield "unisono_worker_step_seconds", {**own, "part": part}, getattr(worker.seconds, part)
    if worker.memory_bytes:  # its machine says what it uses
        yield "unisono_worker_cpu_cores", own, worker.cores
        yield "unisono_worker_memory_bytes", own, worker.memory_bytes


def _of_machine(machine: MachineUsed) -> Iterator[_Sample]:
    own = {"machine": machine.host}
    yield "unisono_machine_cpu_cores", own, machine.num_cores
    yield "unisono_machine_cpu_busy_cores", own, machine.cores
    yield "unisono_machine_memory_bytes", own, machine.memory_total_bytes
    yield "unisono_machine_memory_used_bytes", own, machine.memory_bytes
    yield "unisono_machine_sent_bytes_per_second", own, machine.sent_bytes_per_s
    yield "unisono_machine_received_bytes_per_second", own, machine.received_bytes_per_s
    for number, gpu in enumerate(machine.gpus):
        labels = {**own, "gpu": str(number)}
        yield "unisono_gpu_utilization_ratio", labels, gpu.utilization
        yield "unisono_gpu_memory_bytes", labels, gpu.memory_total_bytes
        yield "unisono_gpu_memory_used_bytes", labels, gpu.memory_bytes


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # half a character (a name of a file) has no UTF-8
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, int) else repr(float(value))
