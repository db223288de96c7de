"""What `unisono watch` sees of a run: from its head while it goes on, from the files of its directory otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

from unisono.cli.reach import NotGoing, check_head, find
from unisono.cluster.head.client import Refused, Watching
from unisono.cluster.trust.certificate import Untrusted
from unisono.cluster.trust.invitation import Invitation, is_invitation, shown
from unisono.core.errors import UsageError
from unisono.record.history import History, without_head
from unisono.record.overview import SCHEMA, Overview

__all__ = ["ENDED", "Seen", "as_invitation", "look"]

EVERY_S: Final = 1.0
SILENT_S: Final = 10.0
"""A head that has pushed nothing for so long is said to be silent."""
ENDED: Final = ("finished", "stopped", "failed")
UNKNOWN: Final = "unknown"


@dataclass(frozen=True)
class Seen:
    """What was seen of a run."""

    overview: Overview | None
    note: str = ""
    """What the user should know about the view; "": nothing."""
    lost_s: float = 0.0
    """For so long no head has answered."""
    is_over: bool = False
    """Nothing more is to come."""


def look(run: str, sleep: Callable[[float], None] = time.sleep) -> Iterator[Seen]:
    """Yield what is to be seen of a run, about once a second, until it is over.

    Args:
        run: its directory, an invitation, the address of its page, or "-".

    Raises:
        UsageError: there is no such run, or this user may not look at it.
    """
    if run == "-" or is_invitation(run):
        return _from_head(find(as_invitation(run)), sleep)
    return _from_directory(Path(run), sleep)


def as_invitation(run: str) -> str:
    """Return what a user gives as a run, with the address of its page (`Invitation.page`) as an invitation."""
    found = urlsplit(run)
    if found.scheme not in ("http", "https"):
        return run
    token = parse_qs(found.query).get("token", [""])[0]
    mark = f"#{found.fragment}" if found.fragment else ""
    return f"{'wss' if found.scheme == 'https' else 'ws'}://{quote(token, safe='')}@{found.netloc}{mark}"


# -- over the network ----------------------------------------------------------------------------------


def _from_head(invitation: Invitation, sleep: Callable[[float], None]) -> Iterator[Seen]:
    last: Overview | None = None
    where = shown(invitation.url)
    lost_at = 0.0
    while True:
        why = f"the head at {where} has closed the connection"
        try:
            for seen in _pushes(invitation):
                last, lost_at = seen.overview or last, 0.0
                yield replace(seen, overview=last)
        except NotGoing as error:
            if last is None:
                raise
            why = str(error)
        if last is not None and last.state in ENDED:
            yield Seen(last, is_over=True)
            return
        lost_at = lost_at or time.monotonic()
        lost_s = time.monotonic() - lost_at
        yield Seen(last, f"{why}; trying again for {lost_s:.0f} s", lost_s)
        sleep(EVERY_S if lost_s < SILENT_S else 3 * EVERY_S)


def _pushes(invitation: Invitation) -> Iterator[Seen]:
    """Yield what the head pushes, until the connection ends.

    Raises:
        NotGoing: no head answers. UsageError: it does not let this user look, or is not the head.
    """
    check_head(invitation)
    where = shown(invitation.url)
    try:
        with Watching(invitation) as watching:
            heard_at = time.monotonic()
            while True:
                push = watching.next(EVERY_S)
                now = time.monotonic()
                if push is None:
                    silent_s = now - heard_at
                    if silent_s >= SILENT_S:
                        yield Seen(None, f"the head at {where} has been silent for {silent_s:.0f} s")
                    continue
                heard_at = now
                if "overview" in push:
                    yield _seen(push["overview"])
    except Untrusted as error:
        raise UsageError(str(error)) from error
    except Refused as error:
        raise UsageError(f"the head at {where} refuses: {error}") from error
    except OSError as error:
        if isinstance(error, ConnectionRefusedError | TimeoutError):
            raise NotGoing(f"no head answers at {where}: {error.strerror or error}") from error
        return


def _seen(told: Any) -> Seen:
    try:
        overview = msgspec.convert(told, Overview, strict=False)
    except msgspec.ValidationError as error:
        return Seen(None, f"this version does not understand what the head sends: {error}")
    newer = f"the head has a newer version (schema {overview.schema}, this one knows {SCHEMA})"
    return Seen(overview, newer if overview.schema > SCHEMA else "")


# -- from the files ------------------------------------------------------------------------------------


def _from_directory(folder: Path, sleep: Callable[[float], None]) -> Iterator[Seen]:
    if not folder.exists():
        raise UsageError(f"there is no run directory {folder}")
    history: History | None = None
    met = False
    lost_at = 0.0
    while True:
        note = ""
        try:
            if folder.is_dir():
                for seen in _pushes(find(str(folder))):
                    met, lost_at = True, 0.0
                    yield seen
        except NotGoing:
            pass
        except UsageError as error:  # e.g. a run of another user, whose token this one may not read
            note = str(error)
        if history is None:
            history = History(folder)
        else:
            history.refresh()
        overview = history.overview()
        if not met and not note and overview.step < 0 and not history.facts() and overview.state not in ENDED:
            raise UsageError(f"there is no run in {folder}: " + ("; ".join(history.notes) or "it holds no journal"))
        now = time.monotonic()
        lost_at = lost_at or now
        if overview.state in ENDED:
            yield Seen(overview, note or "; ".join(history.notes), is_over=True)
            return
        lost_s = now - lost_at
        overview = without_head(overview)
        note = note or (f"no head answers; showing what the files say, for {lost_s:.0f} s" if met else "")
        yield Seen(overview, note or "; ".join(history.notes), lost_s, is_over=not met and overview.state == UNKNOWN)
        sleep(EVERY_S)
