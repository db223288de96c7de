"""OpenTelemetry: the metrics of a run, sent to a collector by OTLP over HTTP.

Needs the packages ``opentelemetry-sdk`` and ``opentelemetry-exporter-otlp-proto-http``, which are imported in a process
of their own. Their environment variables hold: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_METRIC_EXPORT_INTERVAL`` ...
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from unisono.core.events import EvaluationFinished, Event, MembershipChanged, RunStarted, StepFinished
from unisono.system.extras import need
from unisono.views.watch.apart import Apart
from unisono.views.watch.charts import scalars
from unisono.views.watch.queued import Queued

__all__ = ["OpenTelemetry"]


class OpenTelemetry(Queued):
    """A sink that sends the metrics of a run to a collector. Counters begin again at 0 with each writer of the run.

    Args:
        endpoint: address of the collector, ``http://HOST:4318``; default: the environment's, else this machine.

    Raises:
        UsageError: a package is missing.
    """

    def __init__(self, endpoint: str = "") -> None:
        for package in ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http"):
            need(package, "OpenTelemetry", "opentelemetry")
        super().__init__(Apart(f"{__name__}:_Meter", endpoint=endpoint), name="OpenTelemetry")


class _Meter:
    """Counts and measures, in a process of its own."""

    def __init__(self, endpoint: str) -> None:
        if endpoint:
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        self._provider: Any = None

    def emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case RunStarted():
                    self._begin(event)
                case _ if self._provider is None:
                    continue
                case MembershipChanged():
                    self._generation.set(event.generation)
                    self._workers.set(len(event.worker_ids))
                case StepFinished():
                    self._step(event)
                case EvaluationFinished():
                    self._set(event)

    def close(self) -> None:
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.shutdown()  # sends what has not been sent

    def _begin(self, started: RunStarted) -> None:
        self.close()
        metrics = importlib.import_module("opentelemetry.sdk.metrics")
        export = importlib.import_module("opentelemetry.sdk.metrics.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        about = {"unisono.run_id": started.run_id, "unisono.directory": started.directory}
        defaults = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "unisono"}
        self._provider = metrics.MeterProvider(
            metric_readers=[export.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())],
            resource=resources.Resource.create({**defaults, **about}),
        )
        meter = self._provider.get_meter("unisono")
        self._steps = meter.create_counter("unisono.steps", "{step}", "Steps that are done")
        self._samples = meter.create_counter("unisono.samples", "{sample}", "Samples that were trained")
        self._seconds = meter.create_counter("unisono.time", "s", "Wall time of the writer, by what it was spent on")
        self._sent = meter.create_counter("unisono.sent", "By", "Bytes that the writer sent to other hosts")
        self._duration = meter.create_histogram("unisono.step.duration", "s", "Wall time of a step")
        self._loss = meter.create_gauge("unisono.loss", "1", "Loss of the newest step")
        self._position = meter.create_gauge("unisono.step", "{step}", "Number of the newest step")
        self._value = meter.create_gauge("unisono.value", "1", "Newest value of step.log, step.add, run.evaluate")
        self._generation = meter.create_gauge("unisono.generation", "1", "Number of the generation")
        self._workers = meter.create_gauge("unisono.workers", "{worker}", "Members of the generation")

    def _step(self, step: StepFinished) -> None:
        self._steps.add(1)
        self._samples.add(step.samples)
        self._sent.add(step.sent_bytes)
        for part, seconds in msgspec.structs.asdict(step.seconds).items():
            self._seconds.add(max(0.0, seconds), {"part": part})
        self._duration.record(step.seconds.total())
        self._loss.set(step.loss)
        self._position.set(step.step)
        self._set(step)

    def _set(self, event: StepFinished | EvaluationFinished) -> None:
        for name, value in scalars(event).items():
            if name.startswith(("log/", "total/", "evaluation/")):
                self._value.set(value, {"name": name})
