"""Choice and construction of the exchange of a generation, from its notice."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from unisono.cluster.trust.secret import key_for
from unisono.cluster.worker.member import Member
from unisono.cluster.worker.store import HeadStore
from unisono.core.coding_rules import Mode
from unisono.core.errors import UsageError
from unisono.core.groups import check_parts, groups_of, lanes_of
from unisono.core.messages import Notice
from unisono.engine.exchange import Exchange, host, network, two_level
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.context import Builder, Context
from unisono.engine.exchange.lanes import LaneMemory, Lanes
from unisono.engine.exchange.wire import Wire
from unisono.engine.rounds.team import Part

__all__ = ["AUTO", "EXCHANGES", "build_exchange", "build_lanes", "build_part", "choose_kind", "hosts_of", "open_wire"]

AUTO = "auto"
"""The name of the fastest exchange for the members at hand."""
EXCHANGES: dict[str, Builder] = {"shared": host.build, "gloo": network.build, "two-level": two_level.build}
"""Every exchange by its name, which ``--exchange`` accepts. A new exchange is one more row here."""


def hosts_of(notice: Notice) -> list[range]:
    """Return the ranks of each host's members. Members of one host stand together in a notice."""
    hosts, start = [], 0
    for _, group in itertools.groupby(notice.members, key=lambda info: info.host):
        size = len(list(group))
        hosts.append(range(start, start + size))
        start += size
    return hosts


def choose_kind(notice: Notice, wanted: str, device: torch.device) -> str:
    """Return the name of the exchange for these members: the wanted one, or the fastest.

    Raises:
        UsageError: there is no exchange of that name, or it cannot connect these members.
    """
    if wanted != AUTO and wanted not in EXCHANGES:
        raise UsageError(f"the exchange {wanted!r} is unknown; choose one of {', '.join((AUTO, *EXCHANGES))}")
    hosts = hosts_of(notice)
    # Where some were found to have an accelerator, and others none, a wire sees what they compute on.
    is_alike = len({info.device.partition(":")[0] for info in notice.members}) == 1
    can_share = device.type == "cpu" and is_alike and all(info.page for info in notice.members)
    if wanted in ("shared", "two-level") and not can_share:
        raise UsageError(f"--exchange {wanted} needs workers on CPUs; these are on {device.type}: use auto or gloo")
    if wanted == "shared" and len(hosts) > 1:
        raise UsageError(
            f"--exchange shared needs all workers on one host, these are on {len(hosts)}: use auto, gloo or two-level"
        )
    if wanted != AUTO:
        return wanted
    if not can_share or all(len(ranks) == 1 for ranks in hosts):
        return "shared" if can_share and len(hosts) == 1 else "gloo"
    return "shared" if len(hosts) == 1 else "two-level"


def build_exchange(
    notice: Notice,
    rank: int,
    *,
    member: Member,
    device: torch.device,
    wanted: str,
    timeout_s: float,
    checks: bool = False,
) -> Exchange:
    """Begin to connect this worker with the others of a generation; does not wait for them.

    Args:
        checks: compare what arrives over the network with what was sent.

    Raises:
        UsageError: these members cannot be connected by the wanted exchange.
    """
    if len(notice.members) == 1 and device.type != "cpu":
        return Alone(device)
    context = dataclasses.replace(_context(notice, rank, member, device, timeout_s), checks=checks)
    return EXCHANGES[choose_kind(notice, wanted, device)](context)


def build_lanes(
    notice: Notice,
    rank: int,
    *,
    member: Member,
    timeout_s: float,
    memory: LaneMemory,
    build: Callable[[Notice, int], Exchange],
    build_part: Callable[[Notice, Part, int], Exchange],
) -> Exchange:
    """Begin to connect this worker with the others of a generation, where each carries a part of the model.

    Args:
        build: makes the exchange of all members; build_part: that of some.

    Raises:
        StateLost: no member is left that carries some part. UsageError: as `build_exchange`.
    """
    num_parts = member.spec.run.settings.parts
    parts, ids = [info.part for info in notice.members], [info.worker_id for info in notice.members]
    check_parts(parts, num_parts)
    lanes = lanes_of(parts, num_parts)
    own, group = parts[rank], next((one for one in groups_of(parts, ids, num_parts) if rank in one), ())

    def connect(pages: Sequence[str]) -> Exchange:
        return build_part(notice, Part(f"lane-{own}", notice.generation, lanes[own], memory.page, tuple(pages)), rank)

    context, link = _context(notice, rank, member, torch.device("cpu"), timeout_s), None
    if group:
        can_share = member.spec.run.settings.exchange != "gloo" and all(notice.members[each].page for each in group)
        link = context.open_pairs(f"group-{group[0]}", group, shares_memory=can_share)
    return Lanes(build(notice, rank), lanes, connect, memory, link)


def build_part(
    notice: Notice, part: Part, rank: int, *, member: Member, device: torch.device, wanted: str, timeout_s: float
) -> Exchange:
    """Begin to connect this worker with some others of a generation, for something that these do by themselves.

    The losses of others do not end the waits of this exchange: whoever made it interrupts it.

    Args:
        rank: of this worker in the generation.
    """
    infos = [
        msgspec.structs.replace(notice.members[each], page=page)
        for each, page in zip(part.ranks, part.pages, strict=True)
    ]
    inner = msgspec.structs.replace(notice, members=infos)
    own = part.ranks.index(rank)
    context = dataclasses.replace(
        _context(inner, own, member, device, timeout_s),
        generation=part.number,
        page=part.page,
        store=lambda name: HeadStore(
            member, f"generation-{notice.generation}/{part.name}/{name}/", timeout_s=timeout_s
        ),
    )
    return EXCHANGES[choose_kind(inner, wanted, device)](context)


def open_wire(notice: Notice, rank: int, *, member: Member, device: torch.device, timeout_s: float) -> Wire:
    """Begin to connect this worker with the others of a generation for the script's own collectives; does not wait."""
    return _context(notice, rank, member, device, timeout_s).open_wire("script", range(len(notice.members)))


def _context(notice: Notice, rank: int, member: Member, device: torch.device, timeout_s: float) -> Context:
    return Context(
        coding=Mode[member.spec.run.settings.coding.upper()],
        generation=notice.generation,
        rank=rank,
        hosts=tuple(hosts_of(notice)),
        device=device,
        timeout_s=timeout_s,
        store=partial(_store, member, notice.generation, timeout_s),
        names=[info.worker_id for info in notice.members],
        address=notice.members[rank].address,
        secret=key_for(member.spec.token, "membership of a group"),
        page=member.page,
        pages=[info.page for info in notice.members],
    )


def _store(member: Member, generation: int, timeout_s: float, name: str) -> HeadStore:
    return HeadStore(member, f"generation-{generation}/{name}/", generation=generation, timeout_s=timeout_s)
