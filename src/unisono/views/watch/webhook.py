"""Webhook: a run says over HTTP that it began, ended, lost a checkpoint, or was found wrong.

Under ``unisono run`` the machine with the head says so: it knows of an end also where no worker is left.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from unisono.core.errors import UsageError
from unisono.core.events import Event, Problem, RunEnded, RunStarted
from unisono.record.overview import text_of
from unisono.record.problems.evidence import redacted
from unisono.views.watch.queued import Queued, print_error

__all__ = ["VARIABLE", "Webhook"]

VARIABLE: Final = "UNISONO_WEBHOOK"
"""Of the environment: the address, where the sink has none."""
TRIES: Final = 4
TIMEOUT_S: Final = 3.0
"""For an answer."""
PAUSE_S: Final = 1.0
"""Before the second try; each further pause is twice as long."""
_AGAIN: Final = (408, 425, 429)
_PROBLEMS: Final = {"checkpoint": "checkpoint-lost", "corruption": "wrong", "divergence": "wrong"}
"""Kinds of `Problem` that are told, with the names that they have in a message. One that ends the run is its end."""


class Webhook(Queued):
    """A sink that sends a JSON object to an address by POST for what somebody wants to know who does not look.

    A message has ``event`` ("began", "ended", "checkpoint-lost" or "wrong"), ``text`` (a sentence, which Slack and
    Mattermost show as it is), ``run`` (name of the run's directory), ``run_id``, ``host``, ``time`` (seconds since
    1970) and ``step``; that of an end also ``ok``, ``reason`` and ``digests``. Neither the address, nor a token, nor a
    password in a text is in it.

    An address that does not answer, or with a passing error, is tried four times; then the message is given up, which
    is said on standard error. The training waits for none of this, and the end of the run for 20 seconds at most.

    Args:
        url: ``https://HOST/PATH``; default: the environment's UNISONO_WEBHOOK. A user and a password in it are sent as
            the header Authorization.
        pause_s: seconds before the second try.
        report: gets sentences about messages that were given up.

    Raises:
        UsageError: there is no address, or it is none of HTTP.
    """

    def __init__(self, url: str = "", *, pause_s: float = PAUSE_S, report: Callable[[str], None] = print_error) -> None:
        address = url or os.environ.get(VARIABLE, "")
        if not address:
            raise UsageError(f"a webhook needs an address: --sink webhook=https://HOST/PATH, or {VARIABLE}")
        try:
            parts = urlsplit(address)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_right = False
        if not is_right or any(each <= " " for each in address):
            raise UsageError("the address of a webhook is https://HOST/PATH or http://HOST/PATH; it got something else")
        client = _Client(address, pause_s, report)
        super().__init__(client, name=f"webhook at {parts.hostname}", report=report)
        self._client = client

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted | RunEnded) or (isinstance(event, Problem) and event.problem in _PROBLEMS):
            super().emit(event)

    def close(self) -> None:
        super().close()
        self._client.abandoned.set()


class _StaysThere(urllib.request.HTTPRedirectHandler):
    """A redirection is an answer like any other: what a run says of itself goes to nobody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Client:
    """Sends messages, one after the other; each call may take long."""

    def __init__(self, address: str, pause_s: float, report: Callable[[str], None]) -> None:
        parts = urlsplit(address)
        place = parts.netloc.rpartition("@")[2]
        self._url = urlunsplit((parts.scheme, place, parts.path or "/", parts.query, ""))
        self._headers = {"Content-Type": "application/json", "User-Agent": "unisono"}
        if parts.username is not None:
            known = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(known).decode()}"
        self._name = parts.hostname or ""
        self._pause_s = pause_s
        self._report = report
        self._opener = urllib.request.build_opener(_StaysThere())
        self._run: dict[str, Any] = {"run": "", "run_id": ""}
        self.abandoned = threading.Event()
        """Nobody waits for answers any more."""

    def emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RunStarted):
                self._run = {"run": Path(event.directory).name, "run_id": event.run_id}
            self._send(self._message(event))

    def close(self) -> None:
        pass

    def _message(self, event: Event) -> dict[str, Any]:
        match event:
            case RunStarted():
                more: dict[str, Any] = {"event": "began", "step": event.step}
            case RunEnded():
                more = {"event": "ended", "step": event.step, "ok": event.ok}
                more |= {"reason": redacted(event.reason), "digests": event.digests}
            case Problem():
                more = {"event": _PROBLEMS[event.problem], "step": event.step}
        name = self._run["run"] or self._run["run_id"]
        text = redacted(f"{name}: {text_of(event)}" if name else text_of(event))
        return {**more, "text": text, **self._run, "host": socket.gethostname(), "time": event.time}

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message; say that it was given up, where nobody has taken it."""
        body = json.dumps(message).encode()
        request = urllib.request.Request(self._url, body, self._headers, method="POST")
        number, why = 0, ""
        for number in range(1, TRIES + 1):
            try:
                with self._opener.open(request, timeout=TIMEOUT_S):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                why = f"it answered {error.code}"
                if error.code < 500 and error.code not in _AGAIN:
                    break
            except (OSError, http.client.HTTPException) as error:
                why = f"it cannot be reached: {getattr(error, 'reason', None) or type(error).__name__}"
            if number < TRIES and self.abandoned.wait(self._pause_s * 2 ** (number - 1)):
                break
        tries = "once" if number == 1 else f"{number} times"
        self._report(
            f"the webhook at {self._name} was not told {message['event']!r}, tried {tries}: {why}; the run continues"
        )
