"""Journal and checkpoints of a run, as the training loop sees them, and the signal to leave."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from unisono.cluster.worker import member as members
from unisono.core.cadence import CheckpointReport, Checkpoints, Position
from unisono.core.cursor import Recipe
from unisono.core.errors import UsageError
from unisono.engine.checkpoint.copies import absolute, check
from unisono.engine.checkpoint.saving import Saver, Wish
from unisono.engine.checkpoint.snapshot import Moment, Snapshot
from unisono.engine.checkpoint.writer import write_facts
from unisono.engine.exchange import Parcel
from unisono.engine.rounds import Reporter
from unisono.engine.rounds.gathering import together, union
from unisono.engine.rounds.life import CHECKPOINT, EVALUATED, Rounds
from unisono.engine.rounds.team import Team
from unisono.engine.state.packing import grouped
from unisono.engine.state.tracked import Tracked
from unisono.record.checkpoint_files import Stream, complete, memory_at
from unisono.record.journal import JOURNAL, MOST_KEPT_LINES, Journal
from unisono.record.rundir import CHECKPOINTS, RunDirectory
from unisono.script.inspecting import Inspector
from unisono.script.resuming import Resumption
from unisono.script.schedule import Asked, shards_of
from unisono.strategies.evaluators.beside import Beside
from unisono.system.faults import point
from unisono.system.process import IS_WATCHED, Process, tell

__all__ = ["Keeper"]

FIRST: Final = "w0"
"""The worker that begins the run, unless it is lost before."""
OTHERS_S: Final = 2.0
COPIES_ROUND_S: Final = 1.0
COPIED: Final = b"copied"
LENDING: Final = "lending"
"""The kind of the round in which states travel to a member that writes them."""
TOGETHER_BYTES = 16 << 20
"""Tensors up to this size together are sent at once."""


class Keeper(Reporter):
    """Keeps journal and checkpoints on the disk, for this member. It is the reporter of the run's rounds.

    Args:
        directory: None keeps nothing.
        resume: "auto": go on with what the directory holds, if anything; a path: with what is there; "": begin.
        anyway: parts of the recipe that may differ from the checkpoint's, by the script.
        also_anyway: the same, by the command line.
        keep_best: the script's `Checkpoints.keep_best`, also where another policy holds.
        command: how ``unisono run`` was called (JSON); "": it was not.
        copies: where checkpoints are copied to, by the command line; empty: where the policy says.

    Attributes:
        saver: writes the checkpoints.
        inspector: may ask for checkpoints; None: nobody looks.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        tracked: Tracked,
        policy: Checkpoints | None,
        keep_best: str | None = None,
        resume: str,
        anyway: Collection[str],
        also_anyway: Collection[str],
        command: str,
        copies: Sequence[str] = (),
        overwrite: bool,
        device: torch.device,
        threads: int,
    ) -> None:
        if directory is None and (policy is not None or resume or copies):
            what = "checkpoints need" if policy is not None or copies else "resume= needs"
            raise UsageError(f"{what} the directory of the run: unisono.Run(directory, ...), or --run-dir")
        if isinstance(anyway, str):
            raise UsageError(f"resume_anyway is a set of names, e.g. {{{anyway!r}}}, not a string")
        self.policy, self.keep_best = policy, keep_best
        self.directory = directory
        self.inspector: Inspector | None = None
        self.tell_saved: Callable[[], None] = lambda: None
        """Is called when a checkpoint was written that no step may follow."""
        self._inspected = -1
        """The newest step for which the inspector has a checkpoint."""
        self._tracked = tracked
        places = [absolute(url) for url in copies or (policy.places if policy is not None else ())]
        if places:
            check(places)
        self._directory = RunDirectory(directory, _may_write)
        self._resumption = Resumption(
            self._directory,
            tracked,
            resume=resume,
            may_differ={*anyway, *also_anyway},
            command=command,
            copies=places,
            overwrite=overwrite,
            device=device,
            threads=threads,
        )
        self.saver = Saver(policy, self._directory, device, tracked, places)
        path = directory / JOURNAL if directory is not None and IS_WATCHED else None
        self.journal = Journal(path, self._directory.look)
        self._process = Process()
        self.run_id, self._worker_id, self._is_alone = "", "", True
        self._metrics: dict[str, float] = {}
        """The loss of the last step, and the newest figures of ``step.log``."""
        self._figures: tuple[int, dict[str, float]] = (0, {})
        """After how many steps of the run, and the figures that belong to the model of then and to no later one."""
        self._leaving = False
        self.left_by: SystemExit | None = None
        """What has ended the script after SIGTERM."""
        self._leaves = False  # at this boundary: the signal may come at any time
        self._signal_before: Any = None
        self._writes = False
        """This member writes for all members, by the newest reports."""
        self._beside: Beside | None = None
        self._evaluated = False
        """A member sees that an evaluation beside the training has come to its end, by the newest reports."""
        self._misses = False
        """This member has warned that no member sees the directory any more."""

    # -- life ----------------------------------------------------------------------------------------

    def enter(self, run_id: str, *, alone: bool) -> None:
        """Note that the run begins in this process.

        Raises:
            RunDirectoryError: the directory is another run's.
        """
        self.run_id, self._is_alone = run_id, alone
        if alone and self._directory.path is not None:
            self._resumption.claim(run_id)
            code = self.policy.exit_code_on_sigterm if self.policy is not None else None
            if code is not None and threading.current_thread() is threading.main_thread():
                self._signal_before = signal.signal(signal.SIGTERM, self._on_signal)
        elif members.spec().worker_id == FIRST:  # the others may have another directory under that path
            self._resumption.refuse_used(run_id)

    def note_data(self, digest: object, dataset: Any = None) -> None:
        """Note a digest of the samples, and the shards of a data set, for the run's description, unless they are known
        already, or these are none.
        """
        if isinstance(digest, str) and not self._resumption.data_digest:
            self._resumption.data_digest = digest
        self._resumption.shards = self._resumption.shards or shards_of(dataset)

    def begin(self, phase: int, recipe: Recipe, asked: Asked) -> Position | None:
        """Claim the directory and load what the run goes on from, on the one member that begins a run.

        See `Resumption.begin`.
        """
        return self._resumption.begin(self.run_id, phase, recipe, asked, is_restart=not self._is_alone)

    def checkpoint(self) -> Path | None:
        """Return the checkpoint that the run goes on from, on the member that has loaded it."""
        return self._resumption.checkpoint

    def joined(self, recipe: Recipe, rounds: Rounds, lines: list[str]) -> None:
        """Note that this member is in the run, and that the directory is claimed.

        Args:
            lines: of the journal, which this member got as a newcomer, and may have to write.
        """
        team = rounds.team
        self._worker_id = team.worker_ids[team.rank]
        self._metrics, self._figures = {}, (rounds.position.total, dict(self._resumption.metrics))
        self.journal.go_on_at(rounds.position.lines, lines)
        self._directory.enter(self.run_id)
        if not self._directory.is_seen:
            self.journal.keep_for_copy()
        whole, fingerprint = self._resumption.whole_recipe(recipe), self._resumption.fingerprint()
        self.saver.join(self._worker_id, whole, fingerprint, is_newcomer=rounds.number > 0)

    def enter_phase(self, recipe: Recipe) -> None:
        """Note the recipe of the phase that begins: a checkpoint is compared with the phase in which it was written."""
        self.saver.describe(self._resumption.whole_recipe(recipe), self._resumption.fingerprint())

    def close(self) -> None:
        """End what was begun, whatever happened."""
        if self._is_alone:
            self.saver.wait_for_copies()
        self.saver.close()
        if self._writes and not self._directory.look() and not self._directory.is_left_to_others:
            self._miss()
        self._directory.release()
        if self._signal_before is not None:
            signal.signal(signal.SIGTERM, self._signal_before)
            self._signal_before = None

    def _on_signal(self, number: int, frame: Any) -> None:
        if (
            self._leaving or not self._process.is_this
        ):  # a second signal ends the process at once; a fork has no step to finish
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._leaving = True

    def wait_for(self, beside: Beside) -> None:
        """Let checkpoints wait for the evaluations that are computed beside the training."""
        self._beside = beside

    # -- questions -----------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """Whether the run was asked by a signal to stop after the current step, and to be resumed later."""
        return self._leaving

    @property
    def reaches(self) -> bool:
        """Whether this member sees the run's directory."""
        return self._directory.is_seen

    def all_reach(self, worker_ids: Collection[str]) -> bool:
        """Return whether all of these workers see the run's directory, by the newest reports."""
        return self.reaches and (self.saver.reaching or frozenset()).issuperset(worker_ids)

    def recipe(self, recipe: Recipe, num_steps: int) -> Recipe:
        """Return the recipe of a phase, which must be equal in the scripts of all workers."""
        return {**self._resumption.recipe(recipe), "steps": num_steps}

    def newest(self) -> str:
        """Return what the run can go on from, for an error."""
        path = self._directory.path
        found = complete(path / CHECKPOINTS) if path is not None and self._directory.look() else []
        if not found:
            return "the beginning: this worker sees no checkpoint (unisono.Checkpoints(every_steps=...) writes some)"
        return f'the newest checkpoint, {found[-1]} (resume="auto", or unisono run --resume {path})'

    def writes(self, team: Team) -> bool:
        """Return whether this member writes for all members: it is the first that sees the directory."""
        return self.saver.choose_publisher(team.worker_ids) == team.worker_ids[team.rank]

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep the numbers of a step, for the checkpoints until another step has others."""
        self._metrics |= metrics

    def note_after(self, num_steps: int, figures: Mapping[str, float]) -> None:
        """Keep figures of the model after so many steps of the run, for the checkpoint of that very moment."""
        at, known = self._figures
        self._figures = (num_steps, {**(known if at == num_steps else {}), **figures})

    # -- with every combine --------------------------------------------------------------------------

    def report(self) -> CheckpointReport:
        """Return the report that goes with the next combine; waits until the update may change the state."""
        self._directory.look_again()
        evaluated = self._beside is not None and self._beside.sees_end()
        return self.saver.report()._replace(lines=self.journal.num_written, evaluated=evaluated)

    def on_reports(self, reports: Sequence[CheckpointReport], generation: int, worker_ids: Sequence[str]) -> None:
        """Receive the reports of all members, by rank."""
        self.saver.on_reports(reports, generation, worker_ids)
        self._evaluated = any(report.evaluated for report in reports)
        self.journal.note_written(max(report.lines for report in reports))
        wrote, self._writes = self._writes, self.saver.choose_publisher(worker_ids) == self._worker_id
        if wrote and not self.saver.reaching and not self._directory.is_left_to_others:
            self._miss()
        elif self._misses and self.saver.reaching:
            self._misses = False
            tell(f"unisono: the run directory {self._directory.path} is there again")

    def wait_for_directory(self) -> None:
        """Wait a moment at the end of the run for another side of the run that writes into the directory, in case that
        side has just joined this one.
        """
        deadline = time.monotonic() + OTHERS_S
        while self._directory.is_left_to_others and time.monotonic() < deadline:
            time.sleep(OTHERS_S / 100)
        self._directory.look()

    def unwritten_lines(self) -> list[str]:
        """Return the lines of the journal that a newcomer may have to write."""
        return self.journal.unwritten()

    def _miss(self) -> None:
        if not self._misses:
            self._misses = True
            warnings.warn(
                f"no worker sees the run directory {self._directory.path} any more: it was removed or moved. Training "
                "continues without writing anything; when the directory is back, checkpoints and the last "
                f"{MOST_KEPT_LINES:,} lines of the journal will be written",
                stacklevel=2,
            )

    # -- between two steps ---------------------------------------------------------------------------

    def collect(self, rounds: Rounds) -> None:
        """Take the totals of evaluations beside the training, for which checkpoints and newcomers wait. Collective."""
        if self._beside is None:
            return
        follows = rounds.follows(EVALUATED)
        if follows is None:
            comes = rounds.changes() and not rounds.is_stop_planned()
            follows = self._beside.is_under_way and (self._evaluated or comes)
        if follows:
            self._evaluated = False
            self._beside.collect(rounds)

    def acts(self, rounds: Rounds, *, may_save: bool = True) -> bool:
        """Return whether the next `boundary` does something; the same on all members. Local."""
        self._leaves = self._leaving
        may_save = may_save and not self._is_held
        saves = self._is_asked(rounds) or (may_save and self.saver.begins(self._moment(rounds)))
        return self._leaves or rounds.changes() or saves

    def boundary(self, rounds: Rounds, *, may_save: bool = True) -> None:
        """Leave the run after SIGTERM, let the members change, and take a snapshot if one is due. Collective.

        Args:
            may_save: a snapshot may be taken here.

        Raises:
            SystemExit: after SIGTERM, with the exit code of the policy.
        """
        if rounds.is_stop_planned() or self._leaves or self._is_asked(rounds):
            self.save_together(rounds)  # so that nothing is lost, whatever ends a pause
            self.tell_saved()
        if self._leaves:
            assert self.policy is not None
            self.left_by = SystemExit(self.policy.exit_code_on_sigterm)
            raise self.left_by
        rounds.boundary()
        if may_save:
            moment = self._moment(rounds)
            snapshot = self.saver.boundary(moment, is_held=self._is_held)
            if snapshot is not None or LENDING in rounds.begun:
                self._lend(rounds, snapshot, moment.generation)

    @property
    def _is_held(self) -> bool:
        """Whether a checkpoint waits for evaluations beside the training; the same on all members."""
        return self._beside is not None and self._beside.is_under_way

    def end_loop(self, rounds: Rounds) -> None:
        """Have the whole state written, because no step follows this one at once. Collective."""
        if self._beside is not None:
            self._beside.settle(rounds)
        if self._is_asked(rounds):
            self.save_together(rounds)
        else:
            self._begin_last(rounds)

    def _is_asked(self, rounds: Rounds) -> bool:
        """Return whether the inspector asks for a checkpoint of this boundary; the same on all members. Local."""
        step = rounds.position.total
        return self.inspector is not None and step != self._inspected and self.inspector.saves_at(step)

    def save_together(self, rounds: Rounds) -> None:
        """Write the last checkpoint, and return when it is on the disk, even if its writer is lost. Collective.

        Its copies are waited for as well, for a limited time.
        """
        if self._beside is not None:
            self._beside.settle(rounds)
        if is_asked := self._is_asked(rounds):
            self._inspected = rounds.position.total
            self.saver.request()
        while self._begin_last(rounds) and not union(rounds, self._published):
            pass  # its writer was lost
        self.saver.confirm()
        is_copied = not self.saver.copies.urls
        while not is_copied:  # in rounds that are short: an exchange has a timeout
            said = together(rounds, self._wait_for_copies, COPIED if self._is_copied(rounds.team) else b"")
            is_copied = COPIED in said.values()
        if is_asked and self.inspector is not None:
            self.inspector.saved(self._inspected)

    def _begin_last(self, rounds: Rounds) -> bool:
        """Begin the last checkpoint, unless none is wanted: from then on one member writes it by itself. Collective.

        Returns:
            Whether one is being written; the same on all members.

        Raises:
            CheckpointError: it could not be written, and the policy asks to end the run then.
        """
        team, saver = rounds.team, self.saver
        while True:
            said = union(rounds, lambda: {_own_id(rounds): msgspec.msgpack.encode(saver.wish(team.generation))})
            wishes = {worker: msgspec.msgpack.decode(one, type=Wish) for worker, one in said.items()}
            with team.waiting():  # for a disk, which is nobody's fault
                if not saver.begin_last(self._moment(rounds), wishes):
                    return False
            generations = {one.generation for one in wishes.values()}
            generation = generations.pop() if len(generations) == 1 else None
            if not rounds.tracked.is_spread or self._lend(rounds, saver.snapshot, generation, kind=CHECKPOINT):
                saver.publish_last()
                return True

    def _lend(self, rounds: Rounds, snapshot: Snapshot | None, generation: int | None, *, kind: str = LENDING) -> bool:
        """Bring what no writer of a snapshot holds to one that writes it. Collective.

        Args:
            snapshot: None: this member was behind at a loss, and takes part in what the others have begun.
            generation: in which the snapshot was taken. If a member is lost, another snapshot will be taken.

        Returns:
            Whether the writer has got everything; the same on all members.
        """

        def trade() -> dict[str, bytes]:
            assert snapshot is not None
            file = _bring(rounds, snapshot)
            try:
                if file is not None:
                    write_facts(snapshot.lent_path, file.close())
            except OSError as error:
                self.saver.note_lent(error)
            return {"lent": b""} if snapshot.part is not None else {}

        return bool(union(rounds, trade=trade, generation=generation if snapshot is not None else None, kind=kind))

    def _published(self) -> dict[str, bytes]:
        """Wait for the disk; return something where this member has published the last checkpoint, or has failed to."""
        return {"published": b""} if self.saver.finish() else {}

    def _is_copied(self, team: Team) -> bool:
        """Return, on the member that writes, whether the newest checkpoint is copied, or given up.

        That member also copies what a member that was lost has not copied.
        """
        if (self.saver.choose_publisher(team.worker_ids) or team.worker_ids[0]) != team.worker_ids[team.rank]:
            return False
        self.saver.copy_newest()
        return not self.saver.copies.is_awaited

    def _wait_for_copies(self) -> None:
        self.saver.wait_for_copies(COPIES_ROUND_S)

    def _moment(self, rounds: Rounds) -> Moment:
        team = rounds.team
        at, figures = self._figures
        metrics = {**self._metrics, **figures} if at == rounds.position.total else self._metrics
        return Moment(rounds.position, team.generation, team.worker_ids, metrics)


def _may_write() -> bool:
    """Return whether this side of the run writes into the run's directory."""
    member = members.current()
    return member is None or member.may_write


def _bring(rounds: Rounds, snapshot: Snapshot) -> Stream | None:
    """Send tensors to a member that writes them, a few at a time, so that no worker has to hold them all. Collective.

    Returns:
        The file, on that member.

    Raises:
        PeerLost, DeadlineExceeded: a member was lost.
    """
    team = rounds.team
    rank = {worker: number for number, worker in enumerate(team.worker_ids)}
    own, file = _own_id(rounds), None
    for group in grouped(snapshot.loans, lambda loan: loan.tensor.nbytes, TOGETHER_BYTES):
        point("shard.in_lending")
        tensors = [_made(one.tensor) if one.target == own else one.tensor for one in group]
        team.exchange.deliver(
            [Parcel(rank[one.source], (rank[one.target],), tensor) for one, tensor in zip(group, tensors, strict=True)]
        )
        if group[0].target == own:
            file = snapshot.receive() if file is None else file
            for tensor in tensors:
                if tensor.nbytes:
                    file.write(memory_at(tensor.data_ptr(), tensor.nbytes, tensor))
    return file


def _made(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor as a file has it: row by row, however it lies on the member that holds it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _own_id(rounds: Rounds) -> str:
    return rounds.team.worker_ids[rounds.team.rank]
