"""Head, agent and workers as processes: who lives, who dies, who hears of it, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import http.server
import io
import json
import logging
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.waiting import SILENCE_S, WAIT_S, wait_until
from tests.workers.conftest import Unisono, forked, marked, wait_until_gone
from unisono.cluster.head.server import Head, Settings
from unisono.cluster.head.versions import HeadMemory
from unisono.cluster.machine.forking import Forked, ForkRequest
from unisono.cluster.machine.headprocess import MAX_HEADS, Service, listen, reachable
from unisono.cluster.worker.member import Member
from unisono.core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunStopped
from unisono.core.events import Announcement
from unisono.core.messages import (
    AgentHello,
    Beat,
    Finished,
    Happened,
    HeadSnapshot,
    Hello,
    Holding,
    MemberInfo,
    Message,
    Notice,
    Ready,
    RunDirectoryChosen,
    StoreAnswer,
    StoreCall,
    Welcome,
    WorkerExit,
    decode,
    encode,
)
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec, WorkerSpec
from unisono.membership import Tick
from unisono.record.rundir import Lock
from unisono.script.inspected import run_inspected
from unisono.script.worker import STACK_SIGNAL
from unisono.system.lifetime import Memory as MemoryFile

Script = Callable[..., str]
NEVER_S = 10 * WAIT_S
"""In no test."""

# A script that takes every generation that it is asked to and trains nothing. It finishes when its file says so.
FOLLOW = """
    import os, sys
    from unisono.cluster.worker import member

    me = member.current()
    print("pid", os.getpid(), flush=True)
    me.ready(0)
    generation, held = 0, False
    while True:
        notice = me.wait_notice(generation)
        generation = notice.generation
        ids = [info.worker_id for info in notice.members]
        if me.worker_id in ids:
            me.holding(generation)
            me.store.call("num_keys", [])  # and it was heard
            held = True
            print("generation", generation, ",".join(ids), "paused" if notice.paused else "", flush=True)
        elif held:
            me.left()
            break
    """


# -- the head alone, with members in this process ----------------------------------------------------


class Served:
    """A real head on a real port, in a thread of this process."""

    def __init__(self, policy: Policy, run_dir: str = "", heartbeat_s: float = 0.1, **settings: float) -> None:
        self.token = "secret"
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256, reuse_port=True)
        self.port = self.listener.getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}"
        self.members: list[Member] = []
        self._open = contextlib.ExitStack()
        started = threading.Event()

        async def serve() -> None:
            spec = RunSpec(settings=RunSettings(heartbeat_s=heartbeat_s, run_dir=run_dir, **settings))
            self.head = Head(Settings(policy=policy, run_id="r1", spec=spec, url=self.url), self.token)
            self.loop = asyncio.get_running_loop()
            started.set()
            await self.head.run(self.listener)

        self.thread = threading.Thread(target=lambda: asyncio.run(serve()), name="unisono-test-head")
        self.thread.start()
        assert started.wait(WAIT_S)

    def member(self, worker_id: str, *, head_away_s: float = 5.0) -> Member:
        run = RunSpec(settings=RunSettings(head_away_s=head_away_s))
        spec = WorkerSpec(head=self.url, token=self.token, worker_id=worker_id, host="lab", run=run)
        info = MemberInfo(worker_id=worker_id, host="lab", pid=os.getpid(), device="cpu")
        member = Member(spec, info, {"torch": "2"})
        self.members.append(member)
        return member.connect()

    def dial(self) -> ClientConnection:
        """A bare connection with the token."""
        header = {"Authorization": f"Bearer {self.token}"}
        return self._open.enter_context(connect(self.url, additional_headers=header, compression=None, proxy=None))

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def close(self) -> None:
        """Twice does no harm."""
        for member in self.members:
            member.close()
        self._open.close()
        with contextlib.suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(self.head.over.set)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.listener.close()


def heard_by_the_head(*members: Member) -> None:
    """Block until the head has dealt with all that these members have said."""
    for member in members:
        member.store.call("num_keys", [])


def begin(*members: Member) -> None:
    """Form the first generation."""
    for member in members:
        member.ready(0)
    for member in members:
        member.holding(member.wait_notice(0, WAIT_S).generation)
    heard_by_the_head(*members)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(start: int = 1, reconnect_s: float = 1.0, **settings: float) -> Served:
        served = Served(Policy(start=start, maximum=start, reconnect_s=reconnect_s), **settings)  # type: ignore[arg-type]
        started.append(served)
        return served

    yield start
    for served in started:
        served.close()


def test_the_health_page_needs_no_token_and_nothing_else_goes_without(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.get("/health") == (200, "ok\n")
    assert served.get("/status")[0] == 401
    assert served.get("/status", "wrong")[0] == 401
    assert served.get("/nowhere", served.token)[0] == 404
    with pytest.raises(InvalidStatus, match="401"):
        connect(served.url, additional_headers={"Authorization": "Bearer wrong"}, proxy=None)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET /status HTTP/1.1\r\nAuthorization: Bearer secret\r\nAuthorization: Bearer secret\r\n\r\n", b"401"),
        (b"GET /status HTTP/1.1\r\nAuthorization: Bearer \xff\r\n\r\n", b"401"),
        (b"GET /status HTTP/1.1\r\nAuthorization: Basic secret\r\n\r\n", b"401"),
        (b"POST / HTTP/1.1\r\n\r\n", b""),
        (b"\x16\x03\x01 no HTTP at all\r\n\r\n", b""),
        (b"", b""),
    ],
    ids=["two tokens", "no text", "another scheme", "another method", "a different protocol", "nothing"],
)
def test_what_a_stranger_says_leaves_no_trace(
    said: bytes, status: bytes, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal of the user, who has not asked for it."""
    written = io.StringIO()
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(written))  # standard error, where nobody logs
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", written)
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) as stranger:
        stranger.sendall(said)
        if not status:  # nothing that could be answered
            stranger.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert status in answer.partition(b"\r\n")[0]
    assert b"500" not in answer.partition(b"\r\n")[0]
    served.close()
    assert written.getvalue() == ""


def announced(message: Any) -> list[str]:
    """The sentences in a message of the head."""
    said = message.events if isinstance(message, Happened) else []
    return [event.text for event in said if isinstance(event, Announcement)]


def test_that_there_is_no_room_for_a_connection_is_one_line(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop reports each attempt, with a traceback."""
    served = serve()
    agent = served.dial()
    agent.send(encode(AgentHello(host="lab", pid=os.getpid(), num_workers=0, primary=True)))
    assert isinstance(decode(agent.recv(WAIT_S, decode=False)), Welcome)
    full = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        "socket": served.listener,
    }
    for context in (*[full] * 100, {"message": "something else"}):
        served.loop.call_soon_threadsafe(served.loop.call_exception_handler, context)
    served.loop.call_soon_threadsafe(served.head._announce, "the last")
    told: list[str] = []
    while not told or told[-1] != "the last":
        told += announced(decode(agent.recv(WAIT_S, decode=False)))
    assert len(told) == 2
    assert "cannot accept another connection (Too many open files)" in told[0]
    assert [record.message for record in caplog.records if record.name == "asyncio"] == ["something else"]


def test_status_says_who_is_there(serve: Callable[..., Served]) -> None:
    served = serve(1)
    member = served.member("w0")
    code, body = served.get("/status", served.token)
    assert code == 200
    assert json.loads(body)["state"] == "waiting"
    member.ready(0)
    member.holding(member.wait_notice(0, WAIT_S).generation)
    status = json.loads(served.get("/status", served.token)[1])
    assert (status["state"], status["generation"], status["run_id"]) == ("training", 1, "r1")
    assert [(w["worker_id"], w["rank"], w["pid"], w["device"]) for w in status["workers"]] == [
        ("w0", 0, os.getpid(), "cpu")
    ]


def test_what_a_heartbeat_decides_is_remembered(serve: Callable[..., Served]) -> None:
    """A head that follows would otherwise not know of the generation without the member that hangs."""
    served = serve(2, heartbeat_timeout_s=60.0)
    agent = served.dial()
    agent.send(encode(AgentHello(host="lab", pid=os.getpid(), num_workers=2, primary=True)))
    workers = [served.dial() for _ in range(2)]
    for number, worker in enumerate(workers):
        info = MemberInfo(worker_id=f"w{number}", host="lab", pid=os.getpid(), device="cpu")
        for message in (Hello(info=info, fingerprint={}), Ready(phase=0)):
            worker.send(encode(message))
    for worker in workers:
        while not isinstance(decode(worker.recv(WAIT_S, decode=False)), Notice):
            pass
        worker.send(encode(Holding(generation=1)))
        worker.send(encode(StoreCall(call=1, operation="num_keys", keys=[])))  # until the head has heard it
        while not isinstance(decode(worker.recv(WAIT_S, decode=False)), StoreAnswer):
            pass
    beat = Beat(generation=1, phase=0, step=4, microbatch=0, progress=1, num_steps=5, waiting=True, seconds_at=0.0)
    workers[0].send(encode(beat))
    workers[1].send(encode(msgspec.structs.replace(beat, waiting=False, seconds_at=20.0)))
    remembered = b""
    while True:
        heard = decode(agent.recv(WAIT_S, decode=False))
        if isinstance(heard, HeadSnapshot):
            remembered = heard.state
        elif said := [text for text in announced(heard) if "is left aside" in text]:
            break
    memory = HeadMemory.decode(remembered)
    assert memory.state.members == ("w0",)
    assert memory.reason == said[0]


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_head_ends_the_workers_and_nobody_who_got_the_number_of_one(
    is_reused: bool, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(1)
    agent = served.dial()
    agent.send(encode(AgentHello(host="lab", pid=os.getpid(), num_workers=1, primary=True)))
    assert isinstance(decode(agent.recv(WAIT_S, decode=False)), Welcome)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            worker = served.dial()
            info = MemberInfo(worker_id="w0", host="lab", pid=process.pid, device="cpu")
            worker.send(encode(Hello(info=info, fingerprint={})))
            assert isinstance(decode(worker.recv(WAIT_S, decode=False)), Welcome)
            if is_reused:
                monkeypatch.setattr("unisono.cluster.head.server.start_time", lambda pid: "later")
            served.head.end_workers()
            if is_reused:
                process.terminate()
            assert process.wait(WAIT_S) == (-signal.SIGTERM if is_reused else -signal.SIGKILL)
        finally:
            process.kill()


def test_a_run_directory_that_the_script_chose_gets_the_address(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve()
    member = served.member("w0")
    folder = tmp_path / "run"
    member.send(RunDirectoryChosen(path=str(folder)))
    wait_until((folder / "head.json").exists, "the address of the head in the directory")
    known = json.loads((folder / "head.json").read_text())
    assert (known["url"], known["run_id"], known["pid"]) == (served.url, "r1", os.getpid())
    assert (folder / "token").read_text() == served.token
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    served.close()
    assert list(folder.iterdir()) == []


def test_the_address_of_a_run_that_goes_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    """Also where nobody can see by its pid that it is going: it may be on another machine."""
    for name in ("head.json", "token"):
        (tmp_path / name).write_text("theirs")
    lock = Lock()
    lock.take(tmp_path, "r0")
    served = Served(Policy(start=1, maximum=1), run_dir=str(tmp_path))
    try:
        assert served.get("/health") == (200, "ok\n")
        assert (tmp_path / "head.json").read_text() == (tmp_path / "token").read_text() == "theirs"
    finally:
        served.close()
        lock.release()
    assert (tmp_path / "head.json").read_text() == (tmp_path / "token").read_text() == "theirs"


def test_the_run_that_gets_a_directory_has_its_address_there(tmp_path: Path) -> None:
    """Before it is claimed two runs may write there; whoever is refused does not take the other's address away."""
    served = Served(Policy(start=1, maximum=1), run_dir=str(tmp_path))
    try:
        member = served.member("w0")
        ours = (tmp_path / "head.json").read_text()
        for name in ("head.json", "token"):
            (tmp_path / name).write_text("theirs")
        member.send(RunDirectoryChosen(path=str(tmp_path)))
        wait_until(lambda: (tmp_path / "head.json").read_text() == ours, "the address of the head in the directory")
        assert (tmp_path / "token").read_text() == served.token
        for name in ("head.json", "token"):
            (tmp_path / name).write_text("theirs")
    finally:
        served.close()
    assert (tmp_path / "head.json").read_text() == (tmp_path / "token").read_text() == "theirs"


def test_a_refused_worker_learns_it(serve: Callable[..., Served]) -> None:
    served = serve()
    spec = WorkerSpec(head=served.url, token="wrong", worker_id="w0", host="lab")
    member = Member(spec, MemberInfo(worker_id="w0", host="lab", pid=1, device="cpu"), {})
    with pytest.raises(RunStopped, match="401"):
        member.connect(WAIT_S)
    member.close()


def test_members_hear_of_each_other_and_of_the_end(serve: Callable[..., Served]) -> None:
    served = serve(2)
    first, second = served.member("w0"), served.member("w1")
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()  # callbacks are called after those who wait are woken
    first.on_notice(heard.put)
    for member in (first, second):
        member.ready(0)
    notices = [member.wait_notice(0, WAIT_S) for member in (first, second)]
    assert notices[0] == notices[1]
    assert heard.get(timeout=WAIT_S) == notices[0]
    assert first.latest() == notices[0]
    for member in (first, second):
        member.holding(1)
        member.finished()
    for member in (first, second):
        assert str(member.wait_ended(WAIT_S)) == "finished"
        with pytest.raises(RunStopped):
            member.wait_notice(1, WAIT_S)
    assert heard.get(timeout=WAIT_S) is None
    assert heard.empty()


def test_waits_have_deadlines(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "unisono.cluster.worker.storecalls.GRACE_S", WAIT_S
    )  # it is the head that says that no key has come
    member = serve(2).member("w0")
    with pytest.raises(DeadlineExceeded):
        member.wait_notice(0, 0.01)
    with pytest.raises(DeadlineExceeded, match="no key nothing"):
        member.store.call("wait", ["nothing"], timeout_s=0.01)


def test_the_store(serve: Callable[..., Served]) -> None:
    member = serve().member("w0")
    call = member.store.call
    call("set", ["a", "b"], [b"1", b"2"])
    assert call("get", ["b", "a"]).values == [b"2", b"1"]
    assert call("check", ["a", "c"]).amount == 0
    assert call("check", ["a", "b"]).amount == 1
    assert call("add", ["n"], amount=5).amount == 5
    assert call("add", ["n"], amount=-2).amount == 3
    assert call("get", ["n"]).values == [b"3"]
    assert call("compare_set", ["c"], [b"", b"new"]).values == [b"new"]
    assert call("compare_set", ["c"], [b"old", b"newer"]).values == [b"new"]
    assert call("compare_set", ["missing"], [b"old", b"newer"]).values == [b"old"]
    assert call("append", ["c"], [b"er"]).amount == 1
    assert call("get", ["c"]).values == [b"newer"]
    assert call("num_keys", []).amount == 4
    assert call("delete", ["a", "x"]).amount == 1
    assert call("num_keys", []).amount == 3
    with pytest.raises(ProtocolError, match="holds no number"):
        call("add", ["c"], amount=1)
    with pytest.raises(ProtocolError, match="knows no 'explode'"):
        call("explode", ["c"])


def test_a_wait_of_the_store_ends_with_the_key(serve: Callable[..., Served]) -> None:
    served = serve(2)
    first, second = served.member("w0"), served.member("w1")
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.extend(first.store.call("get", ["later"], timeout_s=WAIT_S).values))
    waiter.start()
    second.store.call("set", ["later"], [b"x"])
    waiter.join(WAIT_S)
    assert found == [b"x"]


def test_a_wait_of_the_store_ends_when_its_generation_does(serve: Callable[..., Served]) -> None:
    served = serve(2)
    first, second = served.member("w0"), served.member("w1")
    begin(first, second)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            first.store.call("wait", ["never"], timeout_s=60, generation=1)
        except PeerLost as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    second.left()
    waiter.join(WAIT_S)
    assert "w1" in str(raised[0])


def test_a_broken_message_closes_the_connection_with_a_reason(serve: Callable[..., Served]) -> None:
    served = serve()
    for data in (b"nonsense", "text", encode(Finished()), encode(Welcome(run_id="x", heartbeat_s=1.0))):
        connection = served.dial()
        connection.send(data)
        assert connection.recv(timeout=WAIT_S)  # Announcement: why
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=WAIT_S)


def test_a_connection_that_breaks_comes_back_and_nobody_is_lost(serve: Callable[..., Served]) -> None:
    served = serve(2, reconnect_s=WAIT_S)
    agent = served.dial()
    agent.send(encode(AgentHello(host="lab", pid=1, num_workers=2)))
    first, second = served.member("w0"), served.member("w1")
    begin(first, second)
    link = first._connection._link
    assert link is not None
    link.sock.shutdown(socket.SHUT_RDWR)
    second.left()  # a decision after the break, which the first must hear
    assert [info.worker_id for info in first.wait_notice(1, WAIT_S).members] == ["w0"]
    assert first.ended() is None


def test_a_head_that_was_stopped_first_hears_what_was_said_meanwhile(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would call everybody silent whom it has not listened to, and end the run."""
    served = serve(1, heartbeat_s=20.0)  # it listens for two of them first
    worker = served.dial()
    info = MemberInfo(worker_id="w0", host="lab", pid=os.getpid(), device="cpu")

    def say(*messages: Message) -> None:
        for message in (*messages, StoreCall(call=1, operation="num_keys", keys=[])):
            worker.send(encode(message))

    def wait_until_heard() -> None:
        while not isinstance(decode(worker.recv(WAIT_S, decode=False)), StoreAnswer):
            pass

    for messages in ((Hello(info=info, fingerprint={}), Ready(phase=0)), (Holding(generation=1),)):
        say(*messages)
        wait_until_heard()
    stopped, said = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        said.wait(WAIT_S)
        # Longer than anybody may be silent, and the timer comes before what was said.
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0, time=time.time)
        monkeypatch.setattr("unisono.cluster.head.table.time", clock)
        served.head.table.take("", Tick())

    served.loop.call_soon_threadsafe(stop)
    assert stopped.wait(WAIT_S)
    say(Beat(generation=1, phase=0, step=4, microbatch=0, progress=1, num_steps=5, waiting=True, seconds_at=0.0))
    said.set()
    wait_until_heard()
    status = json.loads(served.get("/status", "secret")[1])
    assert (status["state"], [worker["state"] for worker in status["workers"]]) == ("training", ["training"])


def test_a_head_that_stays_away_ends_the_wait(serve: Callable[..., Served]) -> None:
    served = serve(2)
    member = served.member("w0", head_away_s=0.3)
    with socket.socket() as kept:  # so that no other head gets the port, and refuses
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(served.listener.getsockname())
        served.loop.call_soon_threadsafe(served.head.over.set)
        with pytest.raises(RunStopped, match=r"has been away for \d+ s"):
            member.wait_notice(0, WAIT_S)


def test_a_head_that_is_about_to_end_is_away_and_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Ending(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(http.HTTPStatus.SERVICE_UNAVAILABLE)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Ending) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.server_port}"
        run = RunSpec(settings=RunSettings(head_away_s=3.0))
        spec = WorkerSpec(head=url, token="t", worker_id="w0", host="lab", run=run)
        member = Member(spec, MemberInfo(worker_id="w0", host="lab", pid=1, device="cpu"), {})
        clock = SimpleNamespace(monotonic=lambda: 2.0 * len(asked), sleep=time.sleep)  # it asks every two seconds
        monkeypatch.setattr("unisono.cluster.worker.connection.time", clock)
        with pytest.raises(RunStopped, match=r"has been away for \d+ s: .*503"):
            member.connect(WAIT_S)
        member.close()
        server.shutdown()
    assert len(asked) > 1


def test_64_members_form_every_generation_with_a_second_of_work(serve: Callable[..., Served]) -> None:
    """The head's and all members', in CPU seconds: neighbours do not count. Nobody waits for a heartbeat."""
    served = serve(64, heartbeat_s=NEVER_S, heartbeat_timeout_s=2 * NEVER_S)
    agent = served.dial()
    agent.send(encode(AgentHello(host="lab", pid=1, num_workers=64)))
    members = {f"w{i}": served.member(f"w{i}") for i in range(64)}
    seconds = []

    def form(after: int, act: Callable[[], object]) -> None:
        started = time.process_time()
        act()
        notice = members[min(members)].wait_notice(after, WAIT_S)
        for info in notice.members:
            assert members[info.worker_id].wait_notice(after, WAIT_S) == notice
        seconds.append(time.process_time() - started)
        for info in notice.members:
            members[info.worker_id].holding(notice.generation)
        heard_by_the_head(*members.values())

    form(0, lambda: [member.ready(0) for member in members.values()])
    for number, gone in enumerate(("w3", "w17", "w40", "w63"), 1):
        lost = members.pop(gone)
        form(number, lambda gone=gone: agent.send(encode(WorkerExit(worker_id=gone, exit_code=-9))))
        assert lost.wait_ended(WAIT_S) is not None
    assert max(seconds) < 1.0, seconds


def test_from_the_exit_of_a_process_to_the_notice(serve: Callable[..., Served]) -> None:
    """The head's part of a recovery: nobody waits for a heartbeat, or for the head to look again."""
    served = serve(3, heartbeat_s=NEVER_S, heartbeat_timeout_s=2 * NEVER_S)
    agent = served.dial()
    agent.send(encode(AgentHello(host="lab", pid=1, num_workers=3)))
    members = {f"w{i}": served.member(f"w{i}") for i in range(3)}
    begin(*members.values())
    agent.send(encode(WorkerExit(worker_id="w1", exit_code=-9)))
    members["w0"].wait_notice(1, WAIT_S)
    members["w2"].wait_notice(1, WAIT_S)


# -- processes ---------------------------------------------------------------------------------------


def pids(folder: Path) -> dict[str, int]:
    """What the head says about its workers' processes."""
    known = json.loads((folder / "head.json").read_text())
    host, port = known["url"].removeprefix("ws://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    try:
        token = (folder / "token").read_text()
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
        status = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return {worker["worker_id"]: worker["pid"] for worker in status["workers"]}


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_head_is_reached_where_the_others_are_told(bind: str) -> None:
    if ":" in bind and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    service = Service(policy=Policy(start=1, maximum=1), bind=bind)
    with listen(service) as listener:
        socket.create_connection((reachable(bind), listener.getsockname()[1]), 5.0).close()


@pytest.mark.usefixtures("nursery")
def test_a_killed_worker_is_seen_at_once_and_replaced(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    """By its end, not by its silence, which nobody would notice within this test."""
    command = unisono(
        "run", script(FOLLOW), "--workers", 3, "--run-dir", "run", "--set", f"heartbeat-timeout={NEVER_S}s"
    )
    command.line("[w2] generation 1 w0,w1,w2")
    command.line("[w0] generation 1 w0,w1,w2")
    os.kill(pids(tmp_path / "run")["w1"], signal.SIGKILL)
    command.line("[w0] generation 2 w0,w2")
    command.line("[w2] generation 2 w0,w2")
    # The connection has closed first; where the machine's command hears of the end late, that is what is told.
    end = r"worker w1 .*(\(SIGKILL\)|has closed its connection); generation 2 with 2 workers; "
    command.line("worker w3 replaces it now (restart 1 of 10)", pattern=end)
    command.line("[w0] generation 3 w0,w2,w3")
    command.line("[w3] generation 3 w0,w2,w3")
    assert unisono("stop", "run").wait() == 0
    assert command.wait() == 0
    assert " unisono: stopped by `unisono stop` after" in command.out[-1], "it has done no step"


@pytest.mark.usefixtures("nursery")
def test_a_worker_whose_script_was_edited_meanwhile_is_refused(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    name = script(FOLLOW)
    command = unisono("run", name, "--workers", 2, "--run-dir", "run")
    command.line("[w0] generation 1 w0,w1")
    with (tmp_path / name).open("a") as file:
        file.write("# edited\n")
    os.kill(pids(tmp_path / "run")["w1"], signal.SIGKILL)
    command.line("has a different text of the script")
    command.line("[w0] generation 2 w0")
    assert unisono("stop", "run").wait() == 0
    assert command.wait() == 0


@pytest.mark.usefixtures("nursery")
def test_a_stopped_worker_is_evicted_and_replaced(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    command = unisono(
        *("run", script(FOLLOW), "--workers", 2, "--run-dir", "run", "--set", f"heartbeat-timeout={SILENCE_S}s")
    )
    command.line("[w0] generation 1 w0,w1")
    command.line("[w1] generation 1 w0,w1")
    pid = pids(tmp_path / "run")["w1"]
    os.kill(pid, signal.SIGSTOP)
    command.line("has been silent for ")
    command.line("[w0] generation 2 w0")
    wait_until_gone({pid}, time.monotonic() + WAIT_S)
    command.line("[w2] generation 3 w0,w2")
    assert unisono("stop", "run").wait() == 0
    assert command.wait() == 0


@pytest.mark.usefixtures("nursery")
def test_a_worker_that_gets_nowhere_is_reported_with_its_stack_and_left_aside(unisono: Unisono, script: Script) -> None:
    """The script's signals are its own: under Slurm, SIGUSR1 means that the time is up."""
    name = script(
        """
        import signal, threading, time
        from unisono.cluster.worker import member

        signal.signal(signal.SIGUSR1, lambda *_: print("a handler of the script ran", flush=True))

        def stuck_here():
            time.sleep(1000)

        me = member.current()
        me.ready(0)
        notice = me.wait_notice(0)
        me.holding(notice.generation)
        if me.worker_id == "w1":
            me.store.call("wait", ["w0 waits"], timeout_s=200)
            me.progress.at(phase=0, step=4, microbatch=3)  # in its first step a worker may take its time
            me.progress.at(phase=0, step=5, microbatch=3)
            stuck_here()
        beat, said = me.progress.beat, threading.Event()
        me.progress.waiting(True)
        me.progress.beat = lambda generation, now: (said.set(), beat(generation, now))[1]
        said.wait()  # the head hears that before what follows, and then that w1 is late, not aside at once
        me.store.call("set", ["w0 waits"], [b""])
        if me.worker_id == "w0":
            notice = me.wait_notice(1)
            print("goes on with", [info.worker_id for info in notice.members], notice.immediate, flush=True)
            me.holding(notice.generation)
        """
    )
    command = unisono(
        *(
            "run",
            name,
            "--workers",
            2,
            "--set",
            "report-late-after=2s",
            "--set",
            "go-on-without-after=4s",
            "--set",
            "kill-after=15s",
        ),
        *("--set", "heartbeat=0.1s", "--max-restarts", 0),
    )
    assert "step 5, micro-batch 3" in command.line("is late: no progress for")
    command.line("[w1] w1 is stuck here:")
    command.line("in stuck_here")
    command.line("is left aside")
    command.line("[w0] goes on with ['w0'] True")
    assert command.wait() == 0
    assert not any("a handler of the script ran" in line for line in command.out)


@pytest.mark.usefixtures("nursery")
def test_no_signal_is_taken_from_the_script(unisono: Unisono, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STACK_SIGNAL)
    ignored = {int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    taken = f"""
        import faulthandler, signal
        from unisono.cluster.worker import member

        for number in signal.valid_signals() - {ignored | {signal.SIGINT.value}}:  # what its caller ignores
            assert signal.getsignal(number) == signal.SIG_DFL, number
        assert not faulthandler.unregister(signal.SIGUSR1), "it was registered"
        me = member.current()
        me.ready(0)
        me.holding(me.wait_notice(0).generation)
        """
    command = unisono("run", script(taken), "--workers", 1)
    assert command.wait() == 0, command.err


@pytest.mark.usefixtures("nursery")
def test_a_worker_that_dies_without_a_word_is_told_with_its_last_words(unisono: Unisono, script: Script) -> None:
    name = script("import sys, os\nprint('out of luck', file=sys.stderr)\nos._exit(3)")
    command = unisono("run", name, "--workers", 1)
    assert command.wait() == 3
    assert command.err[-1] == "out of luck"
    assert "ended with exit code 3 and did not report an error" in command.err[-2]


@pytest.mark.usefixtures("nursery")
def test_machines_join_leave_and_the_run_is_scaled(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    command = unisono("run", script(FOLLOW), "--workers", 1, "--run-dir", "run")
    command.line("[w0] generation 1 w0")
    address = json.loads((tmp_path / "run" / "head.json").read_text())
    assert stat.S_IMODE((tmp_path / "run" / "token").stat().st_mode) == 0o600
    guest = unisono("join", address["url"], "--token-file", "run/token", "--workers", 1)
    guest.line("[w1] generation 2 w0,w1")
    shown = unisono("watch", "--once", "run")
    assert shown.wait() == 0
    assert any(line.startswith("w1      1     training") for line in shown.out), shown.out
    guest.process.send_signal(signal.SIGINT)
    assert guest.wait() == 0
    assert "all workers of this machine have left" in guest.out[-1]
    command.line("[w0] generation 3 w0")
    scaled = unisono("scale", "run", 2)
    assert scaled.wait() == 0, scaled.err
    assert scaled.out == ["scaled to 2 workers, from 1"]
    command.line("[w2] generation 4 w0,w2")
    slip = unisono("scale", "run", 1_000_000)
    assert slip.wait() == 2
    assert slip.err[0].startswith("unisono: 1000000 workers are more than 64 for every core (")
    assert unisono("scale", "run", 1).wait() == 0
    command.line("generation 5 w0")
    assert unisono("stop", "run").wait() == 0
    assert command.wait() == 0
    assert list((tmp_path / "run").iterdir()) == []


# A script whose workers have children of their own, as a loader of data has.
PARENTS = """
    import os, subprocess, sys
    from unisono.cluster.worker import member

    says_up = "import os, signal; os.write(1, b'up' + bytes([10])); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", says_up])
    me = member.current()
    me.ready(0)
    me.holding(me.wait_notice(0).generation)
    os.write(1, b"training\\n")  # one write: a line of its own, whatever the child says meanwhile
    me.wait_notice(100)
    """


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_outlives_the_command(
    unisono: Unisono, script: Script, mark: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Workers, their children, the head and the files of its address are gone, whatever ended the command."""
    command = unisono("run", script(PARENTS), "--workers", 2, "--run-dir", "run")
    command.line("[w0] training")
    command.line("[w1] training")
    command.line("[w0] up")
    command.line("[w1] up")
    assert len(marked(mark)) == 7, "command, head, nursery, two workers and a child of each"
    command.process.send_signal(number)
    assert command.wait() == code
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.usefixtures("nursery")
def test_heads_that_die_one_after_the_other_end_the_run(
    unisono: Unisono, script: Script, mark: str, tmp_path: Path
) -> None:
    """One head follows another; but when each of them dies, it is what they have been told that kills them.

    Their address and token, which the last one could not take away, do not stay in the directory.
    """
    command = unisono("run", script(FOLLOW), "--workers", 1, "--run-dir", "run")
    command.line("[w0] generation 1 w0")
    for _ in range(MAX_HEADS):
        deadline = time.monotonic() + WAIT_S
        while not (heads := {pid for pid, words in marked(mark).items() if "-m unisono.cluster.head" in words}):
            assert time.monotonic() < deadline, "no head follows"
            os.sched_yield()
        for pid in heads:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(heads, deadline)
    assert command.wait() == 1
    assert f"{MAX_HEADS} heads in a row have ended" in command.err[-1]
    assert list((tmp_path / "run").iterdir()) == []


MANY = [f"--word-{number:0>1000}" for number in range(200)]
"""Arguments of a script, more than fit into one argument or variable of a process (128 KiB)."""


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_arguments_of_a_script_are_in_no_command_line_but_the_scripts_own(
    start: str, unisono: Unisono, script: Script, mark: str
) -> None:
    """Other users see the arguments of all processes; that of the head may be on a machine where nobody has typed them.

    However long they are, they reach the worker.
    """
    command = unisono(
        "run",
        script(
            """
    import sys
    print(len(sys.argv))"""
            + FOLLOW
        ),
        "-n",
        1,
        "--set",
        f"start={start}",
        "--",
        *MANY,
    )
    command.line("[w0] generation 1 w0")
    (head,) = [pid for pid, words in marked(mark).items() if "-m unisono.cluster.head" in words]
    assert "--word-" not in Path(f"/proc/{head}/cmdline").read_text()
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130
    assert f"[w0] {len(MANY) + 1}" in command.out


def test_a_script_that_is_inspected_may_have_as_many_arguments(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys; sys.exit(len(sys.argv) - 1)")
    assert run_inspected(RunSpec(arguments=(str(file), *MANY), folder=str(tmp_path))) == len(MANY)


def test_the_token_is_nowhere_to_be_seen(unisono: Unisono, script: Script, mark: str, tmp_path: Path) -> None:
    command = unisono("run", script(FOLLOW), "--workers", 1, "--run-dir", "run")
    command.line("[w0] generation 1 w0")
    token = (tmp_path / "run" / "token").read_text()
    assert len(token) > 30
    for pid in marked(mark):
        assert token not in Path(f"/proc/{pid}/cmdline").read_text()
        assert token not in Path(f"/proc/{pid}/environ").read_text()
    assert unisono("stop", "run").wait() == 0
    assert command.wait() == 0
    assert token not in "".join([*command.out, *command.err])


@pytest.mark.usefixtures("nursery")
def test_gloo_connects_through_the_head(unisono: Unisono, script: Script) -> None:
    """A process group of torch over `HeadStore`, and the calls of the store that it does not make."""
    name = script(
        """
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from unisono.cluster.worker import member, storecalls
        from unisono.cluster.worker.store import HeadStore

        me = member.current()
        me.ready(0)
        notice = me.wait_notice(0)
        me.holding(notice.generation)
        rank = [info.worker_id for info in notice.members].index(me.worker_id)
        storecalls.GRACE_S = 200.0  # it is the head that says that no key has come
        store = HeadStore(me, "g1/", generation=1, timeout_s=200.0)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=me.info.address)]
        group = dist.ProcessGroupGloo(dist.PrefixStore("x", store), rank, 3, options)
        total = torch.tensor([2.0**rank])
        group.allreduce([total]).wait()
        assert total.item() == 7.0, total
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert store.check(["key"]) and not store.check(["other"])
        store.wait(["key"], timedelta(seconds=1))
        try:
            store.wait(["other"], timedelta(seconds=0.01))
        except TimeoutError as error:
            print("timed out:", error, flush=True)
        assert store.compare_set(f"c{rank}", "", "new") == b"new"
        assert store.delete_key(f"c{rank}") and not store.delete_key(f"c{rank}")
        store.set_timeout(timedelta(seconds=3))
        assert store.timeout == timedelta(seconds=3) and store.num_keys() > 0
        group.barrier().wait()
        """
    )
    command = unisono("run", name, "--workers", 3)
    assert command.wait() == 0, command.err
    assert sum("timed out: timeout: no key g1/other within 0.0 s" in line for line in command.out) == 3


def test_a_worker_whose_agent_dies_while_it_is_forked_goes_with_it(standing_nursery: str, tmp_path: Path) -> None:
    """At once, at any moment: before it has done its first thing as well."""
    spec = WorkerSpec(
        head="ws://127.0.0.1:1", worker_id="w0", host="lab"
    )  # nobody is there: it would look for a minute
    request = ForkRequest.of("w0", ["train.py"], {}, str(tmp_path))
    null = os.open(os.devnull, os.O_RDWR)
    gate, key = os.pipe()
    os.write(key, b"1" * 20)
    try:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
                agent.connect(standing_nursery)
                with MemoryFile("unisono-worker", spec.encode()) as settings:
                    request.send(agent, [null, null, null, settings.descriptor, gate])
    finally:
        for descriptor in (null, gate, key):
            os.close(descriptor)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:  # it serves one after the other
        agent.connect(standing_nursery)
        ForkRequest.of("last", [], {}, str(tmp_path)).send(agent, [0, 1, 2, 2, 0])
        agent.settimeout(WAIT_S)
        assert msgspec.msgpack.decode(agent.recv(1 << 16), type=Forked).name == "last"
    deadline = time.monotonic() + WAIT_S
    while (left := forked()) and time.monotonic() < deadline:
        wait_until_gone(set(left), deadline)
    assert left == {}
