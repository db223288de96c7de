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
    "Report",
    "Standing",
    "check_alike",
    "check_titles",
    "plain",
    "plan_of_missing",
]


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
    """Kind of the round that the member has begun, and finishes next; "" between two rounds."""
    title: str = ""
    """Title of that round: "a step of 8 micro-batches"."""
    num_leaves: int = 1
    open: dict[str, list[tuple[int, int]]] = {}
    """By kind of the round, the nodes that the member has finished of each round that it has begun."""
    sends: bool = False
    """The member can send the result of the round that it has finished last to members that have not."""
    lines: int = 0
    """Lines of the journal."""
    total: int = 0
    """Steps of the run that are done, of all phases."""
    recipe: Recipe = {}
    """Recipe of the phase in which the member was admitted, or asks to be."""


@dataclass(frozen=True)
class Standing:
    """How far this member is against the others, since they have met."""

    reports: Sequence[Report] = ()
    """What each has said of itself in the last meeting after a loss; none: all members have finished the same rounds,
    and nobody holds a part of the next one.
    """
    is_behind: bool = False
    """This member is in the middle of a round that others have finished: all meet again before it begins the next."""

    @property
    def begun(self) -> frozenset[str]:
        """The kinds of the newest round that members have begun."""
        newest = max((report.round for report in self.reports), default=0)
        return frozenset(report.kind for report in self.reports if report.round == newest) - {""}


def plan_of_missing(reports: Sequence[Report], number: int, num_leaves: int, kind: str) -> Plan:
    """Return the plan of the leaves of a round that no member has, by what all have reported.

    Args:
        number: those that have finished the round of this number can compute nothing of it.
        kind: of the round.
    """
    able = [report.round <= number for report in reports]
    held = [report.open.get(kind, []) if able else [] for report, able in zip(reports, able, strict=True)]
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
            "(unisono.shard), run.barrier, run.broadcast, run.all_gather and run.main_first alike"
        )


def plain(nodes: Iterable[Node]) -> list[tuple[int, int]]:
    """Return nodes as they stand in a report."""
    return [(node.level, node.index) for node in nodes]
