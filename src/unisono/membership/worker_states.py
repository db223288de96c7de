"""Table of a worker's states: the messages allowed in each state, and the state that each message leads to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from unisono.core.messages import (
    Beat,
    Convicted,
    Failed,
    Finished,
    Hello,
    Holding,
    Leaving,
    Left,
    Message,
    Ready,
    StepDone,
    Suspect,
    TalkCall,
    TalkDone,
)
from unisono.membership.roster import WorkerState

__all__ = ["TRANSITIONS"]

_S = WorkerState
_STAY: Final = None

_REPORTS: Final[Mapping[type[Message], WorkerState | None]] = dict.fromkeys(
    (Hello, Beat, Ready, Holding, Suspect, StepDone, Convicted, Failed, Leaving, TalkDone), _STAY
)
_ENDS: Final[Mapping[type[Message], WorkerState | None]] = {Finished: _S.FINISHED, Left: _S.LEFT}

TRANSITIONS: Final[Mapping[WorkerState, Mapping[type[Message], WorkerState | None]]] = {
    _S.ORDERED: {Hello: _S.STARTING},
    _S.STARTING: {**dict.fromkeys((Hello, Beat, Failed, TalkCall, TalkDone), _STAY), Ready: _S.READY, **_ENDS},
    # A member whose generation was overtaken is READY again, and may have sent reports before it got the notice.
    _S.READY: {**_REPORTS, **_ENDS},
    _S.ADMITTED: {**_REPORTS, **_ENDS, Holding: _S.HOLDING},
    _S.HOLDING: {**_REPORTS, **_ENDS},
    # The others go on without this worker, so its reports no longer count.
    _S.ASIDE: {**_REPORTS, Left: _STAY, Finished: _S.LOST},
    _S.FINISHED: {Hello: _STAY},
    _S.LEFT: {},
    _S.LOST: {},
}
"""State -> message -> next state; None: the message counts, and the state stays the same.

A message that is not listed breaks the protocol and changes nothing. Messages of workers that have FINISHED, LEFT or
are LOST may still be under way; they are ignored.
"""
