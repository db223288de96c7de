"""Membership of a run: a table, without input, output or clock.

`step` takes the state (`roster`), one event and the time, and returns the next state, the messages to send, and the
reason in one sentence. All decisions of the head about members are made here::

    dispatch     message -> rule, and which message leads from which state to which
    agents       machines join and leave; drain, scale, stop; on which machines workers start
    elasticity   how many workers a run wants that decides by itself; machines that the command can get and give back
    hellos       a worker says hello
    talk_rules   what workers say to each other before they join
    heartbeat    heartbeats from which nothing follows
    health       silence, hangs, broken exchanges (verdicts: hangs, suspicion)
    convictions  workers that compute wrong values
    parts        which part of the model each worker has
    restarts     losses and replacements
    ending       workers come to the end of the training
    generations  consequences: the next generation, or the end of the run
    heirs        which agents hold the state, and which of them starts the next head
    happenings   what has happened between two states, as events

A *generation* is a version of the membership, announced by a notice. Two kinds:

* **planned** (a worker joins or leaves): the members move together at a step boundary. It is announced only when
  all members have taken the generation before it, so at most two generations live at any time.
* **immediate** (a member is lost): exactly the survivors that hold the run's state, at once. A newcomer whose
  planned generation was overtaken goes back to READY and is planned again.

Who survives a loss while a planned generation is on its way? Members move together, so as soon as one of them
has sent `Holding` for it, the planned generation counts, otherwise the one before as well: workers that the plan would
have let go still hold nodes of the step.

Signs of a loss, fastest first: the agent has seen the process end (milliseconds); the worker's connection has
closed and did not come back; no message of the worker arrived for `RunSettings.heartbeat_timeout_s`; the worker makes
no progress while others wait for it for `RunSettings.hang_s`; its own report.

A silent worker is only lost while others send messages. When all are silent, the machine is overloaded or stands still,
or all are in the same long call: no worker is lost before `RunSettings.hang_s`, and when messages arrive again that
time counts against no worker.
"""

from __future__ import annotations

from unisono.core.events import Event as Happening
from unisono.core.messages import Beat
from unisono.membership.agents import agent_name
from unisono.membership.dispatch import TRANSITIONS, Event, Lags, Tick, TookOver, take
from unisono.membership.draft import Action, Alarm, Draft, Hangup, Invite, Send
from unisono.membership.generations import follow_up
from unisono.membership.happenings import happenings
from unisono.membership.heartbeat import routine, routine_of_many
from unisono.membership.heirs import heirs, holders, is_first_elsewhere, keepers, machines, without_lost_heir
from unisono.membership.parts import part_of
from unisono.membership.roster import State, noted, rebranched, seat_of

__all__ = [
    "TRANSITIONS",
    "Action",
    "Alarm",
    "Event",
    "Hangup",
    "Invite",
    "Lags",
    "Send",
    "State",
    "Tick",
    "TookOver",
    "agent_name",
    "happenings",
    "heirs",
    "holders",
    "is_first_elsewhere",
    "keepers",
    "machines",
    "part_of",
    "routine_of_many",
    "seat_of",
    "step",
]


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...], str, tuple[Happening, ...]]:
    """Return the consequences of one event.

    Returns:
        The next state, the actions (in this order), the reason (one sentence, empty when nothing was decided), and
        what has happened, for the story of the run.

    Raises:
        ProtocolError: this source may not send this message now. The state is unchanged.
    """
    if state.ended is not None and not isinstance(event.message, TookOver):
        state = without_lost_heir(state, event)
        return rebranched(state, heirs(state)), (), "", ()
    if isinstance(event.message, Beat) and (found := routine(state, event.source, event.message, now)) is not None:
        return found, (), "", ()
    draft = Draft(state, now)
    take(draft, event)
    if draft.actions or draft.broken or not isinstance(event.message, Beat):  # most events are heartbeats
        follow_up(draft)
    draft.state = rebranched(draft.state, heirs(draft.state))
    happened = happenings(state, draft.state, draft.touched)
    return noted(draft.state, now), tuple(draft.actions), "; ".join(dict.fromkeys(draft.reasons)), happened
