"""The file ``unisono.toml`` beside a script: settings of ``unisono run`` and `unisono.launch` that its user gives
often.

workers = "2:8"
heartbeat = "500ms"
copies-to = ["s3://bucket/run"]
kubernetes.image = "registry/train:1"
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.cli.saying import say
from unisono.core.errors import UsageError
from unisono.core.settings import FILE, Setting, setting_named
from unisono.system.owned import NotOwned, read_owned

__all__ = ["in_file"]


def in_file(folder: Path) -> Iterator[tuple[Setting, Any]]:
    """Yield the settings of the file in a folder, and their values; nothing where there is no file.

    A file that another user can have written is not read: a line on standard error says so.

    Raises:
        UsageError: the file is no TOML, or has a setting that is not known, that no file may have, or that is wrong.
    """
    path = folder / FILE
    try:
        found = tomllib.loads(read_owned(folder or Path(), FILE).decode())
    except (FileNotFoundError, NotADirectoryError):
        return
    except NotOwned as error:
        say(f"unisono: the settings in {path} are not used: {error}", err=True)
        return
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise UsageError(f"{path} is not a file of settings: {error}") from error
    for name, value in _flat(found):
        try:
            setting = setting_named(name)
            if not setting.in_file or setting.group == "internal":
                raise UsageError(f"{name} can be given only on the command line, not in a file: {setting.spelled()}")
            if setting.is_time and not isinstance(value, str):
                raise UsageError(f'{name} takes a time with its unit, such as "60s"; got {value}')
            yield setting, setting.checked(value)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def _flat(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value
