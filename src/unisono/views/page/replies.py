"""Answers over HTTP of whoever serves the page, and what a request says of where it comes from.

Two serve it: the head (`unisono.cluster.head.visitors`) and `unisono watch --web`
(`unisono.views.page.directory_server`). Each has rules of its own for tokens and for the names that it goes by.
"""

from __future__ import annotations

import http
import logging
from typing import Final
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from unisono.views.page import site

__all__ = ["SILENT", "file_of", "host_of", "is_from_elsewhere", "reply", "say"]

SILENT: Final = logging.getLogger("unisono.views.page.websockets")
"""Drops everything: websockets logs a traceback for whatever a stranger sends."""
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False


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
    """Return the file of the page at a path, unless the browser has it already; None: there is none."""
    asset = site.find(path)
    if asset is None:
        return None
    headers = {**site.HEADERS, "ETag": asset.etag}
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
