"""Who may talk to a run, whom its workers believe, and that strangers change no bit of it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.waiting import WAIT_S
from tests.workers import strangers
from tests.workers.conftest import Command, Unisono, forked, marked, served_by
from tests.workers.gates import Gates
from unisono.cli.reach import NotGoing, ask_status, find, tell
from unisono.cluster.trust.certificate import Identity, Untrusted, derived, given, server_context
from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.cluster.worker.link import Link
from unisono.core.errors import UsageError
from unisono.core.messages import Stop
from unisono.record.journal import compare
from unisono.record.journal.times import by_step
from unisono.record.rundir import EVENTS_FILE
from unisono.system.lifetime import Memory
from unisono.testing import run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("small_training.py")
STEPS = 30
STANDARD_INPUT = ("sh", "-c", 'exec "$@" < "$0"')
"""Starts a command with a file, the first word after this, as its standard input."""


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    with served_by(standing_nursery):
        outcome = run_workers(SCRIPT, 1, directory=folder, arguments=["--steps", str(STEPS)])
    assert outcome.exit_code == 0, outcome.output
    return folder


def start(unisono: Unisono, run_dir: Path, gates: Gates, *options: object) -> Command:
    place = ("--run-dir", run_dir, *options, "--", "--steps", STEPS, "--gates", gates.folder)
    return unisono("run", SCRIPT, "-n", 2, *place)


def finish(command: Command, run_dir: Path, calm: Path) -> None:
    assert command.wait() == 0, command.err
    assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps")


def next_status(invitation: Invitation) -> dict[str, Any]:
    """What the head says of three workers, when there is one again."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NotGoing):
            found = ask_status(invitation)
            if len(found["workers"]) == 3:
                return found
    raise AssertionError("no head, or not all workers with it")


# -- a run with TLS ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("nursery")
def test_a_machine_joins_with_the_line_that_status_shows_and_follows_the_next_head(
    unisono: Unisono, tmp_path: Path, calm: Path
) -> None:
    """All connections are by TLS, and the next head has the certificate of the one before."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (3, 20)) as gates:
        command = start(unisono, run_dir, gates, "--bind", "0.0.0.0")
        gates.wait(3)
        invitation = find(str(run_dir))
        head = HeadUrl.parse(invitation.url)
        assert head.is_secure
        assert head.fingerprint == derived(invitation.token).fingerprint
        hint = command.line("other machines join with the line that `unisono watch --once")
        assert invitation.token not in hint, "it would stand in a file that others may read"

        status = unisono("watch", "--once", run_dir)
        assert status.wait() == 0
        line = status.line("other machines join with: ").partition("join with: ")[2]
        assert shlex.split(line) == ["unisono", "join", "-", "<<<", invitation.line]
        (tmp_path / "line").write_text(invitation.line + "\n")
        from_standard_input = (*STANDARD_INPUT, str(tmp_path / "line"))
        guest = unisono("join", "-", "-n", 1, before=from_standard_input)
        trust = guest.line("joins run ")
        assert f" at {head.place}, which has proved that it is the run's head" in trust
        assert f"in {tmp_path}: {SCRIPT} --steps {STEPS}" in guest.line("1 worker here will run, as ")
        gates.open(3, command.generation("w2 joins; generation 2 with 3 workers"))

        gates.wait(20)
        os.kill(json.loads((run_dir / "head.json").read_text())["pid"], signal.SIGKILL)
        command.line("another one takes over")
        assert next_status(invitation)["url"] == invitation.url
        scaled = unisono("scale", "-", 3, before=from_standard_input)
        assert scaled.wait() == 0, scaled.err
        gates.open(20)
        finish(command, run_dir, calm)
        assert guest.wait() == 0, guest.err
    shown = [*command.out, *command.err, *guest.out, *guest.err]
    assert not [text for text in shown if invitation.token in text]


@pytest.mark.usefixtures("nursery")
def test_a_certificate_of_ones_own(unisono: Unisono, tmp_path: Path, own: Identity) -> None:
    with Gates(tmp_path / "gates", (1,)) as gates:
        files = ("--set", f"certificate={tmp_path / 'own.crt'}", "--set", f"private-key={tmp_path / 'own.key'}")
        command = start(unisono, tmp_path / "run", gates, *files)
        gates.wait(1)
        invitation = find(str(tmp_path / "run"))
        head = HeadUrl.parse(invitation.url)
        assert (head.host, head.is_secure, head.fingerprint) == ("127.0.0.1", True, own.fingerprint)
        assert ask_status(invitation)["state"] == "training"
        with pytest.raises(UsageError, match="is not the head of this run: its certificate is"):
            ask_status(Invitation(str(HeadUrl(head.host, head.port, True)), invitation.token))
        assert "the run ends at the end of the step" in tell(invitation, Stop(reason="enough"))
        gates.open(1)
        assert command.wait() == 0


@pytest.mark.usefixtures("nursery")
def test_this_machine_need_not_reach_the_address_that_others_are_told(
    unisono: Unisono, tmp_path: Path, calm: Path
) -> None:
    """It may be that of a router before it, which sends nothing back to where it came from."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (1,)) as gates:
        command = start(unisono, run_dir, gates, "--tls", "--set", "advertise=192.0.2.77")
        gates.wait(1)
        head = HeadUrl.parse(find(str(run_dir)).url)
        status = unisono("watch", "--once", run_dir)
        assert status.wait() == 0
        line = shlex.split(status.line("other machines join with: ").partition("join with: ")[2])[-1]
        assert HeadUrl.parse(Invitation.parse(line).url) == msgspec.structs.replace(head, host="192.0.2.77")
        assert head.host == "127.0.0.1"
        gates.open(1)
        finish(command, run_dir, calm)


def test_an_older_tls_is_refused(own: Identity) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    false = FalseHead(own)  # with the settings of a true one
    try:
        with socket.create_connection((false.url.host, false.url.port)) as connection, pytest.raises(ssl.SSLError):
            context.wrap_socket(connection)
    finally:
        false.close()


@pytest.fixture
def own(tmp_path: Path) -> Identity:
    """A certificate that does not belong to the run's token, in two files."""
    identity = derived("somebody's")
    key, certificate = identity.pem.split(b"-----BEGIN CERTIFICATE-----")
    (tmp_path / "own.key").write_bytes(key)
    (tmp_path / "own.crt").write_bytes(b"-----BEGIN CERTIFICATE-----" + certificate)
    return identity


def test_files_that_are_no_certificate_are_named(own: Identity, tmp_path: Path) -> None:
    certificate, key, other = tmp_path / "own.crt", tmp_path / "own.key", tmp_path / "other.key"
    other.write_bytes(derived("another").pem)
    assert given(certificate, key) == own
    for pair, why in (
        ((tmp_path / "missing", key), "missing cannot be read: No such file"),
        ((key, key), "own.key holds no certificate in PEM form"),
        ((certificate, certificate), "own.crt holds no private key in PEM form"),
        ((certificate, other), "other.key does not belong to the certificate"),
    ):
        with pytest.raises(UsageError, match=why):
            given(*pair)


def test_no_other_user_can_have_a_standing_nursery_fork_workers(tmp_path: Path, standing_nursery: str) -> None:
    """Where groups of users share what they make (umask 002), too."""
    assert stat.S_IMODE(os.stat(standing_nursery).st_mode) == 0o600


@pytest.mark.usefixtures("nursery")
def test_only_the_port_of_the_head_is_open_when_the_workers_are_connected(
    unisono: Unisono, tmp_path: Path, mark: str
) -> None:
    with Gates(tmp_path / "gates", (2,)) as gates:
        command = start(unisono, tmp_path / "run", gates, "--exchange", "gloo", "--tls")
        gates.wait(2, workers=2)
        head = HeadUrl.parse(find(str(tmp_path / "run")).url)
        listening = {found for pid in (*marked(mark), *forked()) for found in listeners(pid)}
        assert {address for address, _ in listening} == {LOOPBACK}, "on the run's interface, and on no other"
        found = {port for _, port in listening}
        assert head.port in found
        assert len(found) == 3, "one of each worker is there and has been closed to all"
        assert [port for port in found if answers(port)] == [head.port]
        gates.open(2)
        assert command.wait() == 0, command.err


LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel writes it."""


def listeners(pid: int) -> set[tuple[str, int]]:
    """The addresses and TCP ports at which a process listens."""
    found = set()
    with contextlib.suppress(OSError):
        sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                row = line.split()
                if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
                    address, _, port = row[1].rpartition(":")
                    found.add((address, int(port, 16)))
    return found


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S / 100).close()
    except OSError:
        return False
    return True


# -- false heads -------------------------------------------------------------------------------------


class FalseHead:
    """Answers with a certificate of its own, and notes what it is sent after the handshake."""

    def __init__(self, identity: Identity) -> None:
        with Memory("unisono-test", identity.pem) as memory:
            context = server_context(memory.path)
        self._listener = context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True)
        self.url = HeadUrl("127.0.0.1", self._listener.getsockname()[1], True)
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, name="unisono-test-false-head")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ssl.SSLError:
                continue
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.settimeout(WAIT_S)
                self.heard.append(connection.recv(4096))

    def close(self) -> None:
        """Twice does no harm."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._listener.close()


@pytest.fixture
def false_head() -> Iterator[FalseHead]:
    found = FalseHead(derived("the stranger's own"))
    yield found
    found.close()


ASK: dict[str, Callable[[Invitation], object]] = {
    "a worker, an agent": lambda to: Link.dial(to.url, to.token, WAIT_S),
    "unisono watch --once": ask_status,
    "unisono stop": lambda to: tell(to, Stop(reason="enough")),
}


@pytest.mark.parametrize("is_named", [True, False], ids=["with a fingerprint", "without"])
@pytest.mark.parametrize("who", ASK)
def test_a_false_head_is_sent_nothing(who: str, is_named: bool, false_head: FalseHead) -> None:
    """The token least of all. Who has an address and a token only can tell a head from others, too."""
    fingerprint = derived("token").fingerprint if is_named else ""
    url = HeadUrl("127.0.0.1", false_head.url.port, True, fingerprint)
    with pytest.raises((Untrusted, UsageError), match=r"is not the head of this run: .* Nothing was sent to it"):
        ASK[who](Invitation(str(url), "token"))
    false_head.close()
    assert b"".join(false_head.heard) == b""


@pytest.mark.parametrize("who", ["unisono watch --once", "unisono stop"])
def test_a_command_does_not_send_the_token_to_what_does_not_know_it(who: str) -> None:
    """Also without TLS: on one machine, another user may have got the port of a run that was killed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n" + b"0" * 64)

        thread = threading.Thread(target=serve, name="unisono-test-false-head")
        thread.start()
        with pytest.raises(UsageError, match="does not know the token, which was not sent to it"):
            ASK[who](Invitation(f"ws://127.0.0.1:{listener.getsockname()[1]}", "secret"))
        thread.join(WAIT_S)
    assert heard
    assert b"secret" not in b"".join(heard)


def test_a_false_head_starts_nothing_on_a_machine_that_would_join(
    unisono: Unisono, tmp_path: Path, false_head: FalseHead
) -> None:
    (tmp_path / "line").write_text(Invitation(str(false_head.url), "token").line)
    guest = unisono("join", "-", before=(*STANDARD_INPUT, str(tmp_path / "line")))
    assert guest.wait() == 2
    assert "is not the head of this run" in "\n".join(guest.err)
    assert not [line for line in guest.err if "will run" in line]


def test_a_head_without_tls_is_no_head_for_who_expects_tls() -> None:
    """Somebody on the path could otherwise take the TLS away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = str(HeadUrl("127.0.0.1", listener.getsockname()[1], True))
        heard = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")

        thread = threading.Thread(target=serve, name="unisono-test-clear-head")
        thread.start()
        with pytest.raises(ConnectionError, match="the TLS connection failed"):
            Link.dial(url, "token", WAIT_S)
        thread.join(WAIT_S)
    assert b"token" not in heard[0]


# -- strangers ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nursery")
def test_strangers_change_nothing(unisono: Unisono, tmp_path: Path, calm: Path) -> None:
    """Each attack on the head of a training run, which goes on under all of them with few open files; then the bits."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", range(2, 27, 3)) as gates:
        place = ("--run-dir", run_dir, "--tls", "--", "--steps", STEPS, "--gates", gates.folder)
        few_files = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
        command = unisono("run", SCRIPT, "-n", 2, *place, before=few_files)
        gates.wait(2)
        invitation = find(str(run_dir))
        said = strangers.recorded(invitation)
        assert said
        assert invitation.token.encode() not in said
        for step, attack in zip(range(2, 26, 3), strangers.ATTACKS.values(), strict=False):
            gates.open(step)
            attack(invitation)
            gates.wait(step + 3)
        with strangers.dialled(invitation) as replayed:
            replayed.sendall(said)
            assert b"HTTP" not in strangers.answer(replayed)
        with (
            strangers.flood(invitation, 200, b"", with_tls=False),
            strangers.flood(invitation, 100, b"\x16\x03\x01\x02\x00", with_tls=False),
            strangers.flood(invitation, 100, b"GET / HTTP/1.1\r\nX: y", with_tls=True),
        ):
            assert ask_status(invitation)["generation"] == 1, "a member finds room where 400 strangers stand"
            for step in range(2 + 3 * len(strangers.ATTACKS), 27, 3):
                gates.open(step)
            finish(command, run_dir, calm)
    told = [line for line in command.err if "rejected" in line]
    assert len(told) < 5, "not one line for each attempt"
    assert "rejected a connection without the run's token, from 127.0.0.1; the run continues" in told[0]
    assert "failed-join" not in (run_dir / EVENTS_FILE).read_text(), "who knocks at the port is no worker of the run"
    assert not [line for line in (*command.out, *command.err) if "Traceback" in line or "lost" in line]
    assert {len(workers) for workers in by_step(run_dir).values()} == {2}


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_a_script_that_logs_everything_does_not_log_the_token(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its worker connects again when the head is another one."""
    with caplog.at_level(logging.DEBUG), socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        link = Link(socket.create_connection(("127.0.0.1", port)), f"{scheme}://127.0.0.1:{port}", "secret-token")
        link.close()
    assert "secret-token" not in caplog.text
