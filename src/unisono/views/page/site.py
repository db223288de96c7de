"""Files of the web page. They are the same for every run, hold no secret, and fetch nothing from elsewhere."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["HEADERS", "WATCH", "Asset", "find"]

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

_FOLDER: Final = Path(__file__).parent / "static"
# Browsers ask for /favicon.ico before they have read which icon the page names.
_OTHER_NAMES: Final = {"/": "/index.html", "/favicon.ico": "/favicon.svg"}
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset(msgspec.Struct, frozen=True):
    """A file of the page."""

    content_type: str
    body: bytes
    etag: str
    """Of this content: a browser that has it asks with ``If-None-Match``."""


def find(path: str) -> Asset | None:
    """Return the file at a path of the site (``/``, ``/main.js``, ``/uplot/uPlot.min.css``); None: there is none.

    Args:
        path: of a request, without its query.
    """
    return _files().get(_OTHER_NAMES.get(path, path))


@functools.cache
def _files() -> dict[str, Asset]:
    """Return all files by path. Only what was there is ever served, whatever a request's path says."""
    found = {}
    for file in sorted(_FOLDER.rglob("*")):
        if file.suffix in _TYPES:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[f"/{file.relative_to(_FOLDER).as_posix()}"] = Asset(_TYPES[file.suffix], body, etag)
    return found
