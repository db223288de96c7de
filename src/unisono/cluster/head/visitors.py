"""Who asks the head, what that one may do, and the answers over HTTP.

Members, agents and commands show the run's token in a header, and may do everything. Who looks has the token for
looking (`unisono.cluster.trust.secret.reader_token`), in a header, in the address, or in the cookie that a browser got
for it; a browser is never given the run's token itself, and whatever comes from an address or a cookie counts as
looking. Paths:

    /health, /proof, /proof/reader    nobody needs a token
    / as a WebSocket                  members, agents and commands: the run's token, in a header
    / and the page's other files      the page; without a token, where to get one
    /watch as a WebSocket             the page's questions, and those of ``unisono watch``
    /metrics, /status                 for programs
"""

from __future__ import annotations

import base64
import binascii
import enum
import hmac
import http.cookies
import ipaddress
import json
import socket
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from unisono.cluster.trust.invitation import HeadUrl
from unisono.cluster.trust.secret import PROOF, READER_PROOF, proof_of, reader_token
from unisono.views.page import site
from unisono.views.page.site import file_of, host_of, is_from_elsewhere, reply, say

__all__ = ["Access", "Visitors"]

PRIVATE: Final = ("job",)
"""What `/status` does not say to those who only look: the script's arguments, and where copies go, may be secret."""
SLOW_S: Final = 10.0  # for a phone to take a file
_HTML: Final = "text/html; charset=utf-8"
_JSON: Final = "application/json"
_PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>Unisono</title>{head}<h1>Unisono</h1>{body}</html>"
)
_NO_TOKEN: Final = _PAGE.format(
    head="",
    body=(
        "<p>A run is active here. To watch it, open the address that <code>unisono watch --once RUN</code> shows "
        "on the machine that started the run: it contains the token for watching.</p>"
    ),
)
_COME_IN: Final = _PAGE.format(
    head='<meta http-equiv="refresh" content="0; url=/">', body='<p><a href="/">The page of the run</a></p>'
)


class Access(enum.IntEnum):
    """What somebody may do."""

    NONE = 0
    LOOK = 1
    ALL = 2


class Visitors:
    """Answers requests.

    Args:
        token: the run's.
        url: of the head; its host is one of the names that this head goes by.
        is_secure: connections are by TLS.
        status: the values of ``/status``.
        metrics: content type and text of ``/metrics``.
        may_watch: why nobody else may watch now; "": somebody may.
        refused: counts a refusal; gets the end of the sentence "a connection ...".
    """

    def __init__(
        self,
        token: str,
        url: str,
        *,
        is_secure: bool,
        status: Callable[[], dict[str, Any]],
        metrics: Callable[[], tuple[str, str]],
        may_watch: Callable[[], str],
        refused: Callable[[str, Any], object],
    ) -> None:
        self._token = token
        self._reader = reader_token(token)
        self._is_secure = is_secure
        self._status = status
        self._metrics = metrics
        self._may_watch = may_watch
        self._refused = refused
        here = socket.gethostname().lower()
        self._names = {"localhost", HeadUrl.parse(url).host.lower() if url else "", here, here.partition(".")[0]}

    def respond(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request; None: the caller may have the WebSocket that it wants."""
        path, _, query = request.path.partition("?")
        if path == "/health":
            return say(200, "ok")
        if path == PROOF:  # who cannot know this head by its certificate asks before the token is sent
            return say(200, proof_of(self._token, query))
        if path == READER_PROOF:
            return say(200, proof_of(self._reader, query))
        access, is_browser = self._access(request, query)
        if "websocket" in ",".join(request.headers.get_all("Upgrade")).lower():
            return self._socket(connection, request, path, access, is_browser)
        if access is Access.NONE:
            if path == "/":
                return reply(401, _HTML, _NO_TOKEN, site.HEADERS)
            return say(401, "a token of the run is needed; `unisono watch --once RUN` shows the line for watching")
        if path == "/status":
            return reply(200, _JSON, json.dumps(self._status_for(access)))
        if path == "/metrics":
            return reply(200, *self._metrics())
        if (wrong := self._wrong_host(request)) is not None:
            return wrong
        if path == "/" and "token" in parse_qs(query):
            return self._let_in(request)
        found = file_of(request, path)
        if found is None:
            return say(404, "there is no such page; there are /, /status and /metrics")
        connection.close_timeout = SLOW_S
        return found

    def _status_for(self, access: Access) -> dict[str, Any]:
        known = self._status()
        return known if access is Access.ALL else {key: known[key] for key in known if key not in PRIVATE}

    def _access(self, request: Request, query: str) -> tuple[Access, bool]:
        """Return what the sender may do, and whether a browser has added the token by itself."""
        headers = request.headers.get_all("Authorization")
        if headers:
            return self._worth(_from_header(headers[0]) if len(headers) == 1 else ""), False
        if (given := parse_qs(query).get("token")) and self._worth(given[0]) is not Access.NONE:
            return Access.LOOK, False
        return min(Access.LOOK, self._worth(_cookie(request, _cookie_name(request)))), True

    def _worth(self, given: str) -> Access:
        token = given.encode(errors="surrogateescape")
        is_all = hmac.compare_digest(token, self._token.encode())
        may_look = hmac.compare_digest(token, self._reader.encode())
        return Access.ALL if is_all else Access.LOOK if may_look else Access.NONE

    def _socket(
        self, connection: ServerConnection, request: Request, path: str, access: Access, is_browser: bool
    ) -> Response | None:
        """Answer a request for a WebSocket."""
        if access is Access.NONE:
            return say(401, "the run's token is needed")
        if path == "/":
            # No browser is a member: what a page of another site can send is refused whatever it knows.
            if access is Access.ALL and not request.headers.get_all("Origin"):
                return None
            self._refused("with a token for watching, to do more", connection)
            return say(403, "this token is only for watching the run")
        if path != site.WATCH:
            return say(404, f"there is the WebSocket of members at /, and that of viewers at {site.WATCH}")
        if (wrong := self._wrong_host(request)) is not None:
            return wrong
        has_origin = bool(request.headers.get_all("Origin"))
        if is_from_elsewhere(request, is_secure=self._is_secure) or (is_browser and not has_origin):
            self._refused("from a page of another site", connection)
            return say(403, "asked by a page of another site")
        if why := self._may_watch():
            return say(429, why)
        return None

    def _wrong_host(self, request: Request) -> Response | None:
        """Refuse a request for another host: a name that somebody else's DNS points here."""
        name = host_of(request)
        first = name.partition(".")[0]
        if name and (_is_address(name) or name in self._names or (first in self._names and first != "localhost")):
            return None
        text = (
            f"this head does not go by the name {name!r}: use its address, or start the run with --set advertise=NAME"
        )
        return say(421, text if name else "the request does not name its host")

    def _let_in(self, request: Request) -> Response:
        """Give a browser the cookie, and send it to the page.

        By a page that loads the next one and not by a redirection: after that a browser that came from another site
        would not send a cookie that is for this site only.
        """
        cookie = f"{_cookie_name(request)}={self._reader}; Path=/; HttpOnly; SameSite=Strict"
        more = {"Set-Cookie": cookie + "; Secure" * self._is_secure, "Cache-Control": "no-store"}
        return reply(200, _HTML, _COME_IN, {**site.HEADERS, **more})


def _from_header(header: str) -> str:
    """Return the token of an ``Authorization``: after "Bearer", or the password of "Basic"."""
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return value if kind.lower() == "bearer" else ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _cookie_name(request: Request) -> str:
    """Return the name of the cookie of this run: browsers do not tell the ports of a host apart."""
    port = _first(request, "Host").rpartition(":")[2]
    return f"unisono-{port if port.isdecimal() else 'run'}"


def _cookie(request: Request, name: str) -> str:
    try:
        found = http.cookies.SimpleCookie(_first(request, "Cookie"))
    except http.cookies.CookieError:
        return ""
    return found[name].value if name in found else ""


def _first(request: Request, header: str) -> str:
    return next(iter(request.headers.get_all(header)), "")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
