"""The settings of a run: declared once, read from the command line, from Python and from the file beside a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from tests.docs.settings_page import PAGE, page
from unisono.cli.options import options_of
from unisono.cli.run import run
from unisono.cli.settings_file import in_file
from unisono.core.errors import UsageError
from unisono.core.settings import (
    DEFAULTS,
    FILE,
    GROUPS,
    SETTINGS,
    RunSettings,
    gathered,
    pairs,
    parse_time,
    table,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("60s", 60.0), ("2m", 120.0), ("1h", 3600.0), ("1.5s", 1.5), (".5s", 0.5)]
)
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "60", "s", "0s", "-1s", "nans", "1e3s", "2 m", "1d"])
def test_other_texts_are_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        parse_time(text)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_is_read_as_it_was_shown(name: str) -> None:
    """What one command writes for another one, which reads it (`launch`, the launcher kubernetes)."""
    setting = SETTINGS[name]
    values: dict[Any, Any] = {str: "a=b", int: 7, float: 0.25, bool: True}
    value = setting.choices[-1] if setting.choices else values.get(setting.kind, ("a", "b"))
    given: dict[str, Any] = {param.name: None for param in run.params} | {"others": ()}
    context = run.make_context("run", ["script.py", *setting.words(value)])
    given |= context.params
    assert getattr(options_of_unchecked(given), setting.field) == value


def options_of_unchecked(given: dict[str, Any]) -> RunSettings:
    shown = [
        (setting, setting.checked(given[setting.field]))
        for setting in SETTINGS.values()
        if given.get(setting.field) not in (None, ())
    ]
    return RunSettings(**gathered([*shown, *pairs(given["others"])]))


def test_each_setting_has_a_default_that_is_one_of_its_values() -> None:
    for setting in SETTINGS.values():
        assert setting.default == getattr(DEFAULTS, setting.field)
        assert setting.help.endswith("."), setting.name
        if setting.choices and setting.default is not None:
            assert setting.default in setting.choices
        assert setting.group == "internal" or setting.group in GROUPS


def test_the_help_shows_at_most_24_options() -> None:
    shown = [param for param in run.params if isinstance(param, click.Option) and not param.hidden]
    assert len(shown) <= 24
    help_ = run.get_help(click.Context(run))
    assert [help_.index(f"\n{title}:") for title in ("Workers", "Machines", "Network", "Keeping")] == sorted(
        help_.index(f"\n{title}:") for title in ("Workers", "Machines", "Network", "Keeping")
    )


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["heartbeat"], "--set takes NAME=VALUE, such as --set heartbeat=500ms; got 'heartbeat'"),
        (["heart-beat=1s"], "there is no setting heart-beat; did you mean heartbeat?"),
        (["xyzzy=1"], "there is no setting xyzzy; `unisono run --dry-run SCRIPT` prints all of them"),
        (["kill-after=3"], "--set kill-after is a time above 0 with its unit, such as 500ms, 60s, 2m or 1h, got '3'"),
        (["when-cut=stop"], "--set when-cut is one of wait, majority, go-on; got 'stop'"),
        (["strict=perhaps"], "--strict is yes or no, got 'perhaps'"),
        (["wait-for=x"], "--wait-for is a whole number, got 'x'"),
        (["efficiency=nan"], "--set efficiency is a number, got 'nan'"),
    ],
)
def test_a_wrong_setting_is_named(texts: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        pairs(texts)
    assert str(caught.value) == words


def test_the_last_value_of_a_setting_counts_and_all_of_a_list() -> None:
    """As for the options of any command."""
    assert gathered(pairs(["pass-env=A", "pass-env=B"])) == {"pass_env": ("A", "B")}
    assert gathered(pairs(["workers=2", "workers=3"])) == {"workers": "3"}


# -- the file beside a script --------------------------------------------------------------------------


def options(folder: Path, *words: str) -> Any:
    (folder / "train.py").touch()
    return options_of(run.make_context("run", [str(folder / "train.py"), *words]).params)


def test_the_command_line_comes_before_the_file_before_the_default(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        'workers = 3\nthreads = 2\nheartbeat = "400ms"\nstrict = true\ncopies-to = ["a", "b"]\n[ray]\naddress = "x:1"\n'
    )
    found = options(tmp_path, "--workers", "2", "--set", "kill-after=2m")
    known = table(found)
    file = str(tmp_path / FILE)
    assert known["workers"] == ("2", "command line")
    assert known["kill-after"] == ("120s", "command line")
    assert known["threads"] == ("2", file)
    assert known["heartbeat"] == ("0.4s", file)
    assert known["strict"] == ("yes", file)
    assert known["copies-to"] == ("a, b", file)
    assert known["ray.address"] == ("x:1", file)
    assert known["exchange"] == ("auto", "default")
    assert (found.workers, found.threads, found.heartbeat_s) == ("2", 2, 0.4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers = ", "is not a file of settings: "),
        ("wokers = 2", "there is no setting wokers; did you mean workers?"),
        ("heartbeat = 3", 'heartbeat takes a time with its unit, such as "60s"; got 3'),
        ('token-file = "x"', "token-file can be given only on the command line, not in a file: --set token-file"),
        ('ssh = "x"', "ssh can be given only on the command line"),
        ('remote-python = "x"', "remote-python can be given only on the command line"),
        ('sink = "mine:sink"', "sink can be given only on the command line"),
        ("overwrite = true", "overwrite can be given only on the command line"),
        ('function = "x"', "function can be given only on the command line"),
    ],
)
def test_a_wrong_file_is_refused_in_words(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text + "\n")
    with pytest.raises(UsageError) as caught:
        [*in_file(tmp_path)]
    assert str(caught.value).startswith(f"{tmp_path / FILE}")
    assert words in str(caught.value)


def test_a_file_of_somebody_else_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.toml").write_text("workers = 2\n")
    (tmp_path / FILE).symlink_to(tmp_path / "other.toml")
    assert [*in_file(tmp_path)] == []
    assert f"the settings in {tmp_path / FILE} are not used: " in capsys.readouterr().err


# -- the documentation ---------------------------------------------------------------------------------


def test_the_page_of_settings_is_made_from_their_declaration() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "python -m tests.docs.settings_page writes it"
