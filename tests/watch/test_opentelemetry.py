"""A collector of OpenTelemetry's own protocol receives the metrics of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from tests.pure.test_journal import end, evaluation, step
from tests.pure.test_watch import started
from unisono.core.events import MembershipChanged
from unisono.views.watch.opentelemetry import OpenTelemetry


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[ExportMetricsServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/metrics"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(ExportMetricsServiceRequest.FromString(body))
        answer = ExportMetricsServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def values(collector: Collector) -> dict[tuple[str, str], Any]:
    """The last value of each metric, by its name and its one attribute."""
    found = {}
    for request in collector.received:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    data = getattr(metric, metric.WhichOneof("data"))
                    for point in data.data_points:
                        label = next((each.value.string_value for each in point.attributes), "")
                        kind = point.WhichOneof("value") if hasattr(point, "as_double") else "sum"
                        found[metric.name, label] = getattr(point, kind)
    return found


def test_a_collector_receives_the_metrics_of_a_run(collector: Collector) -> None:
    sink = OpenTelemetry(collector.url)
    sink.emit(started())
    sink.emit(MembershipChanged(generation=3, worker_ids=("w0", "w1")))
    for number in range(4):
        sink.emit(step(number, logs={"lr": 0.5}, sent_bytes=100))
    sink.emit(evaluation(4, right=17))
    sink.emit(end())
    sink.close()
    found = values(collector)
    expected = {
        ("unisono.steps", ""): 4,
        ("unisono.samples", ""): 96,
        ("unisono.time", "compute"): pytest.approx(0.4),
        ("unisono.sent", ""): 400,
        ("unisono.step.duration", ""): pytest.approx(0.4),
        ("unisono.loss", ""): 0.125,
        ("unisono.step", ""): 3,
        ("unisono.value", "log/lr"): 0.5,
        ("unisono.value", "evaluation/right"): 17,
        ("unisono.generation", ""): 3,
        ("unisono.workers", ""): 2,
    }
    assert {key: found.get(key) for key in expected} == expected
    units = {
        metric.name: metric.unit
        for request in collector.received
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert (units["unisono.time"], units["unisono.sent"]) == ("s", "By")
    about = {
        each.key: each.value.string_value for each in collector.received[0].resource_metrics[0].resource.attributes
    }
    assert (about["service.name"], about["unisono.run_id"]) == ("unisono", "r1")


def test_a_collector_that_is_not_there_does_no_harm(capfd: pytest.CaptureFixture[str]) -> None:
    with Collector() as server:
        url = server.url
    sink = OpenTelemetry(url)
    sink.emit(started())
    sink.emit(step(0))
    sink.close()
