"""How a browser gets the address of a page, and nobody else of this machine.

The address holds a token, and other users can read the arguments of all processes. So the browser is given a file that
only its user can read, from which it goes on by itself.
"""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Iterator
from typing import Final

from unisono.system.lifetime import scratch_folder

__all__ = ["redirecting"]

PAGE: Final = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}">
<title>Unisono</title>
<a href="{0}">the page of the run</a>
"""


@contextlib.contextmanager
def redirecting(address: str) -> Iterator[str]:
    """Yield the URL of a file from which a browser goes on to an address. The file is removed at the end."""
    with scratch_folder("unisono-page-") as folder:
        file = folder / "page.html"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as writing:
            writing.write(PAGE.format(html.escape(address)))
        yield file.as_uri()
