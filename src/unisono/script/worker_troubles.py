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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from unisono.cluster.worker.member import Member
from unisono.core.cursor import Cursor
from unisono.core.events import Problem
from unisono.core.messages import Ailing, Holds
from unisono.core.words import evidence_words, listed, position_words
from unisono.engine.exchange.slots import Slots
from unisono.engine.loop.step import Iteration
from unisono.engine.rounds.finite import NotFinite
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import Team, places
from unisono.engine.state.tracked import Tracked
from unisono.engine.state.walk import tensors_of_state
from unisono.record.problems import evidence as files
from unisono.record.problems.evidence import Witness, redacted, shown_environment
from unisono.record.problems.evidence_files import FOLDER, stamp, write
from unisono.record.problems.fit import FitSetting, Held, advice, asked_bytes, table
from unisono.record.problems.kinds import Trouble, file_name, kind_of, text
from unisono.record.problems.limits import memory_limit, own_address_space, own_memory, own_peak
from unisono.record.problems.witness import about_machine, about_process, own_stacks, versions
from unisono.record.rundir import read_facts
from unisono.system import accelerators
from unisono.system.controlgroups import memory_of_groups
from unisono.system.process import tell
from unisono.system.stacks import in_one_line, trimmed_traceback

__all__ = ["MemoryAtStart", "OwnTroubles", "data_bytes", "held_now", "kinds"]

NUM_NAMES: Final = 8
SCRIPT: Final = "the script"
SOME: Final = 1_000
"""So many items of a list are looked at; the others are taken to be as large."""
NUM_BIGGEST: Final = 8
LEAST_BYTES: Final = 100_000
"""A smaller tensor is not among the largest."""
PROGRAM: Final = "the program itself"


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
            if self._member is not None and self._device.type == "cpu" and (limit := _group_limit()):
                self._member.send(Holds(limit_bytes=limit))

    # -- while training goes on ----------------------------------------------------------------------

    def not_finite(self, found: NotFinite) -> None:
        """Say that the gradient of a step is not finite."""
        detail = ""
        if found.parameters:
            names = [repr(name) for name in found.parameters[-NUM_NAMES:]]
            more = f" and {len(found.parameters) - len(names)} more" if len(found.parameters) > len(names) else ""
            detail = (
                f"gradients that are not finite there: those of {listed(names)}{more}, of {found.num_parameters} "
                "parameters; the last one is nearest to the loss, so look at what comes after it"
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
        held = kinds(rounds.tracked, rounds.slots, self._beginning or MemoryAtStart(), rounds.team)
        size, number = cursor.batch_size, cursor.microbatches
        self._member.send(Holds(kinds=held, batch_size=size, microbatches=number, limit_bytes=_group_limit()))

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
            detail = f"(no more could be found out: {in_one_line(failure)})"
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
            rounds.team,
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
        return "all parameters and buffers are finite: these samples, or what the model does with them, caused the loss"
    shown = listed([repr(name) for name in wrong[:NUM_NAMES]])
    more = f" and {len(wrong) - NUM_NAMES} more" if len(wrong) > NUM_NAMES else ""
    return (
        f"parameters or buffers that were not finite before this micro-batch: {shown}{more}; so an earlier update "
        "caused them, with a gradient that was not finite or with too large a step"
    )


@dataclass(frozen=True)
class MemoryAtStart:
    """The memory of a process at the beginning of its training."""

    used: int = 0
    """All of it, with parameters and data; 0: what is on an accelerator counts."""
    data: int = 0
    """Of the data set."""


def kinds(tracked: Tracked, slots: Slots, beginning: MemoryAtStart, team: Team) -> dict[str, int]:
    """Return the bytes of what does not depend on the size of a micro-batch, by name.

    Args:
        team: this process among the members.
    """
    parameters = tracked.num_bytes()
    buffers = sum(_bytes(one) for module in tracked.modules.values() for one in module.buffers())
    known = {
        PROGRAM: max(0, beginning.used - parameters - buffers - beginning.data),
        "data set": beginning.data,
        "parameters": parameters,
        "buffers": buffers,
        "gradients": _slot_bytes(slots),
        "optimizer state": sum(number for _, number in _optimizer_tensors(tracked)),
    }
    if to_come := _state_to_come(tracked, team):
        known["optimizer state, from the first update on"] = to_come
    return {name: number for name, number in known.items() if number}


def held_now(
    tracked: Tracked,
    slots: Slots,
    device: torch.device,
    beginning: MemoryAtStart,
    team: Team,
    *,
    asked: int,
    num_workers: int,
) -> Held:
    """Return what holds the memory of this process now, that of its accelerator if it computes there.

    Args:
        asked: bytes that it could not get.
        num_workers: on this machine.
    """
    if device.type != "cpu":
        used, limit, of, shared = *accelerators.memory(device), str(device), 0
    else:
        used, limit, of, shared = _cpu(num_workers)
    named = [(f"{name} {tuple(one.shape)} {_dtype(one)}", _bytes(one)) for name, one in tracked.parameters()]
    named += list(_optimizer_tensors(tracked))
    return Held(
        kinds=kinds(tracked, slots, beginning, team),
        used=used,
        asked=asked,
        limit=limit,
        of=of,
        shared=shared,
        biggest=sorted((item for item in named if item[1] >= LEAST_BYTES), key=lambda item: -item[1])[:NUM_BIGGEST],
    )


def _group_limit() -> int:
    """Return the bytes that the control group of this process may have; 0: there is no limit."""
    group = memory_of_groups()
    return group.limit if group is not None else 0


def data_bytes(dataset: object, device: torch.device) -> int:
    """Return the memory of the tensors and arrays that a data set holds itself: in its attributes, or as its items."""
    if isinstance(dataset, Tensor):
        return _bytes_on(dataset, device)
    if isinstance(dataset, (list, tuple)):
        some = dataset[:SOME]
        return sum(_bytes_on(one, device) for one in some) * len(dataset) // max(1, len(some))
    held = getattr(dataset, "__dict__", {}).values()
    flat = [one for value in held for one in (value if isinstance(value, (list, tuple)) else (value,))]
    return sum(_bytes_on(one, device) for one in flat[: 10 * SOME])


def _bytes_on(value: object, device: torch.device) -> int:
    if isinstance(value, Tensor):
        return _bytes(value) if value.device.type == device.type else 0
    if device.type != "cpu" or type(value).__name__ == "memmap":  # that is on its disk
        return 0
    found = getattr(value, "nbytes", 0)
    return found if isinstance(found, int) else 0


def _cpu(num_workers: int) -> tuple[int, int, str, int]:
    """Return what is used, the limit, of what, and what all workers together could have."""
    used = own_peak() or own_memory()
    space, limit = own_address_space(), memory_limit()
    if space is not None and (limit is None or space.limit - space.used < limit.limit - limit.used):
        # Address space that is mapped and not used counts as well: what is left of it is what this process could have.
        return used, used + max(0, space.limit - space.used), space.of, 0
    if limit is None:
        return used, 0, "memory", 0
    left = max(0, limit.limit - limit.used)
    return used, used + left, limit.of, num_workers * used + left


def _slot_bytes(slots: Slots) -> int:
    in_use = {id(slot.memory): slot for slot in (*slots.nodes.values(), *slots.results)}
    sizes = [slot.memory.numel() for slot in in_use.values()]
    if slots.layout is not None and not slots.nodes:
        sizes.append(slots.layout.slot_bytes)  # of the micro-batch that is being computed
    return sum(sizes)


def _optimizer_tensors(tracked: Tracked) -> Iterator[tuple[str, int]]:
    for name, optimizer in tracked.optimizers.items():
        for key, value in tensors_of_state(optimizer):
            yield f"{name}: {key} {tuple(value.shape)} {_dtype(value)}", _bytes(value)


def _state_to_come(tracked: Tracked, team: Team) -> int:
    """Return what optimizers will add at their first update, as far as that is known by their kind."""
    found = 0
    for name, optimizer in tracked.optimizers.items():
        sharded = tracked.sharded.get(name)
        if any(optimizer.state.values()) or (sharded is not None and any(sharded.holders)):
            continue
        owners = sharded.plan(places(team)) if sharded is not None and team.worker_ids else {}
        index = 0
        for group in optimizer.param_groups:
            copies = _copies(type(optimizer).__name__, group)
            for parameter in group["params"]:
                if parameter.requires_grad and (not owners or team.worker_ids[team.rank] in owners[index]):
                    found += copies * _bytes(parameter)
                index += 1
    return found


def _copies(kind: str, group: dict[str, Any]) -> int:
    if "Adam" in kind:
        return 3 if group.get("amsgrad") else 2
    return int(bool(group.get("momentum")))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
