"""How the commands reach a run that is going: by its directory, which says where the head is and holds the token, or
by an invitation.
"""

from __future__ import annotations

import contextlib
import getpass
import hmac
import http.client
import json
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from unisono.cluster.trust.certificate import Untrusted, check, client_context
from unisono.cluster.trust.invitation import HeadUrl, Invitation, is_invitation, shown
from unisono.cluster.trust.secret import KEY_BYTES, PROOF, READER_PROOF, proof_of
from unisono.cluster.worker.link import Link, Refused
from unisono.core.errors import UsageError
from unisono.core.messages import UserSentence, decode, encode, is_refusal
from unisono.record.journal import JOURNAL
from unisono.record.rundir import ADDRESS_FILE, TOKEN_FILE
from unisono.system.owned import NotOwned, read_owned

__all__ = ["RUN", "NotGoing", "ask_status", "await_status", "check_head", "find", "may_act", "read_token", "tell"]

TIMEOUT_S = 10.0
RETRY_S = 0.2
TLS_ALERT = "\x15\x03"
RUN: Final = (
    "RUN is the run's directory, an invitation (`unisono watch --once` shows it), or - to read one from standard input."
)
"""What all commands that reach a run take."""


class NotGoing(UsageError):
    """No head listens at the address in the run directory, or there is no address."""


def find(run: str) -> Invitation:
    """Return how to reach a run.

    Args:
        run: its directory; an invitation; "-": the first line of standard input is one.

    Raises:
        NotGoing: no run is going there. UsageError: one may be, but this user cannot read how to reach it.
    """
    if run == "-":
        return Invitation.parse(_read_line())
    if is_invitation(run):
        return Invitation.parse(run)
    return _of_directory(Path(run))


def _of_directory(folder: Path) -> Invitation:
    """Return how to reach the run of a directory. What is sent there is the token in that directory, and nothing else.

    Raises:
        NotGoing: no run is going there. UsageError: the directory's files are not this user's own.
    """
    try:
        url = json.loads(read_owned(folder, ADDRESS_FILE))["url"]
        token = read_owned(folder, TOKEN_FILE)
        return Invitation(str(HeadUrl.parse(url)), _checked(token, folder / TOKEN_FILE))
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.is_dir():
            raise UsageError(f"there is no run directory {folder}") from error
        raise NotGoing(_why_not_going(str(folder))) from error
    except NotOwned as error:
        raise UsageError(
            f"{error}. A command trusts a directory's head address, and sends the token to it, only if both files "
            "belong to the user who calls it; `unisono watch --once` shows that user the lines with which others join "
            "or watch the run"
        ) from error
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{folder}: {ADDRESS_FILE} or {TOKEN_FILE} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NotGoing(f"{folder / ADDRESS_FILE} cannot be read: {error}") from error


def _why_not_going(run: str) -> str:
    """Return why no command can reach the run of a directory that names no head."""
    if (Path(run) / JOURNAL).is_file():
        return f"the run in {run} is over; `unisono watch --once {run}` shows how it ended"
    return f"no run is active in {run}; a run that has just started can be reached after a few seconds"


def _read_line() -> str:
    """Return the invitation that a user pastes, which is not shown, or that is piped in."""
    if sys.stdin.isatty():
        return getpass.getpass("the invitation (`unisono watch --once RUN` shows it; it does not appear here): ")
    line = sys.stdin.readline()
    if not line.strip():
        raise UsageError("there is no invitation on standard input; give it like this: - <<< 'wss://...'")
    return line


def read_token(path: str) -> str:
    """Return the token in a file that the user names.

    Raises:
        FileNotFoundError: there is no such file. UsageError: it cannot be read, or holds no token.
    """
    try:
        return _checked(Path(path).read_bytes(), path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read the token in {path}: {error.strerror}") from error


def _checked(data: bytes, path: str | Path) -> str:
    """Return the token that was read from a file.

    Raises:
        UsageError: it is none.
    """
    token = data.strip().decode(errors="replace")
    if not token.isascii() or not token.isprintable() or not token:
        raise UsageError(f"{path} has no token; it is RUN/token while the run is active")
    return token


def ask_status(invitation: Invitation) -> dict[str, Any]:
    """Return the head's account of the run.

    Raises:
        NotGoing: no head answers. UsageError: the address is malformed, what answers there is not the head, or the
            token is not the run's.
    """
    head = HeadUrl.parse(invitation.url)
    check_head(invitation)
    status, body = _get(head, "/status", invitation.token, sends_token=True)
    if status == http.client.UNAUTHORIZED:
        raise UsageError(f"the head at {head.place} rejects the token; every run has a new one (RUN/token)")
    if not is_refusal(status):  # the head is about to end
        raise NotGoing(f"the head at {head.place} answers HTTP {status}")
    if status != http.client.OK:
        raise UsageError(f"the head at {head.place} answers HTTP {status}")
    found: dict[str, Any] = json.loads(body)
    return found


def await_status(
    invitation: Invitation, wait_s: float, on_absent: Callable[[NotGoing], None] = lambda error: None
) -> dict[str, Any]:
    """Return the head's account of the run, as soon as there is a head.

    Args:
        on_absent: is called when the first attempt finds no head.

    Raises:
        NotGoing: no head has answered for ``wait_s``. UsageError: as `ask_status`.
    """
    until, is_first = time.monotonic() + wait_s, True
    while True:
        try:
            return ask_status(invitation)
        except NotGoing as error:
            if time.monotonic() >= until:
                raise
            if is_first:
                on_absent(error)
            is_first = False
        time.sleep(RETRY_S)


def may_act(invitation: Invitation) -> Invitation:
    """Return the invitation.

    Raises:
        UsageError: it is one for watchers.
    """
    if invitation.is_for_looking:
        raise UsageError(
            "this line is only for watching the run, with `unisono watch` and `unisono watch --once`; whoever started "
            "the run sees the line for joining with `unisono watch --once RUN`"
        )
    return invitation


def check_head(invitation: Invitation) -> None:
    """Have a head without TLS prove that it knows the token, before the token is sent to it.

    Raises:
        NotGoing: no head answers. UsageError: what answers does not know the token.
    """
    head = HeadUrl.parse(invitation.url)
    if head.is_secure:
        return
    question = secrets.token_hex(KEY_BYTES)
    path = READER_PROOF if invitation.is_for_looking else PROOF
    _, answer = _get(head, f"{path}?{question}", invitation.token)
    if not hmac.compare_digest(answer.strip(), proof_of(invitation.token, question).encode()):
        raise UsageError(
            f"the process at {head.place} is not the head of this run: it does not know the token, which was not sent "
            "to it. Is the invitation from an earlier run?"
        )


def _get(head: HeadUrl, path: str, token: str, *, sends_token: bool = False) -> tuple[int, bytes]:
    """Return status and body of the head's answer.

    Raises:
        NotGoing: no head answers. UsageError: what answers is not the head.
    """
    connection: Any
    if head.is_secure:
        context = client_context()
        connection = http.client.HTTPSConnection(head.host, head.port, timeout=TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(head.host, head.port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        try:
            connection.connect()
            if head.is_secure:
                check(connection.sock.getpeercert(binary_form=True), head, token)
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if sends_token else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except Untrusted as error:
            raise UsageError(str(error)) from error
        except http.client.BadStatusLine as error:
            if str(error).startswith(TLS_ALERT):
                raise UsageError(f"the head at {head.place} uses TLS: its address begins with wss://") from error
            raise NotGoing(f"no head answers at {head.place}: {error}") from error
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise NotGoing(f"no head answers at {head.place}: {error}") from error


def tell(invitation: Invitation, message: Any) -> str:
    """Send one message to the head, from outside the run; returns the head's answer.

    Raises:
        NotGoing: no head answers. UsageError: what answers is not the head, or the invitation is one for watchers.
    """
    check_head(may_act(invitation))
    try:
        with contextlib.closing(Link.dial(invitation.url, invitation.token, TIMEOUT_S)) as link:
            link.put(encode(message))
            answer = decode(link.wait(TIMEOUT_S)[0])
    except Untrusted as error:
        raise UsageError(str(error)) from error
    except (OSError, Refused) as error:
        raise NotGoing(f"no head answers at {shown(invitation.url)}: {error}") from error
    return answer.text if isinstance(answer, UserSentence) else str(answer)
