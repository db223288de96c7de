"""A small model checker: two sides of a run that find each other again, in all orders of what can happen.

A state of the model is a value: the machines with what their agents and workers know, their heads, the connections with
the messages on their way, and the cable between the machines. `moves` returns all that can happen next: a message
arrives, a connection breaks, the cable is cut or put back, a head asks another one or waits no longer for its answer,
an agent looks for a head or starts one, a step is done. Time has no length: whatever may happen some day may happen
now, so a head may wait in vain, and an agent may start a head, at any moment. The decisions are those of
`unisono.core.sides` and `unisono.core.following`; the model has none of its own.

`walk` visits every state that so many events can lead to, and from each of them lets the cable be and whatever is due
happen (`settle`): then one head has to be left, with all machines and with the run's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
import pytest

from tests.parts import ALL
from unisono.core.following import Absence, Followed, StaleHead
from unisono.core.messages import AgentHello, Foreign, HeadSnapshot, Moved, Proposal, Verdict, Welcome
from unisono.core.sides import Allegiance, HelloAnswer, Rank, Standpoint, admission, merged, verdict

replace = msgspec.structs.replace
AWAY: Final = Absence(since=-1e9)
EARLIER: Final = "h0.0"
"""The branch of the run's history before the cut."""


class Known(msgspec.Struct, frozen=True):
    """What the model needs of a head's state; heirs hold it (`HeadSnapshot.state`)."""

    branches: tuple[str, ...]
    step: int
    agents: tuple[int, ...]
    lost: tuple[int, ...]
    holding: tuple[int, ...]
    """Machines whose workers hold the state, as far as the head knows."""


class Head(msgspec.Struct, frozen=True):
    name: str
    term: int
    seat: int
    known: Known
    here: tuple[int, ...] = ()
    """Machines whose workers are connected."""
    asks: int = -1
    is_asking: int = 0
    """Number of its open question; 0: none."""
    gives_way_to: str = ""
    told: tuple[int, ...] = ()
    """Agents that it has sent to the other head."""


class Line(msgspec.Struct, frozen=True):
    """A connection of an agent to a head."""

    there: int
    up: tuple[AgentHello, ...] = ()
    down: tuple[Welcome | Foreign | Moved | HeadSnapshot, ...] = ()
    is_closed: bool = False
    """By the head; what is on its way still arrives."""


class Machine(msgspec.Struct, frozen=True):
    side: Allegiance
    line: Line | None = None
    is_welcome: bool = False
    follows: int = -1
    """The machine of the head that its workers talk to; -1: to none."""
    work: int = -1
    """The last step that its workers have done; -1: they do not hold the run's state."""
    heads: tuple[int, ...] = ()
    """Where it knows that a head may be."""
    avoids: int = -1
    """A head that it has not joined, because its own workers have come further."""


class Question(msgspec.Struct, frozen=True):
    """A head's question on its way, or its answer."""

    number: int
    sender: int
    receiver: int
    what: Proposal | Verdict


class World(msgspec.Struct, frozen=True):
    machines: tuple[Machine, ...]
    heads: tuple[Head | None, ...]
    """By machine."""
    questions: tuple[Question, ...] = ()
    cut: tuple[int, ...] = ()
    """Machines that are cut off from the others."""
    left: Mapping[str, int] = {}
    """How often the cable may still be cut, and so on."""
    count: int = 0
    """Of heads and questions."""


def reaches(world: World, a: int, b: int) -> bool:
    return (a in world.cut) == (b in world.cut)


def put(world: World, number: int, **changes: object) -> World:
    machines = list(world.machines)
    machines[number] = replace(machines[number], **changes)
    return replace(world, machines=tuple(machines))


def put_head(world: World, number: int, **changes: object) -> World:
    heads, head = list(world.heads), world.heads[number]
    assert head is not None
    heads[number] = replace(head, **changes)
    return replace(world, heads=tuple(heads))


def spent(world: World, what: str) -> World:
    return replace(world, left={**world.left, what: world.left[what] - 1})


# -- heads -------------------------------------------------------------------------------------------


def standpoint(head: Head) -> Standpoint:
    """As `unisono.cluster.head.meeting.Meeting` makes it."""
    is_waiting = bool(head.known.holding) and not head.here
    return Standpoint(
        Rank.of(head.known.step if head.here else -1, head.term, f"agent{head.seat}"),
        is_asking=bool(head.is_asking),
        is_waiting=is_waiting,
        gives_way_to=head.gives_way_to,
    )


def snapshot(head: Head) -> HeadSnapshot:
    heirs = [head.seat, *(agent for agent in head.known.agents if agent != head.seat)]
    return HeadSnapshot(
        term=head.term,
        number=0,
        state=msgspec.json.encode(head.known),
        successor=f"agent{head.seat}",
        heirs=[f"agent{heir}" for heir in heirs],
        holders=sorted(f"agent{holder}" for holder in head.known.holding),
    )


def tell(world: World, number: int, message: Welcome | Foreign | Moved | HeadSnapshot, to: int) -> World:
    line = world.machines[to].line
    if line is None or line.there != number or line.is_closed:
        return world
    return put(world, to, line=replace(line, down=(*line.down, message)))


def remembered(world: World, number: int, known: Known) -> World:
    """A head's state changes, and its heirs hear of it."""
    world = put_head(world, number, known=known)
    head = world.heads[number]
    assert head is not None
    for agent in known.agents:
        world = tell(world, number, snapshot(head), agent)
    return world


def hello_arrives(world: World, number: int) -> World:
    """The head answers an agent's hello."""
    line = world.machines[number].line
    assert line is not None
    head = world.heads[line.there]
    assert head is not None
    hello = line.up[0]
    world = put(world, number, line=replace(line, up=line.up[1:]))
    answer = admission(standpoint(head), hello, is_own=hello.branch in ("", *head.known.branches))
    if answer is HelloAnswer.WELCOME:
        known = head.known
        if hello.fresh:
            known = without(head, number)
            world = put_head(world, line.there, here=tuple(here for here in head.here if here != number))
        known = replace(
            known,
            agents=tuple(sorted({*known.agents, number})),
            lost=tuple(agent for agent in known.lost if agent != number),
        )
        welcome = Welcome(
            run_id="x", heartbeat_s=1.0, term=head.term, branch=known.branches[-1], agent_id=f"agent{number}"
        )
        return remembered(tell(world, line.there, welcome, number), line.there, known)
    if answer is HelloAnswer.MOVED:
        world = put_head(world, line.there, told=tuple(sorted({*head.told, number})))
        return hang_up(tell(world, line.there, Moved(url=head.gives_way_to), number), number)
    assert answer is HelloAnswer.FOREIGN
    return hang_up(tell(world, line.there, Foreign(step=standpoint(head).rank.step), number), number)


def hang_up(world: World, number: int) -> World:
    line = world.machines[number].line
    assert line is not None
    return put(world, number, line=replace(line, is_closed=True))


def without(head: Head, number: int) -> Known:
    """A head goes on without a machine, which may go on by itself: that begins a branch."""
    known = head.known
    branches = known.branches
    if number in known.agents:
        branches = (*branches, f"{head.name}.{len(branches)}")
    return replace(
        known,
        branches=branches,
        agents=tuple(agent for agent in known.agents if agent != number),
        lost=tuple(sorted({*known.lost, number})),
        holding=tuple(holder for holder in known.holding if holder != number),
    )


def loses(world: World, at: int, number: int) -> World:
    """The head finds that the connections of a machine have broken."""
    head = world.heads[at]
    assert head is not None
    world = put_head(world, at, here=tuple(here for here in head.here if here != number))
    line = world.machines[number].line
    if line is not None and line.there == at:
        world = put(world, number, line=replace(line, up=(), is_closed=True))
    return remembered(world, at, without(head, number))


def moves_away(world: World, at: int) -> World:
    """What a head does when it has begun to give way (`Meeting._move_if_giving_way`)."""
    head = world.heads[at]
    assert head is not None
    if not head.gives_way_to or head.told:
        return world
    for agent in head.known.agents:
        line = world.machines[agent].line
        if line is not None and line.there == at and world.machines[agent].is_welcome and not line.is_closed:
            world = hang_up(tell(world, at, Moved(url=head.gives_way_to), agent), agent)
            head = world.heads[at]
            assert head is not None
            world = put_head(world, at, told=(*head.told, agent))
    return world


def ends(world: World, at: int) -> World:
    """A head that has given way ends. Who was on its way to it finds nobody."""
    heads = list(world.heads)
    heads[at] = None
    world = replace(world, heads=tuple(heads))
    for number, machine in enumerate(world.machines):
        if machine.line is not None and machine.line.there == at:
            world = put(world, number, line=replace(machine.line, up=(), is_closed=True))
    side = world.machines[at].side
    if side.has_seat:
        world = put(world, at, side=side.sent(""))
    return world


# -- agents ------------------------------------------------------------------------------------------


def looks(world: World, number: int, there: int) -> World:
    """An agent reaches a head: it lets its state go if it joins that side, and says hello."""
    machine = world.machines[number]
    side = machine.side
    if side.joins == str(there):
        side = side.joined()
        machine = replace(machine, work=-1, follows=-1, side=side)
        if (own := world.heads[number]) is not None and own.gives_way_to:
            world = ends(world, number)  # `HeadProcess.end`
    hello = AgentHello(
        host="x",
        pid=number,
        num_workers=1,
        agent_id=f"agent{number}",
        term=side.followed.term,
        branch=side.branch,
        fresh=side.is_fresh,
    )
    return put(world, number, side=side, work=machine.work, follows=machine.follows, line=Line(there, up=(hello,)))


def hears(world: World, number: int) -> World:
    """An agent takes the next message of its head."""
    machine = world.machines[number]
    line, side = machine.line, machine.side
    assert line is not None
    message = line.down[0]
    machine = replace(machine, line=replace(line, down=line.down[1:]))
    match message:
        case Welcome():
            try:
                side = side.welcomed(message)
            except StaleHead:
                return gone(world, number)
            known = tuple(dict.fromkeys((line.there, *machine.heads)))
            machine = replace(machine, side=side, is_welcome=True, follows=line.there, heads=known)
        case HeadSnapshot():
            followed, _ = side.followed.keep(message)
            state = msgspec.json.decode(message.state, type=Known)
            known = tuple(dict.fromkeys((*machine.heads, *state.agents)))
            machine = replace(machine, side=replace(side, followed=followed, branch=state.branches[-1]), heads=known)
        case Foreign():
            side = side.offered(
                str(line.there), message, f"agent{number}", has_workers=machine.work >= 0, last_step=machine.work
            )
            machine = replace(machine, side=side, avoids=-1 if side.joins == str(line.there) else line.there)
        case Moved():
            machine = replace(machine, side=side.sent(message.url))
    machines = list(world.machines)
    machines[number] = machine
    world = replace(world, machines=tuple(machines))
    return gone(world, number) if isinstance(message, Foreign | Moved) else world


def gone(world: World, number: int) -> World:
    """The connection of an agent has ended, on its end."""
    return put(world, number, line=None, is_welcome=False, follows=-1)


def starts(world: World, number: int) -> World:
    """An agent starts the next head."""
    machine = world.machines[number]
    newest = machine.side.followed.snapshot
    assert newest is not None
    known = msgspec.json.decode(newest.state, type=Known)
    before = int(newest.successor.removeprefix("agent"))
    side = machine.side.seated()
    head = Head(f"h{world.count + 1}", side.followed.term, number, known)
    branches = tuple(dict.fromkeys((*known.branches, machine.side.branch, f"{head.name}.0")))
    head = replace(head, known=replace(known, branches=branches))
    head = replace(head, known=without(head, before) if before != number else head.known)
    heads = list(world.heads)
    heads[number] = head
    return put(replace(world, heads=tuple(heads), count=world.count + 1), number, side=side, avoids=-1)


def may_start(world: World, number: int) -> bool:
    machine = world.machines[number]
    return not machine.side.has_seat and machine.side.followed.may_start(
        f"agent{number}", AWAY, "go-on", away_s=1.0, has_majority=False, has_workers=machine.work >= 0, now=0.0
    )


# -- what can happen ---------------------------------------------------------------------------------


def moves(world: World) -> Iterator[tuple[str, World]]:
    """Return all that can happen next."""
    yield from cable_moves(world)
    for number, machine in enumerate(world.machines):
        yield from agent_moves(world, number, machine)
        yield from worker_moves(world, number, machine)
    for at, head in enumerate(world.heads):
        if head is not None:
            yield from head_moves(world, at, head)
    for index, question in enumerate(world.questions):
        if reaches(world, question.sender, question.receiver):
            rest = world.questions[:index] + world.questions[index + 1 :]
            yield (
                f"{question.what.__class__.__name__} {question.number}",
                arrived(replace(world, questions=rest), question),
            )


def cable_moves(world: World) -> Iterator[tuple[str, World]]:
    if world.cut:
        yield "mend", replace(world, cut=())
    elif world.left["cut"]:
        for number in range(1, len(world.machines)):
            yield f"cut {number}", spent(replace(world, cut=(number,)), "cut")


def agent_moves(world: World, number: int, machine: Machine) -> Iterator[tuple[str, World]]:
    line = machine.line
    if line is not None and reaches(world, number, line.there):
        if line.up and not line.is_closed:
            yield f"hello of {number} to {line.there}", hello_arrives(world, number)
        if line.down:
            yield f"{number} hears {type(line.down[0]).__name__} of {line.there}", hears(world, number)
        elif line.is_closed:
            yield f"{number} is hung up on by {line.there}", gone(world, number)
    elif line is not None:
        yield f"{number} loses {line.there}", gone(world, number)
    if line is None:
        for there in places(world, number):
            head = world.heads[there]
            if head is not None and reaches(world, number, there):
                yield f"{number} reaches {there}", looks(world, number, there)
        if machine.avoids >= 0:
            yield f"{number} tries {machine.avoids} again", put(world, number, avoids=-1)
        if world.left["start"] and may_start(world, number):
            own = world.heads[number]
            base = ends(world, number) if own is not None and own.gives_way_to else world  # `HeadProcess.end`
            if base.heads[number] is None:
                yield f"{number} starts a head", spent(starts(base, number), "start")


def places(world: World, number: int) -> list[int]:
    """As `Following._places`."""
    machine = world.machines[number]
    if machine.side.has_seat:
        return [number]
    joins = [int(machine.side.joins)] if machine.side.joins else []
    return [there for there in dict.fromkeys((*joins, *machine.heads)) if there not in (number, machine.avoids)]


def worker_moves(world: World, number: int, machine: Machine) -> Iterator[tuple[str, World]]:
    head = world.heads[machine.follows] if machine.follows >= 0 else None
    if head is None or head.gives_way_to or not machine.is_welcome or not reaches(world, number, machine.follows):
        return
    at = machine.follows
    if number in head.here or number not in head.known.agents:
        return
    if machine.work >= 0 and number in head.known.holding:
        yield f"workers of {number} come back to {at}", come_back(world, at, number)
    elif machine.work >= 0:
        yield f"workers of {number} are too late for {at}", put(world, number, work=-1)
    elif head.here:
        known = replace(head.known, holding=tuple(sorted({*head.known.holding, number})))
        world = put_head(world, at, here=tuple(sorted((*head.here, number))))
        yield (
            f"new workers of {number} get the state from {at}",
            remembered(put(world, number, work=known.step), at, known),
        )


def come_back(world: World, at: int, number: int) -> World:
    """Workers that hold the state connect to the head again; all of them finish the step that one of them has done."""
    head = world.heads[at]
    assert head is not None
    here = tuple(sorted((*head.here, number)))
    done = {world.machines[member].work for member in here}
    assert max(done) - min(done) <= 1, "workers of two sides are in one generation"
    for member in here:
        world = put(world, member, work=max(done))
    return remembered(put_head(world, at, here=here), at, replace(head.known, step=max(done)))


def head_moves(world: World, at: int, head: Head) -> Iterator[tuple[str, World]]:
    for number in head.known.agents:
        line = world.machines[number].line
        is_whole = line is not None and line.there == at and not line.is_closed and reaches(world, number, at)
        if not is_whole and number != at and not head.gives_way_to:
            yield f"head {at} loses {number}", loses(world, at, number)
    if head.gives_way_to:
        yield f"head {at} ends", ends(world, at)
        return
    if head.is_asking:
        yield f"head {at} waits no longer", put_head(world, at, is_asking=0, asks=-1)
    elif standpoint(head).may_ask and world.left["ask"]:
        for there in head.known.lost:
            if world.heads[there] is not None and reaches(world, at, there):
                number = world.count + 1
                rank = standpoint(head).rank
                proposal = Proposal(
                    run_id="x", agent_id=f"agent{head.seat}", term=head.term, step=rank.step, url=str(at)
                )
                asked = replace(
                    world, questions=(*world.questions, Question(number, at, there, proposal)), count=number
                )
                yield f"head {at} asks {there}", spent(put_head(asked, at, is_asking=number, asks=there), "ask")
    members = [world.machines[number] for number in head.here]
    is_whole = all(m.follows == at and reaches(world, n, at) for n, m in zip(head.here, members, strict=True))
    if members and is_whole and set(head.here) == set(head.known.holding) and world.left["step"]:
        step = head.known.step + 1
        for number in head.here:
            world = put(world, number, work=step)
        yield f"step {step} at {at}", spent(remembered(world, at, replace(head.known, step=step)), "step")


def arrived(world: World, question: Question) -> World:
    head, what = world.heads[question.receiver], question.what
    if head is None:
        return world
    if isinstance(what, Proposal):
        stand, answer = verdict(standpoint(head), what)
        world = put_head(world, question.receiver, gives_way_to=stand.gives_way_to)
        back = Question(question.number, question.receiver, question.sender, answer)
        return moves_away(replace(world, questions=(*world.questions, back)), question.receiver)
    if head.is_asking != question.number:  # it has waited no longer
        return world
    stand = merged(standpoint(head), str(question.sender), what)
    world = put_head(world, question.receiver, is_asking=0, asks=-1, gives_way_to=stand.gives_way_to)
    return moves_away(world, question.receiver)


# -- what must hold ----------------------------------------------------------------------------------


def check(world: World) -> None:
    """What holds at every moment."""
    stays = [head for head in world.heads if head is not None and not head.gives_way_to]
    assert stays, "all heads have given way"
    assert any(machine.work >= 0 for machine in world.machines), "somebody holds the state"
    for head in stays:
        assert head.known.holding or head.here, f"the run fails at the head of {head.seat}"


def settle(world: World, settled: set[bytes]) -> None:
    """Leave the cable whole, and let happen what is due, what takes the longest last, until all is well.

    Args:
        settled: states from which that is known to come.
    """
    world = replace(world, cut=(), left={"cut": 0, "step": 0, "ask": 1, "start": 1})
    passed = []
    while not is_good(world) and (found := key(world)) not in settled:
        passed.append(found)
        assert len(passed) < 200, f"no end\n{shown(world)}"
        turn = min(moves(world), key=patience, default=None)
        assert turn is not None, f"nothing more happens\n{shown(world)}"
        world = replace(turn[1], left=world.left)
        check(world)
    settled.update(passed)


def patience(move: tuple[str, World]) -> int:
    """How long something takes to happen."""
    late = (" loses ", " waits no longer", " asks ", " starts ", " again")
    return next((1 + place for place, word in enumerate(late) if word in move[0]), 0)


def is_good(world: World) -> bool:
    alive = [at for at, head in enumerate(world.heads) if head is not None]
    if len(alive) != 1:
        return False
    head = world.heads[alive[0]]
    assert head is not None
    everybody = tuple(range(len(world.machines)))
    return head.here == everybody and all(m.follows == alive[0] and m.work == head.known.step for m in world.machines)


def shown(world: World) -> str:
    return "\n".join(map(str, (*world.machines, *world.heads, world.questions, world.cut)))


def after_a_cut(num_machines: int, **left: int) -> World:
    """The last machine is cut off, and both sides know."""
    everybody = tuple(range(num_machines))
    last = num_machines - 1
    whole = Head("h0", 1, 0, Known((EARLIER,), 0, everybody, (), everybody), here=everybody)
    head = replace(whole, known=without(whole, last), here=everybody[:-1])
    machines = []
    for number in everybody:
        newest = snapshot(whole if number == last else head)
        side = Allegiance(Followed(1, newest), head.known.branches[0 if number == last else -1], has_seat=number == 0)
        line = None if number == last else Line(0)
        follows = -1 if number == last else 0
        machines.append(Machine(side, line, line is not None, follows, work=0, heads=(0, *everybody[1:])))
    return World(tuple(machines), (head, *(None,) * last), cut=(last,), left=left)


def walk(world: World, depth: int) -> int:
    """Visit all that so many events can lead to; return how many states these are.

    Raises:
        AssertionError: something does not hold; says by which events.
    """
    seen, settled = {key(world)}, set[bytes]()
    border: list[tuple[tuple[str, ...], World]] = [((), world)]
    for _ in range(depth):
        following = []
        for way, each in border:
            for name, after in moves(each):
                if (found := key(after)) in seen:
                    continue
                seen.add(found)
                try:
                    check(after)
                    settle(after, settled)
                except AssertionError as error:
                    raise AssertionError(f"{error}\nafter {', '.join((*way, name))}") from None
                following.append(((*way, name), after))
        border = following
    return len(seen)


def key(world: World) -> bytes:
    return msgspec.msgpack.encode(world)


# -- the walks ---------------------------------------------------------------------------------------

OWN_HEAD: Final = (
    "{0} starts a head",
    "{0} reaches {0}",
    "hello of {0} to {0}",
    "{0} hears Welcome of {0}",
    "{0} hears HeadSnapshot of {0}",
    "workers of {0} come back to {0}",
    "{0} hears HeadSnapshot of {0}",
)
"""How the machine that was cut off comes to a head of its own."""


def played(world: World, *names: str) -> World:
    for name in names:
        world = dict(moves(world))[name]
    return world


def two_heads(num_machines: int, **left: int) -> World:
    """The cable is back, and each side has a head and workers."""
    last = num_machines - 1
    return played(after_a_cut(num_machines, **left), *(name.format(last) for name in OWN_HEAD), "mend")


@pytest.mark.parametrize(
    ("num_machines", "begin", "depth", "more"),
    [(2, after_a_cut, 12, 4), (3, after_a_cut, 8, 2), (2, two_heads, 8, 4), (3, two_heads, 6, 2)],
    ids=["cut-2", "cut-3", "heads-2", "heads-3"],
)
def test_one_head_goes_on_with_the_state_in_all_orders(
    num_machines: int, begin: Callable[..., World], depth: int, more: int
) -> None:
    """And all machines follow it, when the cable is left alone."""
    assert walk(begin(num_machines, cut=1, step=1, ask=3, start=2), depth + ALL * more) > 400


RIGHT: Final = (hello_arrives, verdict, standpoint)


def gives_way_to_a_term(world: World, number: int) -> World:
    """A head that gives way to a hello: what has lost both heads."""
    line = world.machines[number].line
    assert line is not None
    head = world.heads[line.there]
    assert head is not None
    if line.up[0].term > head.term and not head.gives_way_to:
        return ends(put(world, number, line=replace(line, up=line.up[1:])), line.there)
    return RIGHT[0](world, number)


def asks_and_gives_way(own: Standpoint, other: Proposal) -> tuple[Standpoint, Verdict]:
    """A head that gives way while it waits for an answer of its own."""
    return RIGHT[1](replace(own, is_asking=False), other)


def knows_at_once(head: Head) -> Standpoint:
    """A head that decides before it has heard whether its side holds the state."""
    step, waits = head.known.step, bool(head.gives_way_to)
    return replace(RIGHT[2](head), is_waiting=waits, rank=Rank.of(step, head.term, f"agent{head.seat}"))


@pytest.mark.parametrize(
    ("begin", "depth", "wrong", "found"),
    [
        (
            after_a_cut,
            9,
            {"hello_arrives": gives_way_to_a_term, "standpoint": knows_at_once},
            "all heads have given way",
        ),
        (two_heads, 7, {"verdict": asks_and_gives_way}, "all heads have given way"),
    ],
    ids=["term", "asking"],
)
def test_the_walk_finds_a_wrong_rule(
    begin: Callable[..., World], depth: int, wrong: dict[str, object], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = begin(2, cut=1, step=1, ask=3, start=2)
    for name, rule in wrong.items():
        monkeypatch.setattr(f"{__name__}.{name}", rule)
    with pytest.raises(AssertionError, match=found):
        walk(world, depth)
