"""What an earlier version called otherwise is refused with the new spelling, row by row."""

from __future__ import annotations

import click
import pytest

from unisono import cli
from unisono.cli import COMMANDS
from unisono.cli.respelled import COMMANDS as OLD_COMMANDS
from unisono.cli.respelled import OPTIONS, WORDS, respelled
from unisono.core.settings import OLD_NAMES, SETTINGS

MOVED = [name for name, setting in SETTINGS.items() if not setting.option and "." not in name]
ROWS = [
    *((command, "") for command in OLD_COMMANDS),
    *((command, option) for command, options in OPTIONS.items() for option in options),
    *(("run", f"--{name}") for name in OLD_NAMES if name != "sinks"),
    *(("run", f"--{name}") for name in MOVED),
]


@pytest.mark.parametrize(("command", "option"), ROWS)
def test_an_old_spelling_is_refused_with_the_new_one(
    command: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = respelled([command, option] if option else [command])
    assert new
    words = [command, *([option, "1"] if option else [])]
    monkeypatch.setattr("sys.argv", ["unisono", *words])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert new in error
    assert "Did you mean" not in error, "one answer"


@pytest.mark.parametrize(("command", "word"), [(command, word) for command, words in WORDS.items() for word in words])
def test_an_old_word_is_refused_with_the_new_one(
    command: str, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["unisono", command, "run", word])
    with pytest.raises(SystemExit):
        cli.main()
    assert respelled([command, word]) in capsys.readouterr().err


def test_what_was_never_there_has_no_new_spelling() -> None:
    assert not respelled(["launch"])
    assert not respelled(["run", "--no-such-option"])
    assert not respelled(["watch", "--late-s"])
    assert not respelled(["run", "late-s"])


def test_nothing_is_both_old_and_new() -> None:
    assert not {*OLD_COMMANDS} & {*COMMANDS}
    group = click.Context(cli._group)
    for command, options in OPTIONS.items():
        known = cli._group.get_command(group, command)
        assert known is not None
        assert not {*options} & {option for param in known.params for option in [*param.opts, *param.secondary_opts]}
