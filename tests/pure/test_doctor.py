"""What hurts a run, by the facts of its machines: each check finds its own trouble, and says what to do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from unisono.tools.doctor.checks import CHECKS, check
from unisono.tools.doctor.facts import MachineFacts, Scope
from unisono.tools.doctor.together import Known, Path, check_together

VERSIONS = {"Python": "3.11.7", "unisono": "0.1.0", "torch": "2.13.0", "numpy": "2.4"}
GOOD = MachineFacts(
    host="a",
    addresses=["10.0.0.1"],
    versions=VERSIONS,
    arithmetic="EPYC",
    num_cores=8,
    load=0.5,
    memory=64 * 10**9,
    memory_free=50 * 10**9,
    shared_memory=32 * 10**9,
    shared_memory_free=32 * 10**9,
    open_files=1024,
    disk_free=100 * 10**9,
    disk="ext4",
    sync_s=0.002,
    local_ports=(32768, 60999),
)
ASKED = Scope(run_dir="/runs/a")


def test_nothing_hurts_on_a_good_machine() -> None:
    findings = check("a", GOOD, ASKED)
    assert [finding.check for finding in findings] == list(CHECKS)
    assert all(finding.is_ok and finding.seen and finding.host == "a" for finding in findings)


@pytest.mark.parametrize(
    ("name", "changes", "asked", "words"),
    [
        ("versions", {"versions": {**VERSIONS, "torch": ""}}, ASKED, "torch missing"),
        ("devices", {"num_taken": 8}, ASKED, "8 cores for workers, 8 taken by runs"),
        ("devices", {"num_gpus": 2, "num_taken": 2}, ASKED, "2 GPUs for workers, 2 taken by runs"),
        ("load", {"load": 6.0}, ASKED, "6.0 processes want one of 8 cores"),
        ("CPU limit", {"core_limit": 0.5}, ASKED, "the time of 0.5 cores"),
        ("memory", {"memory_free": 10**9}, ASKED, "1.0 GB free of 64.0 GB"),
        ("shared memory", {"shared_memory_free": 64 * 10**6}, ASKED, "/dev/shm has 64 MB free"),
        ("open files", {"open_files": 60}, ASKED, "60 for a process"),
        ("disk", {"can_write": False}, ASKED, "ext4"),
        ("disk", {"disk_free": 10**9}, ASKED, "1.0 GB free"),
        ("disk", {"disk": "tmpfs"}, ASKED, "tmpfs"),
        ("disk", {"sync_s": 0.2}, ASKED, "200.0 ms to write"),
        ("ports", {"ports_taken": [5000, 5001]}, Scope(ports=(5000, 5001)), "0 of 2 free from 5000 to 5001"),
        ("ports", {}, Scope(ports=(47000, 47100)), "101 of 101 free from 47000 to 47100"),
    ],
)
def test_each_check_finds_its_own_trouble_and_no_other(
    name: str, changes: dict[str, Any], asked: Scope, words: str
) -> None:
    findings = check("a", msgspec.structs.replace(GOOD, **changes), asked)
    (hurt,) = [finding for finding in findings if not finding.is_ok]
    assert hurt.check == name
    assert words in hurt.seen
    assert hurt.because
    assert hurt.do


def test_limits_that_the_library_knows_of_do_not_hurt() -> None:
    facts = msgspec.structs.replace(GOOD, core_limit=2.5, open_files=-1, disk="nfs4", local_ports=(47000, 47100))
    findings = {finding.check: finding for finding in check("a", facts, Scope(ports=(47000, 47100)))}
    assert all(finding.is_ok for finding in findings.values())
    assert findings["CPU limit"].seen.endswith("--workers auto starts 2")
    assert "other machines may see the same files" in findings["disk"].seen


def two(other: MachineFacts = GOOD, **known: Any) -> list[tuple[str, str]]:
    """What hurts two machines: check, and what was seen."""
    findings = check_together(Known(facts={"a": GOOD, "b": other}, **known))
    return [(finding.check, finding.seen) for finding in findings if not finding.is_ok]


def test_one_machine_has_nothing_to_be_compared_with() -> None:
    assert check_together(Known(facts={"a": GOOD})) == []


def test_two_equal_machines_on_a_good_network_are_well() -> None:
    paths = [Path(source="a", target="b", address="10.0.0.2", latency_s=2e-4, bandwidth=1.1e8)]
    assert two(clocks={"a": 0.0, "b": 0.02}, paths=paths, sees_run_dir={"b": False}) == []


def test_machines_that_differ_are_told_apart() -> None:
    other = msgspec.structs.replace(GOOD, versions={**VERSIONS, "torch": "2.12.0"}, arithmetic="Xeon")
    assert two(other) == [
        ("versions", "torch is 2.13.0 on a and 2.12.0 on b"),
        ("processors", "EPYC on a and Xeon on b"),
    ]


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        ("2.13.0+cpu", "beware: with torch 2.13.0+cpu on a and b, anyone who reaches a worker's port"),
        ("2.9.1", "beware: with torch 2.9.1 on a and b"),
        ("2.14.0a0+git1", "has no known vulnerability"),
        ("3.0", "has no known vulnerability"),
        ("", "has no known vulnerability"),
    ],
)
def test_who_has_a_gloo_with_a_hole_is_told(torch: str, words: str) -> None:
    """It is a warning: nobody can do more about it than see who is in the network."""
    facts = msgspec.structs.replace(GOOD, versions={**VERSIONS, "torch": torch})
    (found,) = [each for each in check_together(Known(facts={"a": facts, "b": facts})) if each.check == "gloo"]
    assert found.is_ok
    assert found.seen.startswith(words)


def test_a_clock_that_is_wrong_is_found() -> None:
    assert two(clocks={"a": 0.001, "b": -90.0}) == [("clock", "90.0 s behind")]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (Path(source="a", target="b", error="10.0.0.2 port 4: timed out"), "10.0.0.2 port 4: timed out"),
        (Path(source="a", target="b", latency_s=1e-3, bandwidth=1.2e7), "1.00 ms there and back, 12 MB/s"),
        (Path(source="a", target="b", latency_s=0.02, bandwidth=1e8), "20.00 ms there and back, 100 MB/s"),
    ],
)
def test_a_bad_way_between_two_machines_is_found(path: Path, words: str) -> None:
    assert two(paths=[path]) == [("a to b", words)]
