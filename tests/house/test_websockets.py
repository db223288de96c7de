"""The head overrides methods of websockets' connections that are not for others: each release may change them."""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version

from websockets.asyncio.messages import Assembler
from websockets.asyncio.server import ServerConnection

from tests.house.rooms import ROOT
from unisono.cluster.head.door import Caller


def test_the_installed_websockets_is_one_that_the_head_was_read_with() -> None:
    """For a newer one: read `unisono.cluster.head.door` and `unisono.views.page.viewers` beside it, then raise the
    bound.
    """
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (need.partition("<")[2] for need in needs if need.startswith("websockets"))
    assert int(version("websockets").partition(".")[0]) < int(bound)


def test_what_the_head_overrides_is_there() -> None:
    for name in ("data_received", "process_event", "handshake", "connection_made"):
        assert name in vars(Caller)
        assert hasattr(ServerConnection, name)
    assert hasattr(Assembler, "paused") or "paused" in inspect.getsource(Assembler)
