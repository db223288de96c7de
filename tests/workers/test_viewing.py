"""Those who look at a run by its head: what they see, and that none of them disturbs the members, whatever it does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.waiting import WAIT_S
from tests.workers import strangers
from tests.workers.conftest import Unisono, wait_until_gone
from tests.workers.gates import Gates
from tests.workers.strangers import dialled, sealed
from unisono.cli.reach import find
from unisono.cluster.head import past_reader, viewing
from unisono.cluster.head.__main__ import TLS_BUFFER_BYTES
from unisono.cluster.head.client import Refused, Watching
from unisono.cluster.head.door import FRAME_BYTES
from unisono.cluster.head.server import Head, Settings
from unisono.cluster.trust.certificate import client_context, derived, server_context
from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.cluster.trust.secret import reader_token
from unisono.cluster.worker.link import Link
from unisono.cluster.worker.member import Member
from unisono.core.events import MembershipChanged, Seconds, StepFinished, WorkerTimes
from unisono.core.messages import MemberInfo, Stop
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec, WorkerSpec
from unisono.record.journal import to_line
from unisono.record.rundir import describe
from unisono.system.lifetime import Memory
from unisono.views.page import viewers

pytestmark = pytest.mark.more

T = TypeVar("T")

SCRIPT = Path(__file__).with_name("small_training.py")
TOKEN = "secret"
RUN_ID = "r1"


class Served:
    """A real head on a real port, in a thread of this process, which is told the events of a run."""

    def __init__(self, run_dir: str = "", *, with_tls: bool = False) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        port = self.listener.getsockname()[1]
        identity = derived(TOKEN) if with_tls else None
        fingerprint = identity.fingerprint if identity is not None else ""
        self.url = HeadUrl("127.0.0.1", port, with_tls, fingerprint)
        self.invitation = Invitation(str(self.url), TOKEN)
        self._members: list[Member] = []
        started = threading.Event()

        async def serve() -> None:
            spec = RunSpec(settings=RunSettings(heartbeat_s=0.1, run_dir=run_dir))
            policy = Policy(start=1, maximum=1)
            self.head = Head(Settings(policy=policy, run_id=RUN_ID, spec=spec, url=str(self.url)), TOKEN)
            self.loop = asyncio.get_running_loop()
            tls = None
            if identity is not None:
                with Memory("unisono-test", identity.pem) as memory:
                    tls = server_context(memory.path)
            started.set()
            await self.head.run(self.listener, tls)

        self.thread = threading.Thread(target=lambda: asyncio.run(serve()), name="unisono-test-head")
        self.thread.start()
        assert started.wait(WAIT_S)

    def happens(self, *events: Any) -> None:
        for event in events:
            self.loop.call_soon_threadsafe(self.head._telling.pass_on, [event])

    def asked(self, call: Callable[[], T]) -> T:
        """Call something in the head's thread."""

        async def work() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(WAIT_S)

    def member(self) -> Member:
        info = MemberInfo(worker_id=f"w{len(self._members)}", host="lab", pid=os.getpid(), device="cpu")
        spec = WorkerSpec(head=str(self.url), token=TOKEN, worker_id=info.worker_id, host="lab", run=RunSpec())
        member = Member(spec, info, {"torch": "2"}).connect()
        self._members.append(member)
        return member

    def is_served(self) -> None:
        """A member is answered: the head is as it was."""
        if not self._members:
            self.member()
        self._members[0].store.call("num_keys", [])

    def viewer(self, **more: Any) -> ClientConnection:
        """A bare connection of a viewer."""
        header = {"Authorization": f"Bearer {reader_token(TOKEN)}"}
        context = client_context() if self.url.is_secure else None
        return connect(f"{self.url.place}/watch", additional_headers=header, ssl=context, proxy=None, **more)

    def close(self) -> None:
        """Twice does no harm."""
        for member in self._members:
            member.close()
        with contextlib.suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(self.head.over.set)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(run_dir: str = "", **more: Any) -> Served:
        started.append(Served(run_dir, **more))
        return started[-1]

    yield start
    for served in started:
        served.close()


def step(number: int, **more: Any) -> StepFinished:
    values = {
        "time": 1e9 + number,
        "step": number,
        "epoch": 0,
        "loss": 2.0 / (1 + number),
        "weight": 8.0,
        "samples": 8,
        "digest": "0" * 16,
        "num_steps": 100,
        "generation": 1,
        "seconds": Seconds(compute=0.5, waiting=0.25),
        "workers": {
            "w0": WorkerTimes(leaves=4, last=Seconds(compute=0.5)),
            "w1": WorkerTimes(leaves=4, waits_for="w0"),
        },
        "logs": {"accuracy": 0.5},
    }
    return StepFinished(**{**values, **more})


def until(watching: Watching, is_right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first push of which this is true."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (push := watching.next(WAIT_S)) is not None and is_right(push):
            return push
    raise AssertionError("no such push")


def no_torch(pid: int) -> bool:
    return "torch" not in Path(f"/proc/{pid}/maps").read_text()


# -- what a viewer sees ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_tls", [True, False], ids=["TLS", "clear"])
def test_a_viewer_sees_the_run_at_once_and_then_what_is_new(serve: Callable[..., Served], with_tls: bool) -> None:
    served = serve(with_tls=with_tls)
    served.happens(step(0), step(1))
    with Watching(served.invitation.for_looking) as watching:
        first = until(watching, lambda push: push["overview"]["step"] == 1)
        assert (first["overview"]["run_id"], first["overview"]["loss"]) == (RUN_ID, 1.0)
        change = MembershipChanged(time=1e9, generation=2, worker_ids=("w0",), reason="w1 is lost")
        served.happens(step(2), change)
        told = [first, until(watching, lambda push: push["overview"]["step"] == 2)]
        events = [event for push in told for event in push["events"]]
        if not events:
            events = until(watching, lambda push: bool(push["events"]))["events"]
        assert [(event["kind"], event["reason"]) for event in events] == [("membership", "w1 is lost")]


def test_where_the_head_does_not_see_the_directory_it_shows_the_present_and_the_loss(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(str(tmp_path / "elsewhere"))
    served.happens(*(step(number) for number in range(10)))
    with Watching(served.invitation) as watching:
        names = watching.ask({"get": "names"})["names"]
        assert (names["first"], names["last"], names["names"]) == (0, 9, ["loss"])
        (note,) = names["notes"]
        assert "does not see the run's directory" in note
        assert f"`unisono watch --web {tmp_path / 'elsewhere'}`" in note
        series = watching.ask({"get": "series", "names": ["loss"], "points": 5})["series"]["loss"]
        assert series["step"] == [0, 2, 4, 6, 8]
        assert series["high"][0] == 2.0
        assert watching.ask({"get": "series", "names": ["step_s"]})["error"].startswith("the run has no series")
        assert watching.ask({"get": "times", "points": 100})["times"]["workers"] == []
        assert watching.ask({"get": "events"})["events"] == {"events": [], "next": 0}
        assert watching.ask({"get": "use"})["use"] == {"time": [], "machines": {}}
        assert watching.ask({"get": "overview"})["overview"]["step"] == 9


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "nonsense",
        '{"a":' + "[" * 9000,
        '{"id": true, "get": "x"}',
        "[]",
        "1",
        "null",
        '{"get": "token"}',
        '{"get": "series", "names": "loss"}',
        '{"id": [], "get": 3}',
    ],
)
def test_a_question_that_is_none_is_answered_in_words(serve: Callable[..., Served], asked: str) -> None:
    served = serve()
    with served.viewer() as viewer:
        viewer.send(asked)
        while "error" not in (heard := json.loads(viewer.recv(WAIT_S))):
            assert "overview" in heard
        assert len(heard["error"]) > 20
    served.is_served()


def test_a_viewer_is_told_how_the_run_has_ended_and_that_the_head_has_gone(serve: Callable[..., Served]) -> None:
    served = serve()
    with Watching(served.invitation) as watching:
        until(watching, lambda push: True)
        served.happens(step(7))
        served.asked(lambda: served.head.table.take("", Stop(reason="enough")))
        served.close()
        last = until(watching, lambda push: push["overview"]["ended"] > 0)
        assert (last["overview"]["step"], last["overview"]["state"]) == (7, "stopped")
        assert [event["kind"] for event in last["events"]] == ["end"]
        with pytest.raises(OSError, match="closed"):
            until(watching, lambda push: False)


@pytest.mark.usefixtures("nursery")
def test_a_viewer_of_the_next_head_sees_the_run_from_its_beginning(unisono: Unisono, tmp_path: Path) -> None:
    """By the same line: the next head has the same address, certificate and tokens."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (6, 9)) as gates:
        place = ("--run-dir", run_dir, "--tls", "--", "--steps", 12, "--gates", gates.folder)
        command = unisono("run", SCRIPT, "-n", 1, *place)
        gates.wait(6)
        line = find(str(run_dir)).for_looking.line
        with Watching(Invitation.parse(line)) as watching:
            first = until(watching, lambda push: push["overview"]["step"] == 5)["overview"]
            assert [worker["worker_id"] for worker in first["workers"]] == ["w0"]
            os.kill(json.loads((run_dir / "head.json").read_text())["pid"], signal.SIGKILL)
            with pytest.raises(OSError, match=r"closed|reset"):
                until(watching, lambda push: False)
        command.line("another one takes over")
        gates.open(6)
        gates.wait(9)
        with Watching(Invitation.parse(line)) as watching:
            second = until(watching, lambda push: push["overview"]["step"] == 8)["overview"]
            assert [point[0] for point in second["curve"]] == list(range(9)), "also what the head before has seen"
            series = watching.ask({"get": "series", "names": ["loss"]})["series"]["loss"]
            assert series["step"] == list(range(9))
        gates.open(9)
        assert command.wait() == 0, command.err


# -- the process that reads the directory ------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    folder = tmp_path / "run"
    folder.mkdir()
    describe(folder, {"run_id": RUN_ID, "command": '{"arguments": ["--key", "hidden"]}', "recipe": {"seed": 3}})
    (folder / "journal.jsonl").write_text("")
    return str(folder)


def reader_of(served: Served) -> int:
    process = served.head._viewing._reading._process
    assert process is not None
    return process.pid


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    wait_until_gone({pid}, deadline)
    assert time.monotonic() < deadline, "the reader lives on"


def test_questions_are_answered_by_a_process_that_stands_back_and_ends_with_the_head(
    serve: Callable[..., Served], run_dir: str
) -> None:
    served = serve(run_dir)
    with Watching(served.invitation) as watching:
        assert served.head._viewing._reading._process is None, "nobody has asked yet"
        facts = watching.ask({"get": "facts"})["facts"]
        assert facts["recipe"] == {"seed": 3}
        assert "command" not in facts, "the arguments of a script may be secret"
        pid = reader_of(served)
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
        assert no_torch(pid)
    served.close()
    wait_for_end(pid)


def test_what_a_head_that_follows_another_tells_is_read_from_the_directory(
    serve: Callable[..., Served], run_dir: str
) -> None:
    """It has not seen the beginning of the run."""
    served = serve(run_dir)
    served.asked(lambda: setattr(served.head._viewing, "_is_whole", False))
    (Path(run_dir) / "journal.jsonl").write_text(
        "".join(json.dumps({"line": number, **to_line(step(number))}) + "\n" for number in range(3))
    )
    served.happens(step(9))
    with Watching(served.invitation) as watching:
        overview = until(watching, lambda push: True)["overview"]
        assert (overview["step"], len(overview["curve"])) == (2, 3)


def test_a_process_that_nobody_asks_any_more_ends(
    serve: Callable[..., Served], run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(run_dir)
    with Watching(served.invitation) as watching:
        assert "facts" in watching.ask({"get": "facts"})
        pid = reader_of(served)
        monkeypatch.setattr(past_reader, "IDLE_S", 0.0)
        assert "events" in watching.ask({"get": "events"})
        wait_for_end(pid)
        assert "names" in watching.ask({"get": "names"}), "another one is started at the next question"


def test_a_disk_that_hangs_costs_the_viewers_their_answers_and_nobody_else_anything(
    serve: Callable[..., Served], run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(run_dir)
    with Watching(served.invitation) as watching:
        assert "facts" in watching.ask({"get": "facts"})
        pid = reader_of(served)
        monkeypatch.setattr(past_reader, "DEADLINE_S", 0.2)
        os.kill(pid, signal.SIGSTOP)
        asked = watching.ask({"get": "events"})
        assert "there is no answer within" in asked["error"]
        served.is_served()
        wait_for_end(pid)
        monkeypatch.setattr(past_reader, "DEADLINE_S", WAIT_S)
        monkeypatch.setattr(past_reader, "PAUSE_S", 0.0)
        assert "events" in watching.ask({"get": "events"})


def test_a_long_answer_comes_in_pieces_and_nothing_stands_between_them(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is told unasked nor the answer to a ping; and members are answered meanwhile."""
    monkeypatch.setattr(viewers, "EVERY_S", 0.001)
    monkeypatch.setattr(viewers, "PIECE_BYTES", 1000)
    served = serve()
    served.happens(*(step(number) for number in range(3000)))
    with Watching(served.invitation) as watching:
        for _ in range(5):
            loss = watching.ask({"get": "series", "names": ["loss"], "points": 3000})["series"]["loss"]
            assert loss["step"] == list(range(0, 3000, 16))
            assert until(watching, lambda push: push["overview"]["step"] == 2999)
    with served.viewer() as viewer:
        viewer.send('{"id": 7, "get": "series", "names": ["loss"], "points": 3000}')
        pongs = [viewer.ping() for _ in range(20)]
        while "id" not in (heard := json.loads(viewer.recv(WAIT_S))):
            pass
        assert len(heard["series"]["loss"]["step"]) == 188
        assert all(pong.wait(WAIT_S) for pong in pongs)


def test_the_same_question_of_many_is_answered_once(serve: Callable[..., Served], run_dir: str) -> None:
    served = serve(run_dir)
    found = served.head._viewing._reading

    async def work() -> tuple[list[bytes], int]:
        answers = await asyncio.gather(*[found.answer({"get": "facts"}) for _ in range(50)])
        return answers, len(found._fresh)

    answers, num_found = asyncio.run_coroutine_threadsafe(work(), served.loop).result(WAIT_S)
    assert {json.dumps(json.loads(each)["facts"]["recipe"]) for each in answers} == {'{"seed": 3}'}
    assert num_found == 1


def test_questions_do_not_pile_up(serve: Callable[..., Served], run_dir: str) -> None:
    served = serve(run_dir)
    found = served.head._viewing._reading

    async def work() -> list[bytes]:
        asked = [found.answer({"get": "events", "after": number}) for number in range(past_reader.MOST_WAITING + 20)]
        return await asyncio.gather(*asked)

    answers = [json.loads(a) for a in asyncio.run_coroutine_threadsafe(work(), served.loop).result(WAIT_S)]
    assert sum("questions are waiting already" in each.get("error", "") for each in answers) == 20


# -- those who mean harm -----------------------------------------------------------------------------


def test_the_token_for_looking_opens_nothing_else(serve: Callable[..., Served]) -> None:
    served = serve()
    looking = served.invitation.for_looking
    with pytest.raises(Refused, match="only for watching the run"):
        Link.dial(looking.url, looking.token, WAIT_S)
    with pytest.raises(InvalidStatus, match="401"):
        connect(f"{served.url.place}/watch", additional_headers={"Authorization": "Bearer wrong"}, proxy=None)
    with served.viewer() as viewer:  # what a member would say is no question
        viewer.send(b"\x81\xa4type\xa4Stop")
        while "error" not in json.loads(viewer.recv(WAIT_S)):
            pass
    served.is_served()
    assert not served.head.over.is_set()


@pytest.mark.parametrize("with_tls", [True, False], ids=["TLS", "clear"])
@pytest.mark.parametrize("flood", strangers.FLOODS)
def test_a_viewer_that_floods_the_head_is_read_slowly(serve: Callable[..., Served], flood: str, with_tls: bool) -> None:
    served = serve(with_tls=with_tls)
    served.is_served()
    with (sealed if with_tls else dialled)(served.invitation) as viewer:
        viewer.sendall(strangers.asks_to_watch(served.invitation))
        assert viewer.recv(65536).startswith(b"HTTP/1.1 101 ")
        viewer.setblocking(False)
        for _ in range(3):
            with contextlib.suppress(OSError):  # it is not all taken
                viewer.sendall(strangers.FLOODS[flood])
            served.is_served()
            with Watching(served.invitation) as watching:
                assert watching.next(WAIT_S)
                assert "error" not in watching.ask({"get": "names"})
            assert served.asked(lambda: most_read(served)) <= viewing.QUESTIONS_BYTES + 100 * FRAME_BYTES
    served.is_served()


def most_read(served: Served) -> float:
    """What was read of the viewer that has said most, less what it might say meanwhile."""
    viewers: Iterable[Any] = served.head._viewing._viewers._viewers
    return max((caller._allowance._used for caller in viewers if caller._allowance), default=0.0)


def test_a_viewer_that_does_not_read_is_told_nothing_more_and_dropped(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "EVERY_S", 0.01)
    monkeypatch.setattr(viewers, "DEAF_S", 0.1)
    served = serve()
    text = "x" * 100_000
    with dialled(served.invitation) as deaf, Watching(served.invitation) as watching:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(strangers.asks_to_watch(served.invitation))
        assert deaf.recv(12) == b"HTTP/1.1 101"
        number = 0
        while served.asked(lambda: len(served.head._viewing._viewers)) > 1:
            change = MembershipChanged(time=1e9 + number, generation=number + 1, worker_ids=("w0",), reason=text)
            served.happens(change)
            watching.next(WAIT_S)
            number += 1
            assert number < 10_000
        assert served.asked(lambda: len(served.head._viewing._viewers)) == 1, "who reads stays"
    served.is_served()


def test_connections_of_which_nothing_more_comes_take_no_place_of_a_viewer(serve: Callable[..., Served]) -> None:
    served = serve()
    request = f"GET /watch HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {reader_token(TOKEN)}\r\n"
    with contextlib.ExitStack() as held:
        for _ in range(50):
            half = held.enter_context(socket.create_connection((served.url.host, served.url.port), timeout=WAIT_S))
            half.sendall(request.encode())
        served.is_served()
        with Watching(served.invitation) as watching:
            assert watching.next(WAIT_S)
            assert served.asked(lambda: len(served.head._viewing._viewers)) == 1


def test_when_as_many_watch_as_can_the_next_one_is_told_so_and_members_come_in(serve: Callable[..., Served]) -> None:
    served = serve()
    served.asked(lambda: setattr(served.head._viewing, "_most", 2))
    with Watching(served.invitation), Watching(served.invitation):
        with pytest.raises(Refused, match="2 are watching this run already"):
            Watching(served.invitation)
        served.is_served()
    deadline = time.monotonic() + WAIT_S
    while served.asked(lambda: len(served.head._viewing._viewers)):
        assert time.monotonic() < deadline
    Watching(served.invitation).close()


def test_an_error_in_what_shows_the_run_is_none_of_the_run(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve()
    served.is_served()

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    with Watching(served.invitation) as watching:
        assert watching.next(WAIT_S)
        served.asked(lambda: setattr(served.head._viewing._overviews, "take", fail))
        served.asked(lambda: setattr(served.head._viewing._overviews, "overview", fail))
        served.happens(step(1), step(2))
        served.is_served()
        assert watching.ask({"get": "overview"})["overview"]["run_id"] == RUN_ID
        assert watching.next(WAIT_S), "viewers are told what is known"
        served.close()
    assert capsys.readouterr().err.count("Traceback") == 1


def test_what_all_are_told_is_encoded_once(serve: Callable[..., Served]) -> None:
    served = serve()
    served.happens(*(step(number) for number in range(5)))
    with contextlib.ExitStack() as held:
        for each in [held.enter_context(Watching(served.invitation)) for _ in range(20)]:
            until(each, lambda push: push["overview"]["step"] == 4)
        frames = served.asked(lambda: served.head._viewing._feed._frames)
        assert len(frames) <= 2, "one for those who were told before, and one for who has just come"
        assert served.asked(lambda: served.head._viewing._viewers._pause(8)) <= viewers.EVERY_S


def test_the_more_viewers_there_are_the_rarer_each_is_told(serve: Callable[..., Served]) -> None:
    served = serve()

    def pause(number: int, told: int) -> float:
        found = served.head._viewing._viewers
        before, found._viewers = found._viewers, dict.fromkeys(range(number))  # type: ignore[assignment, arg-type]
        try:
            return found._pause(told)
        finally:
            found._viewers = before

    assert served.asked(lambda: pause(1, 1)) == 1.0
    assert served.asked(lambda: pause(8, 8)) == 1.0
    assert served.asked(lambda: pause(200, 8)) == 8 / 200
    assert served.asked(lambda: pause(1000, 8)) == 8 / 200, "in all the same number a second"


def test_a_head_with_tls_tells_viewers_apart_from_a_false_one(serve: Callable[..., Served]) -> None:
    served = serve(with_tls=True)
    wrong = HeadUrl(served.url.host, served.url.port, True, "0" * 64)
    with pytest.raises(ConnectionError, match="is not the head of this run"):
        Watching(Invitation(str(wrong), reader_token(TOKEN)))
    context = ssl.create_default_context(cadata=_pem())
    context.check_hostname = False
    with socket.create_connection((served.url.host, served.url.port), timeout=WAIT_S) as sock:
        with context.wrap_socket(sock) as sealed:  # who trusts this certificate needs nothing else
            assert sealed.version() == "TLSv1.3"


def test_a_thousand_connections_by_tls_do_not_take_a_quarter_of_a_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the event loop's buffers is no documented setting: another Python may have another one."""
    monkeypatch.setattr(SSLProtocol, "max_size", TLS_BUFFER_BYTES)

    async def work() -> int:
        protocol = SSLProtocol(asyncio.get_running_loop(), asyncio.Protocol(), client_context(), None)
        return len(protocol._ssl_buffer)  # type: ignore[attr-defined]

    assert asyncio.run(work()) == TLS_BUFFER_BYTES < 64 * 1024


def _pem() -> str:
    return (
        derived(TOKEN)
        .pem.decode()
        .partition("-----BEGIN CERTIFICATE-----")[2]
        .join(["-----BEGIN CERTIFICATE-----", ""])
    )
