"""``unisono doctor``: facts of this machine, orders to several, and what is measured between them."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono
from unisono.tools.doctor.asking import NUM_PINGS, ProbeRequest, Server, carry_out, measure
from unisono.tools.doctor.checks import check
from unisono.tools.doctor.facts import Scope, find_out

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("small_training.py")


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """Runs commands here, as on several machines; one of them is gone."""
    program = tmp_path / "fake-ssh"
    program.write_text(
        "#!/bin/sh\n"
        "for word; do name=$last last=$word; done\n"
        '[ "$name" = gone ] && { echo no route to host >&2; exit 255; }\n'
        'eval "$last"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_the_facts_of_this_machine_are_found_out(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        facts = find_out(Scope(run_dir=str(tmp_path / "not" / "there"), ports=(port, port)))
        assert facts.ports_taken == [port]
    assert facts.num_cores <= len(os.sched_getaffinity(0))
    assert facts.versions["torch"]
    assert 0 < facts.memory_free <= facts.memory
    assert facts.disk
    assert facts.disk_free > 0
    assert 0 < facts.sync_s < WAIT_S
    assert facts.can_write
    assert 0 < facts.local_ports[0] < facts.local_ports[1]
    assert list(tmp_path.glob("not*")) == [], "it only looks"


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    assert find_out(Scope(run_dir="/proc/self")).can_write is False


def test_a_folder_that_is_not_there_yet_is_said(tmp_path: Path) -> None:
    asked = Scope(run_dir=str(tmp_path / "new" / "run"))
    facts = find_out(asked)
    assert facts.disk_folder == str(tmp_path)
    (seen,) = (finding.seen for finding in check("here", facts, asked) if finding.check == "disk")
    assert f"{asked.run_dir} is not there yet: looked at {tmp_path}" in seen
    assert not (tmp_path / "new").exists(), "it only looks"


def test_a_network_that_loses_full_packets_is_told_from_one_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.tools.doctor.asking.STALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(len("word"))
                for _ in range(NUM_PINGS):
                    connection.sendall(connection.recv(1))
                is_over.wait(WAIT_S)  # what comes now is lost on the way

        is_over = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(OSError, match="full packets are lost on the way"):
                measure("127.0.0.1", listener.getsockname()[1], "word")
        finally:
            is_over.set()
            thread.join()


def test_latency_and_bandwidth_are_measured_for_who_knows_the_word() -> None:
    server = Server(None)
    with pytest.raises(OSError, match=r"closed|reset|pipe"):
        measure("127.0.0.1", server.port, "x" * len(server.word))
    latency_s, bandwidth = measure("127.0.0.1", server.port, server.word)
    assert 0 < latency_s < WAIT_S
    assert bandwidth > 1e5
    with pytest.raises(OSError, match=r"refused|closed|reset|pipe"):
        measure("127.0.0.1", server.port, server.word)


def test_a_server_takes_a_port_of_the_range() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            Server((port, port))
    server = Server((port, port))
    assert server.port == port
    measure("127.0.0.1", port, server.word)


def test_an_order_that_fails_is_answered() -> None:
    answer = carry_out(ProbeRequest(what="measure", addresses=["127.0.0.1"], port=9, word="x"))
    assert answer.error.startswith("127.0.0.1 port 9: ")
    assert "no address" in carry_out(ProbeRequest(what="measure")).error
    assert carry_out(ProbeRequest(what="make", file="/nowhere/file")).error


def test_machines_are_examined_together(unisono: Unisono, ssh: str, tmp_path: Path) -> None:
    command = unisono("doctor", "--hosts", "left,right", "--ssh", ssh, "--run-dir", tmp_path / "new", "--json")
    code = command.wait()
    found = json.loads("\n".join(command.out))
    assert code == (1 if any(finding.get("because") for finding in found["findings"]) else 0)
    assert set(found["machines"]["facts"]) == {"left", "right"}
    assert [(path["source"], path["target"]) for path in found["machines"]["paths"]] == [
        ("left", "right"),
        ("right", "left"),
    ]
    assert all(path["bandwidth"] > 1e5 for path in found["machines"]["paths"])
    assert found["machines"]["sees_run_dir"] == {"right": True}
    assert abs(found["machines"]["clocks"]["left"]) < WAIT_S
    assert [path.name for path in tmp_path.iterdir() if "doctor" in path.name] == []


def test_a_machine_that_does_not_answer_is_named(unisono: Unisono, ssh: str) -> None:
    command = unisono("doctor", "--hosts", "left,gone", "--ssh", ssh)
    assert command.wait() == 1
    text = "\n".join(command.out)
    assert "gone:\n  will hurt  ssh: it cannot be reached (no route to host)" in text
    assert "see `ssh gone`" in text
    assert "left:\n" in text


def test_this_machine_alone_and_a_run_that_is_not_going(unisono: Unisono, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    command = unisono("doctor", "run")
    assert command.wait() == 1
    assert "no run is active in run" in command.line("will hurt  run: ")
    assert command.line("here:")


@pytest.mark.usefixtures("nursery")
def test_a_run_that_is_going_is_reached(unisono: Unisono, tmp_path: Path) -> None:
    waits = unisono("run", SCRIPT, "-n", 1, "--wait-for", 2, "--run-dir", tmp_path / "run", "--", "--steps", 2)
    waits.line("1 of 2 workers are there")
    command = unisono("doctor", "run")
    command.wait()
    assert "answers within" in command.line("run: the head at")
    assert unisono("stop", "run").wait() == 0
    assert waits.wait() == 0, waits.err


def test_machines_are_named_as_in_a_run(unisono: Unisono, tmp_path: Path) -> None:
    """This machine needs no ssh under any of its names, and an option of ssh is no name."""
    here = unisono("doctor", "--hosts", "localhost:4", "--ssh", "/none/ssh", "--run-dir", tmp_path)
    here.wait()
    here.line("localhost:")
    assert not any("cannot be started" in line for line in here.out + here.err)
    refused = unisono("doctor", "--hosts", "-oProxyCommand=touch x,b")
    assert refused.wait() == 2
    refused.line("is not the name of a machine")
    away = unisono("doctor", "--hosts", "[fe80::1]:2", "--ssh", "false")
    assert away.wait() == 1
    away.line("fe80::1:")
