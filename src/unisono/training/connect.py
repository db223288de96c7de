"""From a generation's notice to its exchange: which kind, and how its members are connected."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import torch

from unisono.errors import PeerLost, UsageError
from unisono.exchange import Exchange
from unisono.exchange.alone import Alone
from unisono.exchange.host import Host
from unisono.exchange.network import Network
from unisono.exchange.shared import SharedMemory
from unisono.exchange.two_level import TwoLevel
from unisono.exchange.wire import Wire
from unisono.member import Member
from unisono.messages import Notice
from unisono.store import HeadStore

__all__ = ["KINDS", "build_exchange", "choose_kind", "hosts_of"]

KINDS = ("auto", "shared", "gloo", "two-level")


def hosts_of(notice: Notice) -> list[range]:
    """The ranks of each host's members. Members of one host stand together in a notice."""
    hosts, start = [], 0
    for _, group in itertools.groupby(notice.members, key=lambda info: info.host):
        size = len(list(group))
        hosts.append(range(start, start + size))
        start += size
    return hosts


def choose_kind(notice: Notice, wanted: str, device: torch.device) -> str:
    """The kind of exchange for these members: what was asked for, or what is fastest."""
    if wanted not in KINDS:
        raise UsageError(f"the exchange {wanted!r} is unknown; choose one of {', '.join(KINDS)}")
    hosts = hosts_of(notice)
    can_share = device.type == "cpu" and all(info.board for info in notice.members)
    places = collections.Counter((info.host, info.device) for info in notice.members)
    (host, shared), number = places.most_common(1)[0]
    if device.type == "cuda" and number > 1:
        raise UsageError(
            f"{number} workers of {host} compute on {shared}, and NCCL connects one worker a GPU; start as many "
            'workers as there are GPUs (--workers auto), or train on CPUs: CUDA_VISIBLE_DEVICES=""'
        )
    if wanted in ("shared", "two-level") and not can_share:
        raise UsageError(f"--exchange {wanted} needs workers on CPUs; these are on {device.type}: use auto or gloo")
    if wanted == "shared" and len(hosts) > 1:
        raise UsageError(
            f"--exchange shared needs all workers on one host, these are on {len(hosts)}: use auto, gloo or two-level"
        )
    if wanted != "auto":
        return wanted
    if not can_share or all(len(ranks) == 1 for ranks in hosts):
        return "shared" if can_share and len(hosts) == 1 else "gloo"
    return "shared" if len(hosts) == 1 else "two-level"


def build_exchange(
    notice: Notice, rank: int, *, member: Member, device: torch.device, wanted: str, timeout_s: float
) -> Exchange:
    """Begin to connect this worker with the others of a generation; does not wait for them.

    Raises:
        PeerLost: a member is gone already.
    """
    if len(notice.members) == 1 and device.type != "cpu":
        return Alone(device)
    kind = choose_kind(notice, wanted, device)
    hosts = hosts_of(notice)
    me = notice.members[rank]
    names = [info.worker_id for info in notice.members]

    def wire(name: str, place: int, names: Sequence[str]) -> Wire:
        prefix = f"generation-{notice.generation}/{name}/"
        store = HeadStore(member, prefix, generation=notice.generation, timeout_s=timeout_s)
        return Wire(
            store,
            place,
            len(names),
            device=device,
            backend="nccl" if device.type == "cuda" else "gloo",
            address=me.address,
            timeout_s=timeout_s,
            names=names,
        )

    if kind == "gloo":
        return Network(wire("all", rank, names))
    place = next(place for place, ranks in enumerate(hosts) if rank in ranks)
    ranks = hosts[place]
    boards = [notice.members[peer].board for peer in ranks]
    assert member.board is not None
    try:
        if kind == "shared":
            return SharedMemory(
                member.board, boards, rank, generation=notice.generation, timeout_s=timeout_s, names=names
            )
        local = rank - ranks.start
        num_lanes = min(len(each) for each in hosts)
        host = Host(
            member.board,
            boards,
            local,
            generation=notice.generation,
            timeout_s=timeout_s,
            names=names[ranks.start : ranks.stop],
        )
        carriers = [names[each[local]] for each in hosts] if local < num_lanes else []
        lane = wire(f"lane-{local}", place, carriers) if carriers else None
        return TwoLevel(host, lane, num_lanes=num_lanes, hosts=hosts, rank=rank)
    except OSError as error:
        raise PeerLost(f"the shared memory of a member is gone: {error}") from error
