"""``unisono doctor``: facts of this machine, orders to several, and what is measured between them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono
from unisono.doctor.facts import Asked, find_out
from unisono.doctor.orders import Order, carry_out
from unisono.doctor.path import Server, measure

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("small_training.py")


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """Runs commands here, as on several machines; one of them is gone."""
    program = tmp_path / "fake-ssh"
    program.write_text('#!/bin/sh\n[ "$1" = gone ] && { echo no route to host; exit 255; }\nshift; eval "$1"\n')
    program.chmod(0o755)
    return str(program)


def test_the_facts_of_this_machine_are_found_out(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        facts = find_out(Asked(run_dir=str(tmp_path / "not" / "there"), ports=(port, port)))
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
    assert find_out(Asked(run_dir="/proc/self")).can_write is False


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
    answer = carry_out(Order(what="measure", addresses=["127.0.0.1"], port=9, word="x"))
    assert answer.error.startswith("127.0.0.1 port 9: ")
    assert "no address" in carry_out(Order(what="measure")).error
    assert carry_out(Order(what="make", file="/nowhere/file")).error


def test_machines_are_examined_together(unisono: Unisono, ssh: str, tmp_path: Path) -> None:
    command = unisono("doctor", "--hosts", "left,right", "--ssh", ssh, "--run-dir", tmp_path, "--json")
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
    assert "gone:\n  will hurt  ssh: the machine cannot be asked: no route to host" in text
    assert "do: try it by hand: ssh gone true" in text
    assert "left:\n" in text


def test_this_machine_alone_and_a_run_that_is_not_going(unisono: Unisono, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    command = unisono("doctor", "run")
    assert command.wait() == 1
    assert "no run is going in run" in command.line("will hurt  run: ")
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
