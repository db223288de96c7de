"""Who may do what at the head's port, request by request."""

from __future__ import annotations

import base64
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from unisono.cluster.head.door import Allowance
from unisono.cluster.head.visitors import Visitors
from unisono.cluster.trust.secret import proof_of, reader_token

TOKEN = "the-token-of-the-run"
READER = reader_token(TOKEN)
HOST = "10.0.0.5:4000"
SOCKET = {"Upgrade": "websocket", "Connection": "Upgrade"}
SECRET = {"state": "training", "job": {"arguments": ["--key", "secret"]}}


class Gate:
    """The visitors of a head at `HOST`, and what was refused."""

    def __init__(self, *, full: str = "", is_secure: bool = True, url: str = "wss://lab.example:4000") -> None:
        self.refused: list[str] = []
        self._visitors = Visitors(
            TOKEN,
            url,
            is_secure=is_secure,
            status=lambda: SECRET,
            metrics=lambda: ("text/plain; version=0.0.4", "unisono_step 4\n"),
            may_watch=lambda: full,
            refused=lambda why, connection: self.refused.append(why),
        )

    def ask(self, path: str, headers: dict[str, str] | None = None, host: str = HOST) -> Response | None:
        given = Headers({"Host": host, **(headers or {})})
        return self._visitors.respond(cast("Any", SimpleNamespace(close_timeout=1.0)), Request(path, given))

    def code(self, path: str, headers: dict[str, str] | None = None, host: str = HOST) -> int:
        """The status of the answer; 101: the sender may have the WebSocket."""
        answer = self.ask(path, headers, host)
        return 101 if answer is None else answer.status_code


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()}


def cookie(token: str, port: int = 4000) -> dict[str, str]:
    return {"Cookie": f"other=1; unisono-{port}={token}"}


def from_page(origin: str = f"https://{HOST}") -> dict[str, str]:
    return {**SOCKET, "Origin": origin}


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/health", {}, 200),
        ("/proof?q", {}, 200),
        ("/proof/reader?q", {}, 200),
        # Nobody's.
        ("/", {}, 401),
        ("/status", {}, 401),
        ("/metrics", {}, 401),
        ("/index.html", {}, 401),
        ("/", SOCKET, 401),
        ("/watch", SOCKET, 401),
        ("/status", bearer("wrong"), 401),
        ("/status", bearer(READER[:-1]), 401),
        ("/status", {"Authorization": READER}, 401),
        ("/status", {"Authorization": "Basic \xff"}, 401),
        ("/?token=wrong", {}, 401),
        ("/watch?token=wrong", SOCKET, 401),
        ("/watch", {**from_page(), **cookie("wrong")}, 401),
        ("/watch", {**from_page(), **cookie(READER, 4001)}, 401),
        # A member's, with the run's token in a header and nowhere else.
        ("/", {**SOCKET, **bearer(TOKEN)}, 101),
        ("/", {**from_page(), **bearer(TOKEN)}, 403),
        (f"/?token={TOKEN}", SOCKET, 403),
        ("/", {**SOCKET, **cookie(TOKEN)}, 403),
        ("/", {**SOCKET, **bearer(READER)}, 403),
        (f"/?token={READER}", SOCKET, 403),
        ("/", {**from_page(), **cookie(READER)}, 403),
        ("/elsewhere", {**SOCKET, **bearer(TOKEN)}, 404),
        # A viewer's.
        ("/watch", {**SOCKET, **bearer(READER)}, 101),
        ("/watch", {**SOCKET, **bearer(TOKEN)}, 101),
        (f"/watch?token={READER}", SOCKET, 101),
        (f"/watch?token={READER}", from_page(), 101),
        ("/watch", {**from_page(), **cookie(READER)}, 101),
        ("/status", bearer(READER), 200),
        ("/metrics", bearer(READER), 200),
        ("/metrics", basic(READER), 200),
        (f"/metrics?token={READER}", {}, 200),
        (f"/?token={READER}", {}, 200),
        ("/nowhere", bearer(READER), 404),
        # Pages of other sites.
        ("/watch", {**from_page("https://evil.example"), **cookie(READER)}, 403),
        ("/watch", {**from_page("https://evil.example"), **bearer(READER)}, 403),
        ("/watch", {**from_page(f"http://{HOST}"), **cookie(READER)}, 403),
        ("/watch", {**from_page("https://10.0.0.5:4001"), **cookie(READER)}, 403),
        ("/watch", {**from_page("null"), **cookie(READER)}, 403),
        ("/watch", {**SOCKET, **cookie(READER)}, 403),
    ],
)
def test_who_may_do_what(path: str, headers: dict[str, str], code: int) -> None:
    assert Gate().code(path, headers) == code


@pytest.mark.parametrize(
    "path",
    [
        *("/../site.py", "/../../secret.py", "/%2e%2e/site.py", "//etc/passwd", "/..\\site.py", "/static/../site.py"),
        *("/index.html/", "/./index.html", "/token", "/journal.jsonl", "\x00", "/" + "a/" * 1000),
    ],
)
def test_only_the_files_of_the_page_are_ever_given(path: str) -> None:
    assert Gate().code(path, bearer(TOKEN)) == 404


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("10.0.0.5:4000", True),
        ("127.0.0.1:4000", True),
        ("[fd00::2]:4000", True),
        ("localhost:4999", True),
        ("lab.example:4000", True),
        ("LAB.example.:4000", True),
        (f"{socket.gethostname()}:4000", True),
        (f"{socket.gethostname().partition('.')[0]}.cluster.example", True),
        ("evil.example:4000", False),
        ("localhost.evil.example:4000", False),
        ("10.0.0.5.evil.example", False),
        ("", False),
        ("[", False),
        ("a b", False),
    ],
)
def test_a_browser_is_answered_under_a_name_of_the_head_only(host: str, is_own: bool) -> None:
    """Otherwise a page of another site could have its own name point here, and read the answers."""
    gate = Gate()
    assert (gate.code(f"/?token={READER}", host=host) == 421) is not is_own
    headers = {**from_page(f"https://{host}"), **bearer(READER)}
    assert (gate.code("/watch", headers, host=host) == 421) is not is_own
    assert gate.code("/metrics", bearer(READER), host=host) == 200, "a program that has the token is no page"


def test_a_browser_gets_a_cookie_for_looking_and_never_the_token_of_the_run() -> None:
    for is_secure, token in ((True, READER), (True, TOKEN), (False, READER)):
        answer = Gate(is_secure=is_secure).ask(f"/?token={token}")
        assert answer is not None
        name, _, rest = answer.headers["Set-Cookie"].partition("=")
        value, *flags = rest.split("; ")
        assert (name, value) == ("unisono-4000", READER)
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(flags)
        assert ("Secure" in flags) is is_secure
        assert TOKEN.encode() not in answer.serialize()
        assert READER.encode() not in (answer.body or b""), "scripts of the page do not see it"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_who_only_looks_does_not_see_the_settings_of_the_run() -> None:
    full, reduced = Gate().ask("/status", bearer(TOKEN)), Gate().ask("/status", bearer(READER))
    assert full is not None
    assert reduced is not None
    assert b"--key" in (full.body or b"")
    assert reduced.body == b'{"state": "training"}'


def test_where_nobody_else_may_watch_the_answer_says_why() -> None:
    gate = Gate(full="4096 are watching this run already")
    answer = gate.ask("/watch", {**SOCKET, **bearer(READER)})
    assert answer is not None
    assert (answer.status_code, answer.body) == (429, b"4096 are watching this run already\n")
    assert gate.code("/", {**SOCKET, **bearer(TOKEN)}) == 101, "a member comes in"


def test_who_wants_to_do_more_than_look_is_told_to_the_user() -> None:
    gate = Gate()
    gate.ask("/", {**SOCKET, **bearer(READER)})
    gate.ask("/watch", {**from_page("https://evil.example"), **cookie(READER)})
    assert gate.refused == ["with a token for watching, to do more", "from a page of another site"]


def test_the_proof_for_those_who_look_is_made_with_their_token() -> None:
    answer = Gate().ask("/proof/reader?question")
    assert answer is not None
    assert answer.body == (proof_of(READER, "question") + "\n").encode()


def test_a_page_without_a_token_says_where_to_get_one() -> None:
    answer = Gate().ask("/")
    assert answer is not None
    assert b"unisono watch --once RUN" in (answer.body or b"")
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_what_a_viewer_sends_has_a_bound() -> None:
    now = [0.0]
    allowance = Allowance(1000, lambda: 100.0, lambda: now[0])
    assert allowance.take(600) == 0
    assert allowance.take(400) == 0
    assert allowance.take(100) == 1.0
    now[0] = 1.0
    assert allowance.take(0) == 0
    now[0] = 6.0
    assert allowance.take(500) == 0, "after five seconds, 500 bytes more"
    assert allowance.take(200) == 2.0
