"""Where two runs part, and probably why: sentences about what each gave when it was computed again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from unisono.record.explaining import Dissected, Leaf, causes, parting

LEAF = Leaf(
    name="micro-batch 0",
    batch={"batch[0]": "a tensor (2, 3) with digest 1", "batch[1]": "4"},
    modules=[("model.0", "a"), ("model.1", "b"), ("model", "b")],
    loss="1.5",
    weight="2.0",
    gradients={"model.0.weight": "1", "model.1.weight": "2"},
)
OTHER = msgspec.structs.replace(LEAF, name="micro-batch 1")
A = Dissected(
    run="a",
    step=7,
    state={"model['0.weight']": "a tensor (3,) with digest 1", "optimizer['param_groups'][0]['lr']": "0.1"},
    leaves=[LEAF, OTHER],
    digest="d",
    fingerprint={"torch": "2.13"},
)
B = msgspec.structs.replace(A, run="b")
FACTS = {"recipe": {"seed": 1}, "fingerprint": {"torch": "2.13"}, "environment": {"script": "x", "hash seed": "0"}}


def with_leaf(number: int, **values: Any) -> Dissected:
    leaves = list(B.leaves)
    leaves[number] = msgspec.structs.replace(leaves[number], **values)
    return msgspec.structs.replace(B, leaves=leaves, digest="e")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            with_leaf(1, modules=[("model.0", "a"), ("model.1", "c"), ("model", "c")], loss="2", gradients={"g": "1"}),
            "micro-batch 1 of step 7 is the first that differs, with the same data and the same state: the first "
            "module whose output differs, in the order of the forward pass, is model.1. The first gradient that "
            "differs is that of model.0.weight (and 1 more)",
        ),
        (with_leaf(0, modules=LEAF.modules[:1]), "calls 3 modules in one run and 1 in the other"),
        (with_leaf(0, modules=[("model.0", "a"), ("head", "b")]), "calls model.1 in one run and head in the other"),
        (
            with_leaf(0, changed={"model['0.weight']": "a tensor (3,) with digest 2"}, loss="2"),
            "micro-batch 0 of step 7 is the first that differs: the state before the step was equal in both runs, but "
            "when the micro-batch begins it is not: the first tensor is model['0.weight']. So something changes it",
        ),
        (with_leaf(0, loss="2"), "all modules give the same, and the loss is 1.5 in a and 2 in b"),
        (with_leaf(0, gradients={**LEAF.gradients, "model.1.weight": "3"}), "its backward pass is not. The first grad"),
        (with_leaf(0, weight="3.0"), "weighs 2.0 in a and 3.0 in b"),
        (with_leaf(1, batch={**LEAF.batch, "batch[1]": "5"}), "its data do: batch[1] is 4 in a and 5 in b"),
        (msgspec.structs.replace(B, leaves=[LEAF], digest="e"), "cut step 7 differently: into 2 and 1 micro-batches"),
        (msgspec.structs.replace(B, digest="e"), "all micro-batches of step 7 are equal, but their sums are not"),
        (B, "everything about step 7 is equal in both runs"),
        (
            msgspec.structs.replace(B, state={**B.state, "optimizer['param_groups'][0]['lr']": "0.2"}),
            "before step 7, optimizer['param_groups'][0]['lr'] is 0.1 in a and 0.2 in b",
        ),
        (
            msgspec.structs.replace(B, state={**B.state, "model['0.weight']": "a tensor (3,) with digest 2"}),
            "though all gradients before were equal: the first tensor is model['0.weight']",
        ),
        (
            msgspec.structs.replace(B, state={"model['0.weight']": A.state["model['0.weight']"]}),
            "only a has optimizer['param_groups'][0]['lr']",
        ),
        (msgspec.structs.replace(B, failure="it is gone"), "b cannot be recomputed here: it is gone"),
    ],
)
def test_the_first_thing_that_differs_is_named(other: Dissected, said: str) -> None:
    assert said in parting(A, other, ("d", other.digest))[0]


def test_of_a_step_that_has_failed_in_one_run_what_both_have_of_it_is_compared() -> None:
    failed = msgspec.structs.replace(B, digest="", failure="its script ended", leaves=[LEAF])
    first, more = parting(A, failed, ("d", ""))
    assert first == "b cannot be recomputed here: its script ended"
    assert more.startswith("the state before step 7 is equal in both runs")
    other = msgspec.structs.replace(failed, leaves=[msgspec.structs.replace(LEAF, loss="2")])
    assert parting(A, other, ("d", ""))[1].startswith("micro-batch 0 of step 7 is the first that differs")


def test_the_first_of_several_micro_batches_is_named_and_the_others_counted() -> None:
    leaves = [msgspec.structs.replace(one, loss="2") for one in B.leaves]
    first, more = parting(A, msgspec.structs.replace(B, leaves=leaves, digest="e"), ("d", "e"))
    assert first.startswith("micro-batch 0 of step 7 is the first that differs")
    assert more == "2 of the 2 micro-batches of the step differ: micro-batch 0 and micro-batch 1"


def test_runs_that_track_other_things_are_compared_in_what_both_have() -> None:
    lacks = {"model['0.weight']": A.state["model['0.weight']"]}
    other = msgspec.structs.replace(with_leaf(1, loss="2"), state=lacks)
    first, more = parting(A, other, ("d", "e"))
    assert "only a has optimizer['param_groups'][0]['lr']" in first
    assert more.startswith("micro-batch 1 of step 7 is the first that differs")
    other = msgspec.structs.replace(other, state={"model['0.weight']": "a tensor (3,) with digest 2"})
    assert "the first tensor is model['0.weight']" in parting(A, other, ("d", "e"))[1]


def test_runs_that_begin_differently_are_said_to() -> None:
    start = msgspec.structs.replace(A, step=0)
    other = msgspec.structs.replace(B, step=0, state={**B.state, "model['0.weight']": "a tensor (3,) with digest 2"})
    assert "the runs begin with different states" in parting(start, other, ("d", "e"))[0]


def test_a_run_that_does_not_give_its_own_journal_is_said_first() -> None:
    drifted = msgspec.structs.replace(A, drift="step 7 is not as in the journal")
    said = parting(drifted, B, ("c", "d"))
    assert said[0].startswith("a, recomputed here, does not match its own journal: step 7 is not as in the journal")
    assert said[0].endswith("Its step 7 is now that of b")
    (why,) = causes(drifted, B, FACTS, FACTS)
    assert why.startswith("a does not reproduce with the same arithmetic: its script or its data have changed")
    (why,) = causes(
        drifted, B, {**FACTS, "fingerprint": {"torch": "2.12"}}, {**FACTS, "fingerprint": {"torch": "2.12"}}
    )
    assert why.startswith("a was computed with arithmetic that differs from this machine's")


def test_a_run_that_is_itself_only_from_the_beginning_has_a_state_that_is_not_tracked() -> None:
    (why,) = causes(msgspec.structs.replace(A, untracked=5), B, FACTS, FACTS)
    assert why.startswith("the script of a has state that is not tracked: recomputed from the checkpoint of step 5")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recipe": {"seed": 2}}, "the recipes differ: seed is 1 and 2"),
        ({"fingerprint": {"torch": "2.12"}}, "the arithmetic differs: torch is 2.13 and 2.12"),
        ({"environment": {"script": "y"}}, "the script's text was different in the two runs"),
        ({"environment": {"script": "x", "hash seed": "0", "numpy": "2"}}, "the versions differ: numpy is none and 2"),
        (
            {"command": {"arguments": ["t.py", "--lr", "1"]}},
            "the scripts were called differently: (no arguments); --lr 1",
        ),
        ({}, "recipes, scripts, arguments and environments are the same. So the script depends on something"),
        ({"environment": {}}, "recipes, scripts, arguments and environments are the same"),
    ],
)
def test_causes_come_from_what_the_runs_were_made_with(changed: dict[str, Any], said: str) -> None:
    assert said in causes(A, B, FACTS, {**FACTS, **changed})[0]


def test_data_that_differ_with_the_hash_seed_come_from_the_order_of_a_set() -> None:
    other = {**FACTS, "environment": {"script": "x", "hash seed": "5"}}
    changed = with_leaf(1, batch={})
    assert "its data do" in parting(A, changed, ("d", "e"))[0]
    assert causes(A, changed, FACTS, other)[0].startswith("PYTHONHASHSEED was 0 and 5: the order of the data may come")
    assert causes(A, changed, FACTS, FACTS)[0].startswith("the data themselves may have changed")


def test_nothing_is_guessed_where_something_is_known() -> None:
    """The order of a set may differ between two runs whose scripts do, and need not be the cause."""
    changed = with_leaf(1, batch={})
    other = {**FACTS, "environment": {"script": "y", "hash seed": "5"}}
    first = {**FACTS, "command": {"folder": "/", "arguments": ["a.py"]}}
    second = {**other, "command": {"folder": "/", "arguments": ["b.py"]}}
    (said,) = causes(A, changed, first, second, ("size = 1", "size = 2"))
    assert "1 place differs: line 1 is `size = 1`" in said
    said, harmless = causes(A, changed, first, second, ('Run("a")  # one', 'Run("b")'))
    assert said.startswith("PYTHONHASHSEED was 0 and 5")
    assert "1 place differs" in harmless


def test_up_to_five_places_are_shown_and_the_harmless_ones_last() -> None:
    first = {**FACTS, "command": {"folder": "/", "arguments": ["a.py"]}}
    other = {**FACTS, "environment": {"script": "y"}, "command": {"folder": "/", "arguments": ["b.py"]}}
    lines = ['run = unisono.Run("runs/a", seed=1)  # mine', *(f"x{n} = 1\nsame{n}" for n in range(5))]
    mine = "\n".join(lines)
    theirs = mine.replace("runs/a", "runs/b").replace("x0 = 1", "x0 = 2")
    (said,) = causes(A, B, first, other, (mine, theirs))
    assert said.index("2 places differ: line 2 is `x0 = 1`") < said.index("line 1 is `run = unisono.Run(")
    (said,) = causes(A, B, first, other, (mine, mine.replace("runs/a", "runs/b").replace(" = 1", " = 2")))
    assert said.count("line ") == 10
    assert said.endswith("in b.py; and 1 more")
    assert "runs/b" not in said
    seeded = mine.replace("seed=1", "seed=2")  # not harmless: it is the line of the directory, and more differs
    assert "PYTHONHASHSEED" not in " ".join(causes(A, with_leaf(1, batch={}), first, other, (mine, seeded)))


def test_the_lines_that_differ_of_two_scripts_are_named() -> None:
    first = {**FACTS, "command": {"folder": "/", "arguments": ["a.py"]}}
    other = {"environment": {"script": "y"}, "command": {"folder": "/", "arguments": ["b.py"]}}
    texts = ("import torch\nlr = 1\nend", "import torch\nlr = 2\nend\nmore")
    (said,) = causes(A, B, first, {**FACTS, **other}, texts)
    assert said.endswith(
        "2 places differ: line 2 is `lr = 1` in a.py, and line 2 is `lr = 2` in b.py; line 4 is `more` in b.py only"
    )
    (said,) = causes(A, B, first, {**FACTS, **other}, (texts[0], texts[0] + "\nmore"))
    assert said.endswith("1 place differs: line 4 is `more` in b.py only")
    (said,) = causes(A, B, first, {**first, "environment": {"script": "y"}}, ("", ""))
    assert "it was edited in between, and both runs were recomputed with the current text" in said
