"""Table of many runs: a row for each, with what their settings and arguments differ in, and whether bits are equal.

Runs that differ in nothing but their workers stand together: these ought to have the same bits.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from unisono.record.journal import Difference, compare
from unisono.record.journal.lines import is_number
from unisono.record.problems.evidence import redacted
from unisono.views.report.account import Account

__all__ = ["RunRow", "RunsTable", "runs_table"]

LONGEST: Final = 40
"""Characters of a value."""
FIGURES: Final = ("state", "steps", "last loss", "best loss", "time", "workers", "bits")
_OPTION: Final = re.compile(r"--?[A-Za-z]")
_LEFT_OUT: Final = ("first_epoch", "hash seed", "host", "system", "started")
"""Parts of a run's recipe and environment by which no two runs are told apart."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run."""

    name: str
    values: Sequence[str]
    """Of what runs differ in."""
    figures: Sequence[str]
    """`FIGURES`."""


@dataclass(frozen=True, kw_only=True)
class RunsTable:
    """Runs, those with the same values together."""

    names: Sequence[str]
    """Of what they differ in."""
    groups: Sequence[Sequence[RunRow]]

    @property
    def columns(self) -> list[str]:
        return ["run", *self.names, *FIGURES]

    def lines(self) -> list[str]:
        """Return the table as text: aligned columns, and an empty line between two groups."""
        groups = [[[each.name, *each.values, *each.figures] for each in group] for group in self.groups]
        rows = [self.columns, *(row for group in groups for row in group)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]

        def line(row: Sequence[str]) -> str:
            return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

        found = [line(self.columns), line(["-" * width for width in widths])]
        has_company = any(len(group) > 1 for group in groups)
        for number, group in enumerate(groups):
            found += ["", *map(line, group)] if number and has_company else list(map(line, group))
        return found


def runs_table(accounts: Sequence[Account]) -> RunsTable:
    """Return the table of some runs. Reads their journals to the end where their bits may be equal."""
    told = [dict(_settings(each)) for each in accounts]
    columns: dict[tuple[str, ...], str] = {}
    for name in dict.fromkeys(name for each in told for name in each):
        values = tuple(each.get(name, "") for each in told)
        if len(set(values)) > 1:
            columns.setdefault(values, name)  # an argument and the part of the recipe that follows from it are one
    keys = [tuple(values[place] for values in columns) for place in range(len(accounts))]
    rows = [
        RunRow(name=_cut(each.name), values=[*map(_cut, key)], figures=[*_figures(each), _bits(place, accounts, keys)])
        for place, (each, key) in enumerate(zip(accounts, keys, strict=True))
    ]
    groups: dict[tuple[str, ...], list[RunRow]] = {}
    for key, row in zip(keys, rows, strict=True):
        groups.setdefault(key, []).append(row)
    return RunsTable(names=[*map(_cut, columns.values())], groups=[*groups.values()])


def _settings(account: Account) -> Iterator[tuple[str, str]]:
    """Yield what a run was given: arguments, script, recipe, and all else that its bits depend on."""
    facts = account.facts
    yield from _arguments((_mapping(facts, "command")).get("arguments"))
    fingerprint, environment = _mapping(facts, "fingerprint"), _mapping(facts, "environment")
    yield "script text", str(fingerprint.get("script") or environment.get("script") or "")
    for part in (_mapping(facts, "recipe"), fingerprint, environment):
        for name, value in part.items():
            if name not in _LEFT_OUT and not isinstance(value, Mapping | list):
                yield str(name), str(value)


def _mapping(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, Mapping) else {}


def _arguments(words: Any) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a script by name, without what is known to be secret."""
    if not isinstance(words, list) or not words:
        return
    shown = shlex.split(redacted(shlex.join(map(str, words))))
    first = 2 if shown[0] == "-m" else 1
    yield "script", " ".join(shown[:first])
    found: dict[str, list[str]] = {}
    name = ""
    for word in shown[first:]:
        if _OPTION.match(word):
            name, has_value, value = word.partition("=")
            found.setdefault(name, []).extend([value] if has_value else [])
            name = "" if has_value else name
        else:
            found.setdefault(name or "arguments", []).append(word)
    for each, values in found.items():
        yield each, " ".join(values) or "yes"


def _figures(account: Account) -> list[str]:
    found = account.overview
    of = f" of {found.num_steps:,}" if found.num_steps > found.step + 1 else ""
    lows = [value for value in account.series.get("loss", {}).get("low", ()) if is_number(value)]
    return [
        found.state,
        f"{found.step + 1:,}{of}",
        f"{found.loss:.6g}" if found.loss is not None else found.loss_is,
        f"{min(lows):.6g}" if lows else "",
        account.took,
        str(found.num_workers or ""),
    ]


def _bits(place: int, accounts: Sequence[Account], keys: Sequence[tuple[str, ...]]) -> str:
    """Say to which run before it a run is equal; or else, where that has the same values, since when it is not."""
    this = accounts[place]
    ends = this.overview.step, this.overview.digest
    twins = [each for each in accounts[:place] if ends[1] and (each.overview.step, each.overview.digest) == ends]
    mates = [each for each, key in zip(accounts[:place], keys[:place], strict=True) if key == keys[place]]
    for other in [*twins, *mates[:1]]:
        try:
            said = compare(other.directory, this.directory)
        except Difference as difference:
            if other in twins:
                continue
            if equal := re.match(r"equal for (\d+ steps?)", str(difference)):
                return f"equal to {_cut(other.name)} for {equal[1]}"
            return f"differs from {_cut(other.name)} at step {difference.step}"
        except (OSError, ValueError):
            return "unknown"
        so_far = " so far" if said.startswith("identical so far") else ""
        return f"equal to {_cut(other.name)}{so_far}"
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
