"""Reports that members exchange when they meet, and how far a member is against the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from unisono.core.cursor import Recipe
from unisono.core.errors import StepError
from unisono.core.plan import Plan, plan, replan
from unisono.core.tree import Node

__all__ = [
    "Behind",
    "Level",
    "Met",
    "Open",
    "Report",
    "Standing",
    "check_alike",
    "check_titles",
    "plain",
    "plan_of",
    "plan_of_missing",
]


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """What a member has of the steps that are under way while its script goes on
    (`unisono.strategies.delay.pipeline`).
    """

    at: int = -1
    """The step of the script in which the member takes part in the sum of the first one under way."""
    num_leaves: int = 1
    """Of the first one."""
    have: list[tuple[int, list[tuple[int, int]]]] = []
    """By number of the step, in their order, the nodes that the member has finished."""
    sends: bool = False
    """The member can send the result of the round that it has finished last to members that have not."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report that a member sends to the others when they meet."""

    fresh: bool
    """The member does not have the state of the run."""
    phase: int
    step: int
    """The step within the phase that the member is in or will begin next."""
    round: int
    """The round that the member has not finished yet."""
    kind: str = ""
    """Kind of the round that the member has begun; "" between two rounds."""
    title: str = ""
    """Title of that round: "a step of 8 micro-batches"."""
    num_leaves: int = 1
    have: list[tuple[int, int]] = []
    """Nodes of that round that the member has finished."""
    lines: int = 0
    """Lines of the journal."""
    total: int = 0
    """Steps of the run that are done, of all phases."""
    recipe: Recipe = {}
    """Recipe of the phase in which the member was admitted, or asks to be."""
    open: Open = Open()
    """What the member has of rounds that are open beside that one."""


@dataclass(frozen=True)
class Level:
    """All members have finished the same rounds, and none of them holds a part of the next one."""

    @property
    def begun(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Met:
    """The members have met after a loss and are in the same round; these reports say what each holds of it."""

    reports: Sequence[Report]

    @property
    def begun(self) -> frozenset[str]:
        """The kinds of this round that members have begun."""
        return frozenset(report.kind for report in self.reports if report.kind)


@dataclass(frozen=True)
class Behind:
    """This member is in the middle of a round that others have finished: all meet again before it begins the next."""

    reports: Sequence[Report]
    begun: frozenset[str]
    """The kinds of the next round that others have begun."""


Standing = Level | Met | Behind


def plan_of_missing(reports: Sequence[Report], number: int, num_leaves: int, kind: str) -> Plan:
    """Return the plan of the missing leaves of a round, from the nodes of the members that have not finished it.

    Args:
        kind: of the round; nodes of members that are at another kind are nodes of something else.
    """
    able = [report.round == number for report in reports]
    held = [
        report.have if is_able and report.kind == kind else [] for report, is_able in zip(reports, able, strict=True)
    ]
    return plan_of(held, able, num_leaves)


def plan_of(held: Sequence[Sequence[tuple[int, int]]], able: Sequence[bool], num_leaves: int) -> Plan:
    """Return the plan of the leaves of a round that no member has.

    Args:
        held: by rank, the (level, index) of the nodes that each member has finished.
        able: by rank, whether the member can compute leaves of that round.
    """
    if not any(held) and all(able):
        return plan(len(held), num_leaves)
    nodes = [[Node(level, index) for level, index in each] for each in held]
    return replan(nodes, able, num_leaves)


def check_alike(reports: Mapping[str, Report], step: int) -> None:
    """Compare the rounds that the members, by worker id, have begun.

    Raises:
        StepError: members have begun rounds of different kinds, and would wait for each other for ever.
    """
    check_titles({worker: report.title for worker, report in reports.items() if report.title}, step)


def check_titles(begun: Mapping[str, str], step: int) -> None:
    """Compare the descriptions of the rounds that members, by worker id, have begun; raises as `check_alike`."""
    if len(set(begun.values())) > 1:
        raise StepError(
            f"the workers do different things at step {step}: "
            f"{', '.join(f'{worker} is at {what}' for worker, what in begun.items())}. A decision of the script "
            "depends on the worker (run.rank, run.is_main, the time, a sum collected within `for batch in step`): "
            "all workers must call run.steps, run.evaluate, run.save, step() of an optimizer that is shared out "
            "(unisono.shard), run.barrier, run.broadcast, run.gather and run.main_first alike"
        )


def plain(nodes: Iterable[Node]) -> list[tuple[int, int]]:
    """Return nodes as they stand in a report."""
    return [(node.level, node.index) for node in nodes]
