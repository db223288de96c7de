"""Machines on a command line and in a file, how workers are spread over them, and what ssh's words mean."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.cluster.launchers.hosts import Host, is_this_machine, parse_hostfile, parse_hosts, read_hostfile, spread
from unisono.cluster.launchers.way import why_ssh_failed
from unisono.core.errors import UsageError
from unisono.system.capacity import Workers


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a,b:2,c", [Host("a"), Host("b", 2), Host("c")]),
        ("me@lab-1.uni.example:3", [Host("me@lab-1.uni.example", 3)]),
        (" 10.0.0.5:2 , b ", [Host("10.0.0.5", 2), Host("b")]),
        ("[fe80::1]:4,[::1]", [Host("fe80::1", 4), Host("::1")]),
        ("a,a,b", [Host("a", 2), Host("b")]),
        ("a:2,a:3", [Host("a", 5)]),
    ],
)
def test_hosts_are_read(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a list of machines such as a,b:2,c; got ''"),
        ("a,,b", "a list of machines"),
        ("a:0", "the number of workers of a machine is 1 or more, got '0'"),
        ("a:two", "got 'two'"),
        ("a:", "got ''"),
        ("fe80::1", "got ':1'"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not the name of a machine"),
        ("a b", "'a b' is not the name of a machine"),
        ("me@", "'me@' is not the name of a machine"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts(text)
    assert words in str(error.value)


def test_hostfiles_of_open_mpi_and_mpich_are_read() -> None:
    text = """
    # the lab
    node1 slots=2
    node2:4            # the large one
    me@node3

    node4 slots=1 max_slots=8
    node5
    node5
    """
    hosts = [Host("node1", 2), Host("node2", 4), Host("me@node3"), Host("node4", 1), Host("node5", 2)]
    assert parse_hostfile(text, "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nobody\n", "the hostfile hosts names no machine; write one a line, such as: node1 slots=2"),
        ("a\nb slots=x", "hosts, line 2: b slots=x: the number of workers of a machine is 1 or more, got 'x'"),
        ("a cpu=2", "hosts, line 1: a line is HOST, HOST:N or HOST slots=N; got 'a cpu=2'"),
        ("a:1 slots=2", "got 'a:1 slots=2'"),
    ],
)
def test_what_is_no_hostfile_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hostfile(text, "hosts")
    assert words in str(error.value)


def test_a_hostfile_may_be_written_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfnode1 slots=2\r\nnode2\r\n")
    assert read_hostfile(str(file)) == [Host("node1", 2), Host("node2")]


def test_this_machine_is_known_by_its_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "lab1.uni.example")
    names = ["localhost", "lab1", "lab1.uni.example", "127.0.0.1", "me@lab1", "lab2", "lab1.other.example", "192.0.2.7"]
    assert [is_this_machine(name) for name in names] == [True, True, True, True, False, False, False, False]


def numbers(workers: int | tuple[int, int], *hosts: Host, room: list[int], is_auto: bool = False) -> list[int]:
    if isinstance(workers, int):
        asked = Workers(workers, 1, workers, grows=True)
    else:
        asked = Workers(workers[0], *workers, grows=False)
    return spread(asked, hosts, [host.slots or there for host, there in zip(hosts, room, strict=True)], is_auto=is_auto)


A, B, C = Host("a"), Host("b"), Host("c")


def test_workers_are_spread_by_the_room_that_the_machines_have() -> None:
    assert numbers(6, A, B, C, room=[4, 4, 4]) == [2, 2, 2]
    assert numbers(6, A, B, room=[8, 4]) == [4, 2]
    assert numbers(1, A, B, room=[1, 4]) == [0, 1], "that with the most room"
    assert numbers(99, A, B, room=[8, 4], is_auto=True) == [8, 4]
    assert numbers((2, 5), A, B, room=[8, 2]) == [4, 1], "of a range as many as there is room for"
    assert numbers((2, 50), A, B, room=[8, 4]) == [8, 4]
    assert numbers((6, 50), A, B, room=[2, 2]) == [3, 3], "at least as many as asked for"


def test_a_machine_with_a_number_has_no_more_workers_than_that() -> None:
    assert numbers(12, Host("a", 1), B, C, room=[8, 4, 2]) == [1, 8, 3]
    assert numbers(2, Host("a", 2), Host("b", 2), room=[8, 8]) == [1, 1]
    assert numbers(3, A, Host("b", 1), room=[8, 8]) == [2, 1], "and no fewer, if there are so many"
    with pytest.raises(UsageError, match=r"asks for 5, and the hosts are given 4 in all \(a:2, b:2\)"):
        numbers(5, Host("a", 2), Host("b", 2), room=[8, 8])


@given(st.integers(1, 60), st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5))
def test_all_workers_have_a_place(wanted: int, machines: list[tuple[int, bool]]) -> None:
    hosts = [Host(f"m{i}", room if fixed else None) for i, (room, fixed) in enumerate(machines)]
    offered = sum(room for room, _ in machines)
    if wanted > offered and all(fixed for _, fixed in machines):
        return
    found = numbers(wanted, *hosts, room=[room for room, _ in machines])
    assert sum(found) == wanted
    for number, (room, fixed) in zip(found, machines, strict=True):
        assert number <= room or (not fixed and wanted > offered)


@pytest.mark.parametrize(
    ("lines", "meaning"),
    [
        (["me@a: Permission denied (publickey)."], "refuses the key of this user"),
        (["@@@", "Host key verification failed."], "has an unknown or a changed host key"),
        (["ssh: Could not resolve hostname a: Name or service not known"], "cannot be reached"),
        (["ssh: connect to host a port 22: Connection refused"], "cannot be reached"),
        (["ssh: connect to host a port 22: Connection timed out"], "cannot be reached"),
        (["[w0] epoch 3", "client_loop: send disconnect: Broken pipe"], "has lost its connection"),
        (["Timeout, server a not responding."], "has lost its connection"),
        (["Connection to a closed by remote host."], "has lost its connection"),
        ([], "has lost its connection"),
    ],
)
def test_the_words_of_ssh_tell_a_refused_key_from_a_lost_connection(lines: list[str], meaning: str) -> None:
    cause, line = why_ssh_failed(lines)
    assert cause == meaning
    assert not lines or line == lines[-1]
