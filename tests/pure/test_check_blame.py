"""Blame: which statement made two computations of the same thing differ."""

from __future__ import annotations

import textwrap

from unisono.tools.check.blame import Culprit, blame
from unisono.tools.check.records import LeafRecord, Section, StatementEvent, StateRecord, Where
from unisono.tools.check.statements import Statements, read_script
from unisono.tools.check.trial_diff import first_difference, places_of

FILE = "train.py"
TEXT = textwrap.dedent("""
    for step in run.steps(data):
        for inputs in step:
            count += 1
            seen += 1
            if run.rank:
                scale = 2
            loss = model(inputs) * count * scale
            step.backward(loss)
        optimizer.step()
""")
COUNT, SEEN, IF, SCALE, LOSS = 4, 5, 6, 7, 8
LEAF = Where(0, "leaf", leaf=2)
SETUP = Where(-1, "setup")


def script(_: str) -> Statements:
    return read_script(TEXT)


def begun(line: int, **values: str) -> StatementEvent:
    return StatementEvent(False, FILE, line, values)


def ended(line: int, **values: str) -> StatementEvent:
    return StatementEvent(True, FILE, line, values, 0, tuple(values))


def section(*events: StatementEvent, where: Where = LEAF, aside: bool = False) -> Section:
    return Section(where, list(events), aside)


def found(ours: list[Section], theirs: list[Section], *, aside: bool = False) -> Culprit:
    culprit = blame(ours, theirs, [LEAF, SETUP], script, aside=aside)
    assert culprit is not None
    return culprit


def test_the_last_writer_of_a_value_that_is_not_the_same_is_the_culprit() -> None:
    before = section(ended(COUNT, count="1"), where=Where(0, "leaf", leaf=1))
    ours = [before, section(begun(LOSS, count="2"))]
    culprit = found(ours, [section(begun(LOSS, count="0"))])
    assert (culprit.kind, culprit.line, culprit.path, culprit.values) == ("reads", COUNT, "count", ("2", "0"))
    assert culprit.reader == (FILE, LOSS)


def test_a_writer_within_the_steps_goes_before_one_that_all_workers_have_run_alike() -> None:
    setup = section(ended(SCALE, count="0"), where=SETUP)
    theirs = [setup, section(ended(COUNT, count="1"), where=Where(0, "leaf", leaf=1)), section(begun(LOSS, count="1"))]
    culprit = found([setup, section(begun(LOSS, count="0"))], theirs)
    assert culprit.line == COUNT


def test_a_statement_that_reads_the_same_and_writes_another_value_is_the_culprit() -> None:
    ours = section(begun(LOSS, count="1"), ended(LOSS, loss="3"))
    theirs = section(begun(LOSS, count="1"), ended(LOSS, loss="4"))
    culprit = found([ours], [theirs])
    assert (culprit.kind, culprit.line, culprit.path) == ("writes", LOSS, "loss")


def test_the_statement_before_the_steps_that_takes_an_order_goes_before_what_the_loop_shows() -> None:
    """The clock is another one in each computation as well, and the list that is made of the ordered one follows."""

    def computed(order: str, clock: str) -> list[Section]:
        names = f"list of 2: {order}"
        return [
            section(
                *(begun(COUNT), ended(COUNT, count=clock)),
                *(begun(SCALE, names="set of 2: 'a', 'b'"), ended(SCALE, scale=names)),
                *(begun(LOSS, scale=names), ended(LOSS, loss=f"dict of 2: {order}")),
                where=SETUP,
            ),
            section(begun(LOSS), ended(LOSS, inputs=f"tensor {order}")),
        ]

    culprit = found(computed("'a', 'b'", "1.5"), computed("'b', 'a'", "2.5"))
    assert (culprit.kind, culprit.line, culprit.path) == ("writes", SCALE, "scale")


def test_what_is_ordered_alike_before_the_steps_is_not_blamed() -> None:
    setup = section(begun(SCALE), ended(SCALE, scale="list of 2: 'a', 'b'"), where=SETUP)
    culprit = found([setup, section(begun(LOSS, count="2"))], [setup, section(begun(LOSS, count="0"))])
    assert culprit.line == LOSS


def test_a_branch_that_decides_otherwise_is_the_culprit() -> None:
    ours = section(begun(IF), ended(IF), begun(LOSS))
    theirs = section(begun(IF), ended(IF), begun(SCALE), ended(SCALE, scale="2"), begun(LOSS))
    culprit = found([ours], [theirs])
    assert (culprit.kind, culprit.line) == ("branches", IF)


def test_what_reaches_no_gradient_is_not_blamed() -> None:
    ours = section(begun(SEEN, seen="1"), ended(SEEN, seen="2"), begun(LOSS, count="1"))
    theirs = section(begun(SEEN, seen="7"), ended(SEEN, seen="8"), begun(LOSS, count="1"))
    assert blame([ours], [theirs], [LEAF], script) is None


def test_a_micro_batch_that_is_computed_again_is_compared_with_the_first_time() -> None:
    first, again = section(begun(LOSS, count="1")), section(begun(LOSS, count="5"), aside=True)
    assert found([first, again], [first, again], aside=True).values == ("1", "5")


def leaf(index: int, loss: str, *, step: int = 0, aside: bool = False) -> LeafRecord:
    return LeafRecord(Where(step, "leaf", leaf=index), loss, {"weight": loss}, aside)


def test_the_first_difference_is_the_first_in_the_order_of_the_steps() -> None:
    reference = [
        StateRecord(0, {"a": "1"}),
        leaf(0, "1"),
        leaf(1, "2"),
        StateRecord(1, {"a": "2"}),
        leaf(0, "3", step=1),
    ]
    workers = {"w0": [StateRecord(0, {"a": "1"}), leaf(0, "1"), StateRecord(1, {"a": "9"})], "w1": [leaf(1, "8")]}
    difference = first_difference(reference, workers)
    assert difference is not None
    assert (difference.where, difference.worker, difference.part) == (Where(0, "leaf", leaf=1), "w1", "weight")


def test_trials_with_the_same_bits_do_not_differ() -> None:
    reference = [StateRecord(0, {"a": "1"}), leaf(0, "1"), leaf(1, "2")]
    assert first_difference(reference, {"w0": reference[:2], "w1": [leaf(1, "2"), leaf(0, "1", aside=True)]}) is None


def test_the_dataset_is_looked_at_before_the_micro_batch_and_the_setup_last() -> None:
    difference = first_difference([leaf(2, "1")], {"w1": [leaf(2, "2")]})
    assert difference is not None
    places = places_of(difference, [section(where=Where(0, "head"))])
    assert places == [Where(0, "fetch", leaf=2), LEAF, Where(0, "head"), SETUP]


def test_a_difference_is_said_with_as_few_digits_as_tell_the_losses_apart() -> None:
    for ours, theirs, said in (
        ("1.5889738798141479", "1.5581074357032776", "its loss is 1.58897 and 1.55811"),
        ("1.5889738798141479", "1.5889738798141481", "its loss is 1.5889738798141479 and 1.5889738798141481"),
        ("1.58897387", "1.58897411", "its loss is 1.5889739 and 1.5889741"),
        ("nan", "0.123456789", "its loss is nan and 0.123457"),
    ):
        difference = first_difference([leaf(0, ours)], {"w1": [leaf(0, theirs)]})
        assert difference is not None
        assert said in difference.said()
