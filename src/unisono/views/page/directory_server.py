"""Server of the page for runs that are seen as directories: finished ones, or those of a head that is not asked.

It listens on 127.0.0.1 only. Other users of the machine can connect to that as well, and any web site that the user's
browser shows can try to. So a question takes the token that is in the printed URL (behind ``#``, which browsers do not
send), and a request must name this server as its host (a name that an attacker's DNS points here does not) and, if it
comes from a page, as the page's origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import signal
import sys
import time
import webbrowser
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from msgspec.json import encode
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from unisono.record.history import History
from unisono.record.overview import with_sentence
from unisono.system.tasks import is_for_person
from unisono.views.page import site
from unisono.views.page.answers import answer
from unisono.views.page.opening import redirecting
from unisono.views.page.site import SILENT, file_of, host_of, is_from_elsewhere, say
from unisono.views.page.viewers import MOST_EVENTS, Feed, Viewers

__all__ = ["WRONG_TOKEN", "Directories", "run"]

HOST: Final = "127.0.0.1"
NAMES: Final = (HOST, "localhost")
SLOWEST: Final = 20
"""Looking at the runs may take one part in so many of the time."""
MAX_QUESTION_BYTES: Final = 1 << 16
CLOSE_S: Final = 1.0
WRONG_TOKEN: Final = 4401
"""Code with which a connection without the token is closed: a browser shows a page no other answer."""


class Directories:
    """Server of the page for several runs.

    Args:
        runs: used by one thread at a time.
        port: 0: any.
        token: that questions need.
    """

    def __init__(self, runs: Sequence[History], port: int, token: str) -> None:
        self._runs = runs
        self._port = port
        self._token = token
        self._reader = ThreadPoolExecutor(1, "unisono-reader")
        self._feeds = [Feed(number) for number in range(len(runs))]
        self._viewers = Viewers(self._feeds, self._refresh, self._answer)
        self._told = [b""] * len(runs)
        self._next = [-1] * len(runs)
        """The event of each run that was not told yet; -1: unknown."""
        self._rests_until = 0.0

    @property
    def url(self) -> str:
        """The address for a browser."""
        return f"http://{HOST}:{self._port}/#token={self._token}"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Directories]:
        """Serve as long as the context lasts.

        Raises:
            OSError: the port is taken.
        """
        server = await serve(
            self._talk,
            HOST,
            self._port,
            process_request=self._respond,
            compression=None,
            max_size=MAX_QUESTION_BYTES,
            close_timeout=CLOSE_S,
            logger=SILENT,
        )
        self._port = next(iter(server.sockets)).getsockname()[1]
        try:
            yield self
        finally:
            self._viewers.end()
            server.close()
            await server.wait_closed()
            self._reader.shutdown(wait=False, cancel_futures=True)

    # -- requests ------------------------------------------------------------------------------------

    def _respond(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request for a file; None: the request is for the WebSocket."""
        if host_of(request) not in NAMES:  # any port: it may come through `ssh -L`
            return say(421, f"this is {self.url.partition('#')[0]}")
        path = request.path.partition("?")[0]
        if path != site.WATCH:
            return file_of(request, path) or say(404, "there is no such file")
        return say(403, "asked by a page of another site") if is_from_elsewhere(request, is_secure=False) else None

    async def _talk(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        given = parse_qs(connection.request.path.partition("?")[2]).get("token", [""])
        if not hmac.compare_digest(given[0].encode(errors="replace"), self._token.encode()):
            await connection.close(WRONG_TOKEN, "the token in the printed URL is needed")
            return
        await self._viewers.serve(connection)

    # -- the runs, in the thread that reads them -----------------------------------------------------

    async def _answer(self, question: dict[str, Any]) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._answer_now, question)

    def _answer_now(self, question: dict[str, Any]) -> bytes:
        for run in self._runs:
            run.complete()  # of a long run that nobody has looked at before, the first answer takes some seconds
        return encode(answer(self._runs, question))

    async def _refresh(self) -> None:
        since = time.monotonic()
        if since < self._rests_until:
            return
        for number, feed in enumerate(self._feeds):
            present, events = await asyncio.get_running_loop().run_in_executor(self._reader, self._news, number)
            for event in events:
                feed.add(event)
            if present:
                feed.show(present)
        now = time.monotonic()
        self._rests_until = now + SLOWEST * (now - since)

    def _news(self, number: int) -> tuple[bytes, list[bytes]]:
        """Return how a run is now, for its feed, and its new events; b"": it is over, and nothing has changed."""
        history = self._runs[number]
        try:
            history.refresh()
            overview = history.overview()
            page = history.events(self._next[number], MOST_EVENTS)
        except Exception as error:
            return b'"error":%b' % encode(f"the run cannot be read: {error}"), []
        events = page["events"] if self._next[number] >= 0 else []
        self._next[number] = page["next"]
        before, self._told[number] = self._told[number], encode(msgspec.structs.replace(overview, time=0.0))
        present = b"" if overview.ended and before == self._told[number] else b'"overview":%b' % encode(overview)
        return present, [encode(with_sentence(event)) for event in events]


def run(directories: Sequence[Path], port: int = 0, open_browser: bool = False) -> int:
    """Serve the page for runs until Ctrl-C, and print its URL. Returns the exit code.

    Args:
        directories: of runs that have ended or go on; the page shows them over each other.
        port: of 127.0.0.1; 0: any.
    """
    return asyncio.run(_run([History(directory) for directory in directories], port, open_browser))


async def _run(runs: Sequence[History], port: int, open_browser: bool) -> int:
    over = asyncio.Event()
    page = Directories(runs, port, secrets.token_urlsafe(24))
    with _until_signal(over):
        try:
            async with page.serving():
                with redirecting(page.url) as file:
                    # Where the output goes into a file or a pipe, others may be able to read it.
                    print(f"unisono: the page is at {page.url if is_for_person(sys.stdout, os.environ) else file}")
                    print("unisono: only this machine can open it; Ctrl-C ends it", flush=True)
                    if open_browser:
                        await asyncio.to_thread(webbrowser.open, file)
                    await over.wait()
        except OSError as error:
            print(f"unisono: port {port} of {HOST} cannot be used: {error.strerror or error}", file=sys.stderr)
            return 2
    return 0


@contextlib.contextmanager
def _until_signal(over: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = [
        each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN
    ]
    for number in signals:
        loop.add_signal_handler(number, over.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
