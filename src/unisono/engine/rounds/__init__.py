"""Rounds: the common work of the members of a run.

A **round** is work that is cut into leaves. Each member computes the leaves that the plan gives it, and at the end all
members put the results together. The sum of a step's gradients is a round, and so are an evaluation and a checkpoint
that all members wait for; each kind is one file of this folder. `unisono.engine.rounds.life` plays any of them, and
lets it survive the loss of members. A new kind of round is one new file with a class that has the methods of `Round`.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from unisono.core.cadence import CheckpointReport
from unisono.core.cursor import Recipe
from unisono.core.errors import StepError
from unisono.core.plan import Plan
from unisono.core.tree import Node
from unisono.engine.exchange.flat import FlatLayout

__all__ = ["Dispute", "FinishedRound", "Nothing", "Repeats", "Report", "Reporter", "Round", "check_titles"]


class FinishedRound(Protocol):
    """Result of a finished round, kept so that slower members can still complete it."""

    @property
    def layout(self) -> FlatLayout | None:
        """Layout of the sums; None if the round sums nothing."""

    def stand_by(self, plan: Plan) -> None:
        """Take part in the others' repetition of the round, without any node. Collective.

        Args:
            plan: by rank of the new generation, the nodes of each member; this member has none.

        Raises:
            PeerLost, DeadlineExceeded: another member was lost. DivergenceError: the repetition gave other bits.
        """


class Round(Protocol):
    """One piece of common work. `unisono.engine.rounds.life.Rounds.play` calls the methods in the order in which they
    stand.

    The exchanges of `compute` and `combine` may raise `PeerLost` or `DeadlineExceeded` at any point: then `interrupt`
    is called, and `compute` and `combine` again, with the plan of what is missing.
    """

    @property
    def kind(self) -> str:
        """Name of this kind of round, e.g. "step"; members that begin the same round as different kinds fail."""

    @property
    def title(self) -> str:
        """Description of the round for an error message: "a step of 8 micro-batches"."""

    @property
    def num_leaves(self) -> int: ...

    def first_plan(self) -> Plan:
        """Return the plan of a round in which nothing is computed yet; equal on all members. Local."""

    def begin(self, plan: Plan) -> None:
        """Get ready to compute; called once, with the first plan, which may give this member no leaf. Local."""

    def compute(self, plan: Plan) -> Iterator[object]:
        """Compute the leaves of this member in the plan that it has not computed yet. Local.

        Every value that this yields goes to the script.
        """

    def combine(self, plan: Plan) -> FinishedRound:
        """Put the results of all members together; when this returns, the round is committed. Collective."""

    def interrupt(self) -> Collection[Node]:
        """Give up the plan, because a member was lost. Returns the complete nodes of this member. Local."""

    def finish(self) -> None:
        """Apply the result, after the commit."""


@dataclass(frozen=True)
class Dispute:
    """Digests that a member remembers of a round in which members have computed different values."""

    leaves: Mapping[int, Mapping[int, int]]
    """Of the micro-batches that it has computed and another member as well, by place (`Fingerprint.by_place`)."""
    state: int | None
    """Of its state before the round, if it has taken one."""


class Repeats(Round, Protocol):
    """A round that can be done again, and whose micro-batches can be computed once more."""

    @property
    def unit(self) -> str:
        """Name of what is computed again: "micro-batch"."""

    @property
    def number(self) -> int:
        """Number of the step within the run."""

    @property
    def dispute(self) -> Dispute | None:
        """None, once the round is over: its result counts."""

    def compute_uncounted(self, leaf: int) -> Generator[Any, None, Mapping[int, int]]:
        """Yield a micro-batch to the script, of which nothing is summed; return its digests by place."""


class Reporter:
    """Sends a report with every combine: the part of a member that writes checkpoints and the journal.

    As it is, it is that of a run without both.
    """

    def report(self) -> CheckpointReport:
        """Return this member's report; may wait for a copy in memory. Called before every combine."""
        return CheckpointReport()

    def on_reports(self, reports: Sequence[CheckpointReport], generation: int, worker_ids: Sequence[str]) -> None:
        """Receive the reports of all members, by rank. Called after every combine."""

    def unwritten_lines(self) -> list[str]:
        """Return the lines of the journal that a newcomer may have to write."""
        return []

    def newest(self) -> str:
        """Return what the run can go on from, for an error."""
        return "the beginning: this run has no checkpoints"


class Nothing:
    """Result before the first round."""

    layout: FlatLayout | None = None

    def stand_by(self, plan: Plan) -> None:
        raise AssertionError("no round is finished yet, so no member can be a round behind")


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
    arithmetic: int = 0
    """Fingerprint of everything that the member's arithmetic depends on."""
    joined: int = -1
    """Steps of the run that were done when the member joined, or was tried anew; -1: it was there at the beginning."""


def check_titles(begun: Mapping[str, str], step: int) -> None:
    """Compare the descriptions of the rounds that members, by worker id, have begun.

    Raises:
        StepError: they are in rounds of different kinds, and would wait for each other for ever.
    """
    if len(set(begun.values())) > 1:
        raise StepError(
            f"the workers do different things at step {step}: "
            f"{', '.join(f'{worker} is at {what}' for worker, what in begun.items())}. A decision in the script "
            "depends on the worker (run.rank, run.is_main, the time, a sum collected within `for batch in step`): all "
            "workers must call run.steps, run.evaluate, run.save, step() of a sharded optimizer (unisono.shard), "
            "unisono.clip_grad_norm_, run.barrier, run.broadcast, run.all_gather and run.main_first alike"
        )
