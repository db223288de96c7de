"""How the commands reach a run that is going: its directory says where the head is and holds the token."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unisono.errors import UsageError

__all__ = ["Address", "NotGoing", "ask_status", "find", "read_token", "tell"]

TIMEOUT_S = 10.0


class NotGoing(UsageError):
    """No head listens at the address in the run directory, or there is no address."""


@dataclass(frozen=True)
class Address:
    url: str
    token: str


def find(run: str) -> Address:
    """Return where the head of the run in this directory listens.

    Raises:
        NotGoing: no run is going there. UsageError: one may be, but this user cannot read how to reach it.
    """
    folder = Path(run)
    file = folder / "head.json"
    try:
        known = json.loads(file.read_text())
        url, token_file = str(known["url"]), str(known["token_file"])
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.is_dir():
            raise UsageError(f"there is no run directory {run}") from error
        raise NotGoing(f"no run is going in {run}: there is no {file.name}") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NotGoing(f"{file} cannot be read: {error}") from error
    try:
        return Address(url, read_token(token_file))
    except FileNotFoundError as error:
        raise NotGoing(f"no run is going in {run}: there is no {Path(token_file).name}") from error


def read_token(path: str) -> str:
    try:
        token = Path(path).read_text().strip()
    except FileNotFoundError:
        raise
    except ValueError:
        token = ""
    except OSError as error:
        raise UsageError(f"cannot read the token in {path}: {error.strerror}") from error
    if not token.isascii() or not token.isprintable() or not token:
        raise UsageError(f"{path} holds no token; it is RUN/token while the run is going")
    return token


def ask_status(address: Address) -> dict[str, Any]:
    """Return the head's account of the run.

    Raises:
        NotGoing: no head answers. UsageError: the address is malformed, or the token is not the run's.
    """
    from unisono.messages import is_refusal

    try:
        parts = urlsplit(address.url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise UsageError(f"the address of a run is ws://HOST:PORT, got {address.url!r}: {error}") from error
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/status", headers={"Authorization": f"Bearer {address.token}"})
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise NotGoing(f"no head answers at {address.url}: {error}") from error
    if answer.status == http.client.UNAUTHORIZED:
        raise UsageError(f"the head at {address.url} refuses the token; it is fresh for every run (RUN/token)")
    if not is_refusal(answer.status):  # the head is about to end
        raise NotGoing(f"the head at {address.url} answers HTTP {answer.status}")
    if answer.status != http.client.OK:
        raise UsageError(f"the head at {address.url} answers HTTP {answer.status}")
    found: dict[str, Any] = json.loads(body)
    return found


def tell(address: Address, message: Any) -> str:
    """Send one message to the head, from outside the run; returns the head's answer."""
    from unisono.link import Link, Refused
    from unisono.messages import Announcement, decode, encode

    try:
        with contextlib.closing(Link.dial(address.url, address.token, TIMEOUT_S)) as link:
            link.put(encode(message))
            answer = decode(link.wait(TIMEOUT_S)[0])
    except (OSError, Refused) as error:
        raise NotGoing(f"no head answers at {address.url}: {error}") from error
    return answer.text if isinstance(answer, Announcement) else str(answer)
