"""A run's directory that somebody else has written has no command send, execute or print what it should not."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unisono.cli import COMMANDS, main
from unisono.cli.reach import NotGoing, find
from unisono.errors import UsageError
from unisono.owned import MOST_BYTES, read_owned
from unisono.rundir import ADDRESS_FILE, TOKEN_FILE

SECRET = "hf_a-secret-of-mine"
NOBODY = 65534


class Trap:
    """A port to which nothing may be sent, and a directory that names it as that of a head."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.folder = folder / "run"
        self.folder.mkdir()
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.url = f"ws://127.0.0.1:{self.socket.getsockname()[1]}"
        self.say(url=self.url)
        (self.folder / TOKEN_FILE).write_text("of-the-run")

    def say(self, **known: object) -> None:
        (self.folder / ADDRESS_FILE).write_text(json.dumps(known))

    @property
    def is_sprung(self) -> bool:
        """Whether anybody has connected."""
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Trap]:
    found = Trap(tmp_path)
    with found.socket:
        yield found


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a path be that of another user, or this user be another one where only root gives files away."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def link(trap: Trap, name: str) -> None:
    (trap.folder / name).unlink()
    (trap.folder / name).symlink_to(trap.secret)


def second_name(trap: Trap, name: str) -> None:
    (trap.folder / name).unlink()
    (trap.folder / name).hardlink_to(trap.secret)


def pipe(trap: Trap, name: str) -> None:
    """Whoever opens it as a file waits for ever."""
    (trap.folder / name).unlink()
    os.mkfifo(trap.folder / name)


def huge(trap: Trap, name: str) -> None:
    os.truncate(trap.folder / name, MOST_BYTES + 1)


def folder(trap: Trap, name: str) -> None:
    (trap.folder / name).unlink()
    (trap.folder / name).mkdir()


HOSTILE: dict[str, Callable[[Trap, str], None]] = {
    "a link": link,
    "a second name of a file": second_name,
    "a pipe": pipe,
    "a huge file": huge,
    "a directory": folder,
}


@pytest.mark.parametrize("name", [ADDRESS_FILE, TOKEN_FILE])
@pytest.mark.parametrize("how", HOSTILE)
def test_what_is_no_file_of_the_directory_is_believed_by_no_command(how: str, name: str, trap: Trap) -> None:
    HOSTILE[how](trap, name)
    with pytest.raises(UsageError) as caught:
        find(str(trap.folder))
    assert not isinstance(caught.value, NotGoing)
    assert f"{trap.folder / name} is " in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["", ADDRESS_FILE, TOKEN_FILE])
def test_what_belongs_to_another_user_is_believed_by_no_command(
    name: str, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_away(trap.folder / name, monkeypatch)
    with pytest.raises(UsageError, match=r"of .*uid \d+.*, and this command runs as .*uid \d+"):
        find(str(trap.folder))


def test_no_path_in_the_directory_is_followed(trap: Trap) -> None:
    """Earlier versions wrote there where the token is; the directory may be mounted elsewhere on this machine."""
    trap.say(url=trap.url, token_file=str(trap.secret))
    assert find(str(trap.folder)).token == "of-the-run"
    moved = trap.folder.rename(trap.folder.with_name("mounted elsewhere"))
    assert find(str(moved)).token == "of-the-run"
    latest = trap.folder.with_name("latest")
    latest.symlink_to(moved)
    assert find(str(latest)).token == "of-the-run"  # the link is the user's word, not the directory's


@pytest.mark.parametrize("url", ["", 7, None, [], "http://127.0.0.1:1", "ws://127.0.0.1:99999", "ws://a\x1b]0;b\x07:1"])
def test_an_address_that_is_none_is_refused_in_words(url: object, trap: Trap) -> None:
    trap.say(url=url)
    with pytest.raises(UsageError):
        find(str(trap.folder))


ASKING = {
    "status": ["status", "RUN"],
    "stop": ["stop", "RUN"],
    "scale": ["scale", "RUN", "2"],
    "join": ["join", "RUN"],
    "watch": ["watch", "--once", "RUN"],
    "watch --web": ["watch", "--web", "RUN"],
    "doctor": ["doctor", "RUN"],
}


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("how", ["a path", "a link", "another user's"])
def test_no_command_sends_a_file_of_the_user_to_who_wrote_the_directory(
    how: str, command: str, trap: Trap, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does it connect to the address that stands there."""
    assert command.split()[0] in COMMANDS
    if how == "a path":
        (trap.folder / TOKEN_FILE).unlink()
        trap.say(url=trap.url, token_file=str(trap.secret))
    elif how == "a link":
        link(trap, TOKEN_FILE)
    else:
        (trap.folder / TOKEN_FILE).write_text(SECRET)
        given_away(trap.folder, monkeypatch)
    words = [word.replace("RUN", str(trap.folder)) for word in ASKING[command]]
    monkeypatch.setattr("sys.argv", ["unisono", *words])
    monkeypatch.setattr("unisono.page.local.run", lambda *_: 0)  # a page of files, which goes on until Ctrl-C
    with pytest.raises(SystemExit):
        main()
    assert not trap.is_sprung
    out, err = capfd.readouterr()
    assert SECRET not in out + err


def test_a_shared_directory_is_no_reason_to_refuse_an_own_file(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    given_away(trap.folder, monkeypatch)
    if os.geteuid() == 0:
        assert read_owned(trap.folder, TOKEN_FILE, is_folder_shared=True) == b"of-the-run"
