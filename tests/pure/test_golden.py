"""Golden bits of a test, and what `compare --bisect` reads of git: decisions, without a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from unisono.core.errors import UsageError
from unisono.system.faults import Fault
from unisono.testing.golden import (
    GoldenBits,
    changed_words,
    digests_by_object,
    golden_difference,
    golden_file,
    read,
    write,
)
from unisono.testing.runs import Faults
from unisono.testing.samebits import trials_of
from unisono.tools.bisect import progress
from unisono.tools.check.trials import KILL

GOLDEN = GoldenBits(
    arithmetic={"torch": "2.13", "instructions": "AVX2"},
    steps=3,
    digests=["a", "b", "c"],
    state={"model": "m", "optimizer": "o"},
    script=["import torch", "rate = 0.1"],
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"arithmetic": {}, "steps": 4, "script": []}, ""),
        ({"digests": ["a", "x", "y"]}, "step 1 is the first that differs: its gradient has the digest x, the "
         "golden one b"),
        ({"digests": ["a", "b"]}, "there are 2 steps, and 3 golden ones"),
        ({"state": {"model": "m", "optimizer": "p"}}, (
            "all gradients of the 3 steps are the golden ones, but optimizer differs after them. So the updates "
            "differ, or something done between the steps"
        )),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(changed: dict[str, object], said: str) -> None:
    assert golden_difference(GOLDEN, msgspec.structs.replace(GOLDEN, **changed)) == said


def test_the_line_that_has_changed_is_named_where_the_text_is_known() -> None:
    now = msgspec.structs.replace(GOLDEN, script=["import torch", "rate = 0.2"])
    assert changed_words(GOLDEN, now, "train.py") == (
        "1 place differs: line 2 is `rate = 0.2` in train.py, and line 2 is `rate = 0.1` in the golden train.py"
    )
    assert changed_words(GOLDEN, GOLDEN, "train.py").startswith("train.py has not changed. So something that")
    assert changed_words(GOLDEN, msgspec.structs.replace(GOLDEN, script=[]), "train.py") == ""


def test_a_digest_of_an_object_is_of_all_its_parts() -> None:
    parts = {"model['weight']": "1", "model['bias']": "2", "optimizer['param_groups'][0]['lr']": "0.1"}
    digests = digests_by_object(parts)
    assert list(digests) == ["model", "optimizer"]
    assert digests_by_object(dict(reversed(parts.items()))) == digests
    other = digests_by_object({**parts, "model['bias']": "3"})
    assert (other["model"] == digests["model"], other["optimizer"] == digests["optimizer"]) == (False, True)


def test_golden_bits_of_several_kinds_of_arithmetic_stand_side_by_side(tmp_path: Path) -> None:
    path = golden_file(tmp_path / "test_train.py", "small")
    assert path.name == "test_train.small.bits.json"
    assert read(path) == []
    newer = msgspec.structs.replace(GOLDEN, arithmetic={"torch": "2.14"})
    for one in (GOLDEN, newer, msgspec.structs.replace(GOLDEN, digests=["z"])):
        write(path, one)
    assert [(one.arithmetic, one.digests) for one in read(path)] == [
        (newer.arithmetic, ["a", "b", "c"]),
        (GOLDEN.arithmetic, ["z"]),
    ]
    assert path.read_text().endswith("]\n")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "ä"])
def test_a_golden_name_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is part of a file name"):
        golden_file(tmp_path / "test_train.py", name)


@pytest.mark.parametrize("text", ["", "{}", '[{"steps": 3}]', "[" * 100_000, "\xff"])
def test_a_file_that_holds_something_else_is_refused_in_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "test_train.x.bits.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="has no golden bits"):
        read(path)


def test_the_first_run_with_several_workers_loses_one() -> None:
    found = trials_of((1, 3, 2, 1), kill=True)
    assert [(one.name, one.workers, one.faults) for one in found] == [
        ("3 workers, one killed", 3, (KILL,)),
        ("2 workers", 2, ()),
        ("alone, once more", 1, ()),
    ]
    assert [one.faults for one in trials_of((2, 3), kill=False)] == [(), ()]
    own = Faults().delay("w0", 0.1, at="step_head")
    assert [one.faults for one in trials_of((1, 2), own)] == [
        (Fault(action="delay", worker="w0", at="step_head", seconds=0.1),)
    ]
    assert trials_of((1,), kill=True) == []


@pytest.mark.parametrize(
    ("workers", "kill", "said"),
    [
        ((), True, "numbers of workers, of at least 1 each"),
        ((0, 2), True, "numbers of workers, of at least 1 each"),
        ((1, 1), Faults().kill("w0", at="step_head"), "has no run with several workers"),
    ],
)
def test_trials_that_make_no_sense_are_refused(workers: tuple[int, ...], kill: bool | Faults, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trials_of(workers, kill)


def test_the_result_of_a_bisect_is_read_from_its_log() -> None:
    log = "git bisect start\n# good: [aa] One\ngit bisect good aa\n# bad: [bb] Two [x]\n"
    assert progress(log) == []
    assert progress(f"{log}# first bad commit: [bb] Two [x]\n") == ["bb"]
    possible = "# possible first bad commit: "
    left = f"# only skipped commits left to test\n{possible}[bb] Two\n{possible}[cc] C\n"
    assert progress(log + left) == ["bb", "cc"]
