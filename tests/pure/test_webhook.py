"""A webhook: what is sent to a real server, how often it is tried, and that nothing secret is in it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from tests.pure.test_journal import end, step
from tests.pure.test_watch import started
from unisono.core.errors import UsageError
from unisono.core.events import Announcement, CheckpointWritten, Event, Problem, RunEnded, StepFinished
from unisono.record.asides import Asides
from unisono.record.overview import OverviewBuilder
from unisono.record.problems.evidence import redacted, shown_environment
from unisono.views.watch.webhook import TRIES, VARIABLE, Webhook


class Receiver(ThreadingHTTPServer):
    """Keeps the messages that it takes, and answers with the codes that it is given, and 204 after these."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.codes: list[int] = []
        self.asked: list[tuple[str, dict[str, str], str]] = []
        self.taken: list[dict[str, Any]] = []
        self.came = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.may_answer.set()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Receiver)
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        server.asked.append((self.path, dict(self.headers), body))
        server.came.release()
        server.may_answer.wait()
        code = server.codes.pop(0) if server.codes else 204
        if code == 204:
            server.taken.append(json.loads(body))
        self.send_response(code)
        if code == 302:
            self.send_header("Location", f"http://{server.address}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        raise AssertionError("a redirection was followed")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture(name="receiver")
def receiving() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.may_answer.set()
            server.shutdown()
            thread.join()


def told(url: str, events: Sequence[Event]) -> list[str]:
    """Give a webhook these events, and wait until it is done; return what it has said of messages that were lost."""
    reports: list[str] = []
    sink = Webhook(url, pause_s=0.0, report=reports.append)
    for event in events:
        sink.emit(event)
    sink.close()
    return reports


WRONG = Problem(time=7.0, problem="corruption", step=4, worker_id="w1", text="w1 on host b computes wrong values")
LOST = Problem(time=6.0, problem="checkpoint", step=3, text="the checkpoint of step 3 was not written: No space left")


def test_what_begins_ends_is_lost_or_is_wrong_is_told_and_nothing_else(receiver: Receiver) -> None:
    begins = msgspec.structs.replace(started(), directory="/data/runs/digits")
    other = Problem(problem="hang", text="w2 hung")
    done = RunEnded(time=9.0, ok=False, reason="all workers are lost", digests={}, step=4)
    events = [begins, step(0), CheckpointWritten(step=1), other, LOST, WRONG, Announcement(text="w2 joins"), done]
    assert told(f"http://{receiver.address}/hook?key=abc", events) == []
    assert [(each["event"], each["step"], each["text"]) for each in receiver.taken] == [
        ("began", 0, "digits: the run begins"),
        ("checkpoint-lost", 3, f"digits: {LOST.text}"),
        ("wrong", 4, f"digits: {WRONG.text}"),
        ("ended", 4, "digits: the run failed: all workers are lost"),
    ]
    assert {(each["run"], each["run_id"]) for each in receiver.taken} == {("digits", "r1")}
    assert (receiver.taken[-1]["ok"], receiver.taken[-1]["reason"]) == (False, "all workers are lost")
    assert [path for path, _, _ in receiver.asked] == ["/hook?key=abc"] * 4
    assert {headers["Content-Type"] for _, headers, _ in receiver.asked} == {"application/json"}


def test_a_message_is_tried_again_while_the_error_may_pass_and_a_bounded_number_of_times(receiver: Receiver) -> None:
    receiver.codes = [503, 429]
    assert told(f"http://{receiver.address}/", [started()]) == []
    assert (len(receiver.asked), len(receiver.taken)) == (3, 1)
    receiver.codes = [500] * 99
    (report,) = told(f"http://{receiver.address}/secret-path", [started()])
    assert len(receiver.asked) == 3 + TRIES
    assert report == (
        f"the webhook at 127.0.0.1 was not told 'began', tried {TRIES} times: it answered 500; the run continues"
    )
    receiver.codes = [404]
    reports = told(f"http://{receiver.address}/", [started(), end()])
    assert len(reports) == 1
    assert "tried once: it answered 404" in reports[0]
    assert [each["event"] for each in receiver.taken] == ["began", "ended"], "what follows is told"


def test_a_redirection_is_not_followed(receiver: Receiver) -> None:
    receiver.codes = [302]
    (report,) = told(f"http://{receiver.address}/", [started()])
    assert "it answered 302" in report


def test_a_server_that_is_not_there_is_said_without_the_address(receiver: Receiver) -> None:
    receiver.server_close()
    (report,) = told(f"http://user:password@{receiver.address}/secret-path", [started()])
    assert f"tried {TRIES} times: it cannot be reached: " in report
    assert "secret" not in report
    assert "password" not in report


def test_no_secret_is_sent_but_in_the_header_that_is_for_it(receiver: Receiver) -> None:
    """A user and a password of the address are sent as a browser sends them."""
    token = "hf_" + "a1b2c3d4e5f6g7"
    texts = [f"cannot reach https://me:hunter2@example.org/x with --token {token}", "API_KEY=qwertz123456"]
    events = [Problem(problem="divergence", text=text) for text in texts]
    events.append(RunEnded(ok=False, reason=texts[0], digests={}, traceback=f"password: {token}"))
    assert told(f"http://some%20one:hunter2@{receiver.address}/hook", [started(), *events]) == []
    assert len(receiver.taken) == 4
    for _, headers, body in receiver.asked:
        assert not any(secret in body for secret in (token, "hunter2", "qwertz123456", "/hook", "some"))
        assert headers["Authorization"] == f"Basic {base64.b64encode(b'some one:hunter2').decode()}"
        assert headers["Host"] == receiver.address


def test_a_server_that_does_not_answer_holds_up_nobody(receiver: Receiver) -> None:
    """Every call returns while the first message has no answer; all are delivered when answers come."""
    receiver.may_answer.clear()
    sink = Webhook(f"http://{receiver.address}/")
    for event in (started(), *[step(number) for number in range(50)], LOST, end()):
        sink.emit(event)
    receiver.came.acquire()
    assert receiver.taken == []
    receiver.may_answer.set()
    sink.close()
    assert [each["event"] for each in receiver.taken] == ["began", "checkpoint-lost", "ended"]


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "host/x", "https:///x", "https://host:port/", "https://a b/", "file:///x"]
)
def test_an_address_that_is_none_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match=r"^the address of a webhook is https://HOST/PATH or ") as error:
        Webhook(url)
    assert url not in str(error.value)


def test_the_address_may_come_from_the_environment(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=VARIABLE):
        Webhook()
    monkeypatch.setenv(VARIABLE, f"http://{receiver.address}/from-environment")
    assert told("", [started()]) == []
    assert receiver.asked[0][0] == "/from-environment"
    assert shown_environment({VARIABLE: "https://secret"}) == {}, "evidence does not name it"


def test_evidence_does_not_have_the_address_of_the_command_line() -> None:
    text = redacted('{"sink": ["webhook=https://hooks.example.org/services/T0/B0/XYZ"]} and webhook=https://x/secret')
    assert "hooks.example" not in text
    assert "secret" not in text


def test_a_checkpoint_that_was_lost_is_news_of_a_step_and_no_checkpoint() -> None:

    news = {"step": 3, "lost": LOST.text}
    told_of: list[Event] = Asides().of(msgspec.structs.replace(step(4), checkpoint=news))
    assert told_of == [msgspec.structs.replace(LOST, time=step(4).time)]
    builder = OverviewBuilder()
    for event in (started(), msgspec.structs.replace(step(4), checkpoint=news)):
        builder.take(event)
    assert isinstance(event, StepFinished)
    assert not builder.overview(0.0).checkpoint
