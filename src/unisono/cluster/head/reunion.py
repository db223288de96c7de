"""Search for other heads of the run: where a network was cut, each side may have gone on under a head of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Final, Protocol

from unisono.cluster.worker.link import Refused, answer_to, open_link
from unisono.core.errors import ProtocolError
from unisono.core.messages import Proposal, Verdict, decode, encode

__all__ = ["Reunion"]

PACE_S: Final = 2.0
"""Between two rounds of attempts, in the mean. Two heads that ask each other at the same moment answer nothing, so they
must not go on in step.
"""
ANSWER_S: Final = 3.0


class Side(Protocol):
    """This head's side of the run (`unisono.cluster.head.server.Head`)."""

    def lost_addresses(self) -> Sequence[str]:
        """Return where machines that this side has lost may have a head."""

    def propose(self) -> Proposal | None:
        """Return what to ask another head now; None: nothing."""

    def answered(self, url: str, answer: Verdict | None) -> None:
        """Receive the answer of the head at this address; None: there is none."""


class Reunion:
    """Asks at the addresses of lost machines for a head, at a slow pace."""

    def __init__(self, side: Side, token: str) -> None:
        self._side = side
        self._token = token

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PACE_S * random.uniform(0.75, 1.25))
            for url in self._side.lost_addresses():
                await self._try(url)

    async def _try(self, url: str) -> None:
        try:
            link = await open_link(url, self._token, ANSWER_S)
        except (OSError, Refused):  # no head is there, or not one of this run
            return
        with contextlib.closing(link):
            # Not before: while the way to that head was closed, this side has gone on.
            proposal = self._side.propose()
            if proposal is None:
                return
            answer = None
            try:
                found = decode(await answer_to(encode(proposal), link, ANSWER_S))
                answer = found if isinstance(found, Verdict) else None
            except (OSError, ProtocolError):
                pass
            finally:
                self._side.answered(url, answer)
