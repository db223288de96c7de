"""A program's side of watching a run over the network: the questions and the pushes of a head's ``/watch``."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from typing import Any, Final

from websockets.frames import Opcode

from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.cluster.worker.link import Link, Refused
from unisono.views.page.site import WATCH

__all__ = ["Refused", "Watching"]

CONNECT_TIMEOUT_S: Final = 10.0
MOST_KEPT: Final = 100
"""So many pushes are kept until they are asked for; of more, the oldest are dropped."""


class Watching:
    """A connection to a run that is going, for looking.

    The head is the one whose certificate the invitation names. Of one without TLS, `unisono.cli.reach.check_head` asks
    for a proof before.

    Args:
        invitation: one for watchers, or one with which machines join: what is sent to the head is the token for
            looking in any case.

    Raises:
        Refused: the token is not that of the run, or so many watch already. OSError: there is no connection, or it is
            lost, or the process that answers is not the head (`unisono.cluster.trust.certificate.Untrusted`); also
            raised by `ask` and `next`.
    """

    def __init__(self, invitation: Invitation) -> None:
        self._url = HeadUrl.parse(invitation.url)
        token = invitation.for_looking.token
        self._link = Link.dial(invitation.url, token, CONNECT_TIMEOUT_S, WATCH, Opcode.TEXT)
        self._number = 0
        self._pushes: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT)
        self._answers: dict[int, dict[str, Any]] = {}

    def ask(self, question: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
        """Return the answer to a question (``{"get": "series", "names": ["loss"]}``), with an ``error`` if it has none.

        Raises:
            TimeoutError: no answer in time. OSError: the connection is lost.
        """
        self._number += 1
        number = self._number
        self._link.put(json.dumps({**question, "id": number}).encode())
        until = time.monotonic() + timeout_s
        while number not in self._answers:
            self._receive(until)
        return self._answers.pop(number)

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the oldest push that was not returned yet (``{"overview": ..., "events": [...]}``); None: none came.

        Raises:
            OSError: the connection is lost, e.g. because the run is over.
        """
        until = time.monotonic() + timeout_s
        with contextlib.suppress(TimeoutError):
            while not self._pushes:
                self._receive(until)
        return self._pushes.popleft() if self._pushes else None

    def _receive(self, until: float) -> None:
        for data in self._link.wait(max(0.0, until - time.monotonic())):
            try:
                message = json.loads(data)
            except ValueError as error:
                raise ConnectionError(f"the head at {self._url.place} sends what is no JSON") from error
            if isinstance(message, dict) and "id" in message:
                self._answers = {message["id"]: message}  # one is asked at a time; late ones are not wanted any more
            elif isinstance(message, dict):
                self._pushes.append(message)

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
