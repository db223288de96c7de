"""Files of the web page, answers over HTTP of whoever serves them, and what a request says of where it comes from.

The files are the same for every run, hold no secret, and fetch nothing from elsewhere. Two serve them: the head
(`unisono.cluster.head.visitors`) and `unisono watch --web` (`unisono.views.page.directory_server`). Each has rules of
its own for tokens and for the names that it goes by.
"""

from __future__ import annotations

import functools
import hashlib
import http
import logging
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Request, Response

__all__ = ["HEADERS", "SILENT", "WATCH", "file_of", "host_of", "is_from_elsewhere", "reply", "say"]

WATCH: Final = "/watch"
"""Path of the WebSocket that the page asks its questions over."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; connect-src 'self'; img-src 'self'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""To be sent with each file: a page that shows what scripts and machines have said runs no script but its own."""

SILENT: Final = logging.getLogger("unisono.views.page.websockets")
"""Drops everything: websockets logs a traceback for whatever a stranger sends."""
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False

_FOLDER: Final = Path(__file__).parent / "static"
# Browsers ask for /favicon.ico before they have read which icon the page names.
_OTHER_NAMES: Final = {"/": "/index.html", "/favicon.ico": "/favicon.svg"}
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _Asset(NamedTuple):
    """A file of the page."""

    content_type: str
    body: bytes
    etag: str
    """Of this content: a browser that has it asks with ``If-None-Match``."""


@functools.cache
def _files() -> dict[str, _Asset]:
    """Return all files by path. Only what was there is ever served, whatever a request's path says."""
    found = {}
    for file in sorted(_FOLDER.rglob("*")):
        if file.suffix in _TYPES:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[f"/{file.relative_to(_FOLDER).as_posix()}"] = _Asset(_TYPES[file.suffix], body, etag)
    return found


def reply(status: int, content_type: str, body: str | bytes, more: dict[str, str] | None = None) -> Response:
    """Return an answer, after which the connection ends."""
    data = body.encode() if isinstance(body, str) else body
    headers = Headers({**(more or {}), "Content-Type": content_type, "Connection": "close"})
    headers["Content-Length"] = str(len(data))
    return Response(status, http.HTTPStatus(status).phrase, headers, data)


def say(status: int, text: str) -> Response:
    """Return a sentence as an answer."""
    return reply(status, "text/plain; charset=utf-8", f"{text}\n")


def file_of(request: Request, path: str) -> Response | None:
    """Return the file of the page at a path (``/``, ``/main.js``, ``/uplot/uPlot.min.css``), unless the browser has it
    already; None: there is none.

    Args:
        path: of the request, without its query.
    """
    asset = _files().get(_OTHER_NAMES.get(path, path))
    if asset is None:
        return None
    headers = {**HEADERS, "ETag": asset.etag}
    if asset.etag in request.headers.get_all("If-None-Match"):
        return reply(304, asset.content_type, b"", headers)
    return reply(200, asset.content_type, asset.body, headers)


def host_of(request: Request) -> str:
    """Return the host that a request names, in lower case; "": none, several, or what is none."""
    hosts = request.headers.get_all("Host")
    try:
        return (urlsplit(f"//{hosts[0]}").hostname or "").rstrip(".").lower() if len(hosts) == 1 else ""
    except ValueError:
        return ""


def is_from_elsewhere(request: Request, *, is_secure: bool) -> bool:
    """Return whether a page of another site asks."""
    own = f"{'https' if is_secure else 'http'}://{request.headers.get('Host', '')}"
    return request.headers.get_all("Origin") not in ([], [own])
