"""The metrics of a run, as Prometheus' own parser reads them."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.house.rooms import ROOT
from unisono.core.events import GpuUse, MachineUsed, Seconds, WorkerUse
from unisono.record.overview import Overview, WorkerNow
from unisono.views.watch.prometheus import CONTENT_TYPE, NAMES, exposition

MACHINE = MachineUsed(
    host="m1",
    cores=2.5,
    num_cores=4,
    memory_bytes=3_000_000_000,
    memory_total_bytes=8_000_000_000,
    sent_bytes_per_s=10.0,
    received_bytes_per_s=20.0,
    gpus=[GpuUse(utilization=0.75, memory_bytes=5, memory_total_bytes=9)],
    workers={"w0": WorkerUse(cores=1.0, memory_bytes=7)},
)
WORKERS = [
    WorkerNow(
        worker_id="w0", host="m1", device="cpu", rank=0, state="training", share=0.5,
        seconds=Seconds(compute=0.25, waiting=0.125), cores=0.9, memory_bytes=400,
    ),
    WorkerNow(worker_id="w1", host="m1", device="cpu", state="joining"),
]  # fmt: skip
FULL = Overview(
    run_id="ab12", run_dir='/runs/a "b"\\c\nd', script="train.py", state="training", time=1700000001.5,
    started=1700000000.0, step=41, num_steps=100, epoch=2, loss=0.1, logs={"learning rate": 1e-3, "λ": math.inf},
    evaluation={"right": 93.0}, samples_per_s=512.0, steps_per_s=8.0, left_s=7.25, generation=3, checkpoint_step=40,
    workers=WORKERS, machines=[MACHINE],
)  # fmt: skip


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels; every sample stands once."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_prometheus_reads_every_value_of_an_overview() -> None:
    found = parsed(exposition(FULL))
    expected = {
        ("unisono_steps_total", ()): 42,
        ("unisono_loss", ()): 0.1,
        ("unisono_left_seconds", ()): 7.25,
        ("unisono_start_timestamp_seconds", ()): 1700000000.0,
        ("unisono_log", (("name", "learning rate"),)): 1e-3,
        ("unisono_log", (("name", "λ"),)): math.inf,
        ("unisono_evaluation", (("name", "right"),)): 93.0,
        ("unisono_run_state", (("state", "training"),)): 1,
        ("unisono_run_state", (("state", "finished"),)): 0,
        ("unisono_workers", (("state", "joining"),)): 1,
        ("unisono_worker_step_seconds", (("part", "compute"), ("worker", "w0"))): 0.25,
        ("unisono_worker_is_member", (("worker", "w1"),)): 0,
        ("unisono_worker_memory_bytes", (("worker", "w0"),)): 400,
        ("unisono_machine_memory_bytes", (("machine", "m1"),)): 8_000_000_000,
        ("unisono_gpu_utilization_ratio", (("gpu", "0"), ("machine", "m1"))): 0.75,
    }
    assert {key: found.get(key) for key in expected} == expected
    parts = {dict(labels)["part"] for name, labels in found if name == "unisono_worker_step_seconds"}
    assert parts == set(Seconds.__struct_fields__)


def test_labels_of_any_text_are_read_as_they_were() -> None:
    about = next(dict(labels) for name, labels in parsed(exposition(FULL)) if name == "unisono_run_info")
    assert about == {"run_id": "ab12", "run_dir": '/runs/a "b"\\c\nd', "script": "train.py"}


def test_a_name_that_is_no_text_does_no_harm() -> None:
    about = Overview(run_dir="/runs/\udcff")
    exposition(about).encode()
    assert parsed(exposition(about))


@pytest.mark.parametrize(("said", "value"), [("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)])
def test_a_loss_that_is_not_finite_is_said(said: str, value: float) -> None:
    found = parsed(exposition(Overview(step=3, loss=None, loss_is=said)))
    assert repr(found["unisono_loss", ()]) == repr(value)


def test_what_is_not_known_yet_is_left_out() -> None:
    names = {name for name, _ in parsed(exposition(Overview()))}
    assert names == {
        "unisono_run_info", "unisono_run_state", "unisono_steps_total", "unisono_samples_per_second",
        "unisono_steps_per_second", "unisono_generation",
    }  # fmt: skip


def test_names_are_those_that_prometheus_recommends_and_the_documentation_has_all() -> None:
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    documented = set(re.findall(r"`(unisono_\w+)", (ROOT / "docs" / "tools.md").read_text()))
    assert documented == set(NAMES)
    for name, metric in NAMES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"(milli|micro|kilo|mega|percent|minutes|hours)", name)
