"""What a worker finds out about its own troubles: which values are not finite, what held its memory.

Under ``unisono run`` it tells the head, which says the sentence and keeps the evidence. A script that runs alone does
both by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from unisono.cluster.worker.member import Member
from unisono.core.cursor import Cursor
from unisono.core.events import Problem
from unisono.core.messages import Ailing, Holds
from unisono.core.words import evidence_words, listed, position_words
from unisono.engine.loop.step import Iteration
from unisono.engine.rounds.finite import NotFinite
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import places
from unisono.record.problems import evidence as files
from unisono.record.problems.evidence import Witness, redacted, shown_environment
from unisono.record.problems.evidence_files import FOLDER, stamp, write
from unisono.record.problems.fit import FitSetting, advice, asked_bytes, table
from unisono.record.problems.kinds import Trouble, file_name, kind_of, text
from unisono.record.problems.limits import memory_limit, own_memory
from unisono.record.problems.witness import about_machine, about_process, own_stacks, versions
from unisono.record.rundir import read_facts
from unisono.script.memory_use import Among, MemoryAtStart, data_bytes, held_now, kinds
from unisono.system.process import tell
from unisono.system.stacks import in_one_line, trimmed_traceback

__all__ = ["OwnTroubles"]

NUM_NAMES: Final = 8
SCRIPT: Final = "the script"


class OwnTroubles:
    """The troubles of one worker, or of a script that runs alone.

    Args:
        directory: of the run; None: there is none.
        device: on which the script computes.
        member: None: the script runs alone.
        emit: gives an event to the script's sinks, where it runs alone.
    """

    def __init__(
        self,
        directory: Path | None,
        run_id: str,
        device: torch.device,
        member: Member | None,
        emit: Callable[[Problem], None],
    ) -> None:
        self._directory = directory
        self._run_id = run_id
        self._device = device
        self._member = member
        self._emit = emit
        self._beginning: MemoryAtStart | None = None
        self._has_told = False
        self._names: list[str] = []

    def begins(self, dataset: object) -> None:
        """Note the memory of this process before its first training loop, and that of its data."""
        if self._beginning is None:
            used, data = own_memory() if self._device.type == "cpu" else 0, 0
            with contextlib.suppress(Exception):  # attributes of a data set may do anything
                data = data_bytes(dataset, self._device)
            self._beginning = MemoryAtStart(used, data)

    # -- while training goes on ----------------------------------------------------------------------

    def not_finite(self, found: NotFinite) -> None:
        """Say that the gradient of a step is not finite."""
        detail = ""
        if found.parameters:
            names = [repr(name) for name in found.parameters[-NUM_NAMES:]]
            more = f" and {len(found.parameters) - len(names)} more" if len(found.parameters) > len(names) else ""
            detail = (
                f"gradients that are not finite there: those of {listed(names)}{more}, of {found.num_parameters} "
                "parameters; the last one is the nearest to the loss, so look at what comes after it"
            )
        samples = list(found.samples)
        if self._member is not None:
            self._member.send(Ailing(step=found.step, microbatch=found.microbatch, samples=samples, detail=detail))
            return
        trouble = Trouble.of_gradient(found.step, found.microbatch, samples, detail)
        self._keep(trouble, in_thread=True)

    def tell_memory(self, rounds: Rounds, cursor: Cursor) -> None:
        """Tell the head once what holds the memory: a process that is killed for it cannot. Cheap."""
        if self._member is None or self._has_told:
            return
        self._has_told = True
        if self._device.type != "cpu":
            return  # what the kernel kills a process for is the memory of the host
        held = kinds(rounds.tracked, rounds.slots, self._beginning or MemoryAtStart(), _among(rounds))
        self._member.send(Holds(kinds=held, batch_size=cursor.batch_size, microbatches=cursor.microbatches))

    # -- at the end ----------------------------------------------------------------------------------

    def explain(
        self, error: BaseException, rounds: Rounds, step: Iteration | None, cursor: Cursor | None, *, is_end: bool
    ) -> None:
        """Find out what can be known of an error that ends the script; alone, keep the evidence.

        Args:
            step: the one that the script got last.
            cursor: of the training loop that has begun last.
            is_end: the run ends with it.
        """
        kind = kind_of(error)
        detail = advised = ""
        try:
            if kind == "nan":
                detail = _about_parameters(rounds)
            elif kind == "out-of-memory":
                detail, advised = self._about_memory(error, rounds, cursor)
        except Exception as failure:  # e.g. no memory is left even for this
            detail = f"(nothing more could be found out: {in_one_line(failure)})"
        if self._member is not None:
            self._member.failures.explained(error, kind, detail, advised)
        elif is_end:
            at = step.number if step is not None else -1
            index = step.microbatch if step is not None else None
            samples = step.sample_indices(index) if step is not None and index is not None else []
            trouble = Trouble(
                kind=kind,
                worker_id=SCRIPT,
                step=at,
                where=position_words(at, -1 if index is None else index, samples),
                error=in_one_line(error),
                traceback=trimmed_traceback(error),
                detail=detail,
                advice=advised,
                ends_run=True,
            )
            self._keep(trouble, in_thread=False)

    # -- inside --------------------------------------------------------------------------------------

    def _about_memory(self, error: BaseException, rounds: Rounds, cursor: Cursor | None) -> tuple[str, str]:
        own = self._member.info.host if self._member is not None else ""
        notice = self._member.latest() if self._member is not None else None
        here = [each for each in notice.members if each.host == own] if notice is not None else []
        num_workers = max(1, len(here))
        setting = FitSetting(
            batch_size=cursor.batch_size if cursor is not None else 0,
            microbatches=cursor.microbatches if cursor is not None else 0,
            num_workers=num_workers,
        )
        held = held_now(
            rounds.tracked,
            rounds.slots,
            self._device,
            self._beginning or MemoryAtStart(),
            _among(rounds),
            asked=asked_bytes(str(error)),
            num_workers=num_workers,
        )
        return table(held), advice(held, setting)

    def _keep(self, trouble: Trouble, *, in_thread: bool) -> None:
        directory = self._directory
        name = ""
        if directory is not None:
            name = file_name(trouble.kind, trouble.step, stamp(time.time()), self._names)
            self._names.append(name)
        said = redacted(text(trouble))
        path = f"{FOLDER}/{name}" if name else ""
        if not trouble.ends_run:  # else the traceback follows
            tell(f"unisono: {said}")
        if name:
            tell(f"unisono: {evidence_words(trouble.kind)}: {path} in {directory}")
        self._emit(
            Problem(
                time=time.time(),
                problem=trouble.kind,
                text=said,
                step=trouble.step,
                evidence=path,
                ends_run=trouble.ends_run,
            )
        )
        if directory is None:
            return
        content = self._content(trouble)

        def work() -> None:
            try:
                write(directory, self._run_id, name, content)
            except OSError as error:
                tell(f"unisono: {path} could not be written: {error.strerror}")

        if in_thread:
            threading.Thread(target=work, name="unisono-evidence", daemon=True).start()
        else:
            work()

    def _content(self, trouble: Trouble) -> str:
        limit = memory_limit()
        machine = about_machine([(SCRIPT, os.getpid())], limit.words if limit is not None else "")
        facts = {
            "run": self._run_id,
            "directory": str(self._directory),
            "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        return files.shown(
            files.Evidence(
                trouble=trouble,
                facts=facts,
                workers=[Witness(name=SCRIPT, text=f"{about_process()}\n{own_stacks()}")],
                machines=[Witness(name="this machine", text=machine)],
                versions=versions(),
                environment=shown_environment(os.environ),
                settings=json.dumps({"arguments": sys.argv}),
                recipe=json.dumps(read_facts(self._directory)) if self._directory is not None else "",
            )
        )


def _about_parameters(rounds: Rounds) -> str:
    """Return which parameters and buffers are not finite already."""
    named: list[tuple[str, torch.Tensor]] = [*rounds.tracked.parameters()]
    for name, module in rounds.tracked.modules.items():
        named += [(f"{name}.{key}", one) for key, one in module.named_buffers()]
    wrong = [name for name, one in named if one.is_floating_point() and not bool(torch.isfinite(one).all())]
    if not wrong:
        return (
            "all parameters and buffers are finite: these samples, or what the model does with them, made the loss so"
        )
    shown = listed([repr(name) for name in wrong[:NUM_NAMES]])
    more = f" and {len(wrong) - NUM_NAMES} more" if len(wrong) > NUM_NAMES else ""
    return (
        f"parameters or buffers that were not finite before this micro-batch: {shown}{more}; so an earlier update made "
        "them so, by a gradient that was not finite or by too large a step"
    )


def _among(rounds: Rounds) -> Among:
    team = rounds.team
    if not team.worker_ids:
        return Among()
    return Among(places(team), team.worker_ids[team.rank])
