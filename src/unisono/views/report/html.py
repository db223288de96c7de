"""The report as HTML: one file with its own style, data and chart library. Nothing is fetched when it is opened.

Whatever a run has named (metrics, workers, reasons, directories) is escaped: it may be anything.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from unisono.core.words import count, duration
from unisono.record.journal.lines import is_number
from unisono.record.overview import Interrupted, Presence
from unisono.record.problems.evidence import redacted
from unisono.views import date
from unisono.views.report.account import Account, WorkerAccount, words_of
from unisono.views.report.runs_table import RunsTable

__all__ = ["report"]

PARTS: Final = {
    "compute": "computing",
    "data": "loading data",
    "exchange": "adding sums",
    "network": "network",
    "waiting": "waiting",
    "update": "update",
    "other": "other",
}
"""Parts of a step's time, in the order in which they are drawn."""
MOST_ROWS: Final = 64
"""Of workers, interruptions and sentences: the rest is counted."""
MOST_METRICS: Final = 24


def report(accounts: Sequence[Account], made: float, table: RunsTable | None = None) -> str:
    """Return the report as the text of an HTML file.

    Args:
        accounts: of one run, or of several that are shown side by side.
        made: when, in seconds since 1970.
        table: of these runs, where there are several.
    """
    title = accounts[0].name if len(accounts) == 1 else " | ".join(each.name for each in accounts)
    charts = _charts(accounts)
    body = [
        f"<header><h1>{escape(title)}</h1>",
        *(f'<p class="lead">{_marked(each, accounts)}{escape(each.sentence)}</p>' for each in accounts),
        "</header><main>",
    ]
    if table is not None:
        body += [_section("How the runs differ", _runs(table))]
    if len(accounts) > 1:
        body += [_section("Side by side", _comparison(accounts))]
    body += (
        [_section("Curves", "".join(_chart(number, chart) for number, chart in enumerate(charts)))] if charts else []
    )
    for each in accounts:
        body.append(_one(each, f"{each.name}: " if len(accounts) > 1 else ""))
    body.append(f"</main><footer>Made by unisono report on {date(made)}.</footer>")
    return _page(title, "\n".join(body), charts)


def _one(account: Account, prefix: str) -> str:
    """Return the sections about one run."""
    sections = [_section(f"{prefix}Result", _result(account))]
    if account.advice:
        sections.append(_section(f"{prefix}The largest losses of time", _advice(account)))
    if account.workers:
        sections.append(_section(f"{prefix}Where the time went", _times(account)))
    sections.append(_section(f"{prefix}Interruptions", _interruptions(account)))
    if account.presences:
        sections.append(_section(f"{prefix}Who was there", _presences(account)))
    if account.problems:
        sections.append(_section(f"{prefix}What went wrong", _problems(account)))
    sections.append(_section(f"{prefix}Recipe and environment", _facts(account)))
    if account.proof:
        sections.append(_section(f"{prefix}Certificate", _pairs(account.proof)))
    if account.notes:
        sections.append(_section(f"{prefix}What could not be read", _list(account.notes)))
    return "\n".join(sections)


# -- sections ----------------------------------------------------------------------------------------


def _result(account: Account) -> str:
    found = account.overview
    rows: list[tuple[str, str]] = [
        ("State", f"{found.state}{': ' if found.reason else ''}{found.reason}"),
        (
            f"{found.unit.capitalize()}s",
            f"{found.step + 1:,}" + (f" of {found.num_steps:,}" if found.num_steps else ""),
        ),
        ("Last loss", _number(found.loss) if found.loss is not None else found.loss_is or "unknown"),
    ]
    rows += [(f"Evaluation: {name}", _number(value)) for name, value in found.evaluation.items()]
    rows += [(name, _number(value)) for name, value in list(found.logs.items())[:MOST_METRICS]]
    if found.started:
        rows.append(("Began", date(found.started)))
    if account.took:
        rows.append(("Took", account.took))
    if account.overview.efficiency is not None:
        rows.append(("Efficiency", f"{account.overview.efficiency:.0%} of the workers' time was spent computing"))
    lost = [each.seconds for each in account.interruptions if each.seconds is not None]
    if account.interruptions:
        rows.append(("Interrupted", f"{_times_word(len(account.interruptions))}, {duration(sum(lost))} in all"))
    if found.checkpoint:
        rows.append(("Newest checkpoint", found.checkpoint))
    return _pairs(rows)


def _runs(table: RunsTable) -> str:
    """Return a table with a row for each run, and a body for each group."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    bodies = (
        "".join(
            f'<tr><th scope="row">{escape(row.name)}</th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in (*row.values, *row.figures))
            + "</tr>"
            for row in group
        )
        for group in table.groups
    )
    body = "".join(f"<tbody>{each}</tbody>" for each in bodies)
    return _scrolls(f'<table class="runs"><thead><tr>{head}</tr></thead>{body}</table>')


def _comparison(accounts: Sequence[Account]) -> str:
    """Return a table with a column for each run; rows in which they differ are marked."""

    def recipe(account: Account, name: str) -> str:
        return str((account.facts.get("recipe") or {}).get(name, ""))

    rows: list[tuple[str, list[str]]] = [
        ("State", [each.overview.state for each in accounts]),
        ("Steps", [f"{each.overview.step + 1:,}" for each in accounts]),
        ("Last loss", [_number(each.overview.loss) if each.overview.loss is not None else "" for each in accounts]),
    ]
    for name in dict.fromkeys(name for each in accounts for name in each.overview.evaluation):
        values = [each.overview.evaluation.get(name) for each in accounts]
        rows.append((f"Evaluation: {name}", ["" if value is None else _number(value) for value in values]))
    rows += [
        ("Took", [each.took for each in accounts]),
        ("Samples per second", [_number(_mean(each, "samples_per_s")) for each in accounts]),
        ("Workers", [str(each.overview.num_workers or "") for each in accounts]),
        ("Efficiency", [_share(each.overview.efficiency) for each in accounts]),
        ("Interruptions", [str(len(each.interruptions)) for each in accounts]),
    ]
    rows.append(("Script", [_command(each) for each in accounts]))
    rows.append(("Text of the script", [_text_of_script(each) for each in accounts]))
    for name in dict.fromkeys(name for each in accounts for name in each.facts.get("recipe") or {}):
        rows.append((name, [recipe(each, name) for each in accounts]))
    head = "".join(f'<th scope="col">{_marked(each, accounts)}{escape(each.name)}</th>' for each in accounts)
    lines = [
        f'<tr{" class=differs" if len(set(values)) > 1 else ""}><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    ]
    return _scrolls(f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>")


def _advice(account: Account) -> str:
    items = [f"<li><p>{escape(each.text)}</p></li>" for each in account.advice[:3]]
    return f'<ol class="advice">{"".join(items)}</ol>'


def _times(account: Account) -> str:
    """Return a bar for each worker, the one with the most time first, and the same numbers as a table."""
    found = sorted(account.workers, key=lambda each: -each.total)
    longest = found[0].total or 1.0
    legend = "".join(f'<li><span class="swatch {part}"></span>{words}</li>' for part, words in PARTS.items())
    rows = [_worker(each, longest) for each in found]
    of = ""
    if account.since > account.first:
        steps = count(account.last + 1 - account.since, "step")
        of = f"<p>In the last {steps}: for earlier ones, the times of each worker are not kept.</p>"
    return f'{of}<ul class="legend">{legend}</ul>' + _table(
        ("worker", "*time in steps", "of the micro-batches", *PARTS.values()), rows, ' class="times"'
    )


def _worker(found: WorkerAccount, longest: float) -> str:
    total = found.total or 1.0
    bars = "".join(
        f'<span class="bar {part}" style="width:{100 * found.seconds[part] / longest:.2f}%"></span>' for part in PARTS
    )
    cells = "".join(f"<td>{found.seconds[part] / total:.0%}</td>" for part in PARTS)
    where = f' <span class="dim">{escape(found.host)}</span>' if found.host else ""
    return (
        f'<tr><th scope="row">{escape(found.worker_id)}{where}</th><td class="wide">'
        f'<span class="bars" aria-hidden="true">{bars}</span>{duration(found.total)}</td>'
        f"<td>{found.share:.0%}</td>{cells}</tr>"
    )


def _share(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _interruptions(account: Account) -> str:
    found = account.interruptions
    if not found:
        return "<p>None: no worker came or went between the first step and the last.</p>"
    known = [each.seconds for each in found if each.seconds is not None]
    whole = account.overview.elapsed_s if not account.overview.first else 0.0  # else it is that of the last part only
    part = f" ({sum(known) / whole:.1%} of the run)" if known and whole else ""
    words = (
        f"<p>{count(len(found), 'interruption')}; together they made the run {duration(sum(known))} longer{part}.</p>"
    )
    return words + _table(("when", "step", "cost", "*what happened"), list(map(_interruption, found)))


def _interruption(found: Interrupted) -> str:
    cost = "unknown" if found.seconds is None else duration(found.seconds)
    what = "<br>".join(escape(each) for each in words_of(found))
    return f"<tr><td>{date(found.time)}</td><td>{found.step:,}</td><td>{cost}</td><td class=wide>{what}</td></tr>"


def _presences(account: Account) -> str:
    """Return a line for each worker, from when it joined to when it went, on one axis of time."""
    found = account.presences
    begin = min(each.joined for each in found)
    whole = max(max(each.gone for each in found) - begin, 1e-9)
    columns = "worker", "*from the first to the last moment of the run", "how it went"
    return _table(columns, [_presence(each, begin, whole) for each in found], ' class="presence"')


def _presence(found: Presence, begin: float, whole: float) -> str:
    left, width = 100 * (found.joined - begin) / whole, max(0.3, 100 * (found.gone - found.joined) / whole)
    there = f"from {duration(found.joined - begin)} to {duration(found.gone - begin)}"
    went = f"{found.how}: {found.why_gone}".strip(": ") or "there until the end"
    return (
        f'<tr><th scope="row">{escape(found.worker_id)} <span class="dim">{escape(found.host)}</span></th>'
        f'<td class="wide"><span class="span" role="img" aria-label="{there}"><span class="there {escape(found.how)}" '
        f'style="left:{left:.2f}%;width:{min(width, 100 - left):.2f}%"></span></span></td><td>{escape(went)}</td></tr>'
    )


def _problems(account: Account) -> str:
    items = []
    for each in account.problems[:MOST_ROWS]:
        where = f' <span class="dim">evidence: {escape(str(each["evidence"]))}</span>' if each.get("evidence") else ""
        items.append(f"<li>{date(float(each.get('time') or 0))}: {escape(str(each.get('text', '')))}{where}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _command(account: Account) -> str:
    """Return the script and its arguments, without what is known to be secret."""
    arguments = (account.facts.get("command") or {}).get("arguments") or []
    return redacted(shlex.join(map(str, arguments)))


def _facts(account: Account) -> str:
    shown = {"Script": {"command": _command(account)} if _command(account) else None}
    shown |= {"Recipe": account.facts.get("recipe"), "Environment": account.facts.get("environment")}
    shown["Bits depend on"] = account.facts.get("fingerprint")
    found = [f"<h3>{name}</h3>{_pairs(_flat(value))}" for name, value in shown.items() if value]
    found.append(f'<p class="dim">{escape(str(account.directory.resolve()))}</p>')
    return "".join(found)


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return nested dictionaries as rows."""
    if isinstance(value, Mapping):
        return [row for name, each in value.items() for row in _flat(each, f"{prefix} {name}".strip())]
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return [(prefix, str(value))]


# -- charts ------------------------------------------------------------------------------------------


def _charts(accounts: Sequence[Account]) -> list[dict[str, Any]]:
    """Return what is drawn: a chart for each metric, with a line for each run."""
    names = dict.fromkeys(name for each in accounts for name in each.series)
    shown = [name for name in names if name not in ("step_s", "sent_bytes", "time")]
    shown.sort(key=lambda name: (name != "loss", not name.startswith("evaluation/"), name != "samples_per_s"))
    made = []
    for name in shown[: MOST_METRICS + 2]:
        lines = []
        for place, each in enumerate(accounts):
            found = each.series.get(name)
            if found and found["step"]:
                lines.append({"run": each.name, "colour": place, **{key: list(found[key]) for key in found}})
        if lines:
            made.append({"title": _metric(name), "lines": lines})
    return made


def _metric(name: str) -> str:
    known = {"loss": "Loss", "samples_per_s": "Samples per second"}
    kind, _, rest = name.partition("/")
    return known.get(name) or (f"Evaluation: {rest}" if kind == "evaluation" else rest or name)


def _chart(number: int, chart: Mapping[str, Any]) -> str:
    said = "; ".join(_said(line) for line in chart["lines"])
    return (
        f'<figure><figcaption><strong>{escape(chart["title"])}</strong> <span class="dim">{escape(said)}</span>'
        f'</figcaption><div class="chart" data-chart="{number}" role="img" aria-label="{escape(chart["title"])}: '
        f'{escape(said)}"></div></figure>'
    )


def _said(line: Mapping[str, Any]) -> str:
    """Return a curve in words, for who does not see it."""
    lows, highs = [v for v in line["low"] if is_number(v)], [v for v in line["high"] if is_number(v)]
    if not lows:
        return f"{line['run']}: no number"
    return f"{line['run']}: last {_number(line['mean'][-1])}, from {_number(min(lows))} to {_number(max(highs))}"


# -- pieces ------------------------------------------------------------------------------------------


def _page(title: str, body: str, charts: Sequence[Mapping[str, Any]]) -> str:
    own = importlib.resources.files("unisono.views.report") / "static"
    uplot = importlib.resources.files("unisono.views.page") / "static" / "uplot"
    data = json.dumps(charts, allow_nan=False, default=str).replace("<", "\\u003c")
    style = (uplot / "uPlot.min.css").read_text() + (own / "report.css").read_text()
    # The policy is for whoever changes this file: a report that fetches something would not be complete.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{style}</style></head>
<body>{body}
<script type="application/json" id="charts">{data}</script>
<script>{(uplot / "uPlot.iife.min.js").read_text()}</script><script>{(own / "report.js").read_text()}</script>
</body></html>
"""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in rows)}</dl>"


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in sentences)}</ul>"


def _text_of_script(account: Account) -> str:
    """Return what tells two texts of a script apart; "" where it is not known."""
    checksum = (account.facts.get("fingerprint") or {}).get("script", "")
    return f"checksum {checksum}" if checksum else ""


def _table(columns: Sequence[str], rows: Sequence[str], more: str = "") -> str:
    """Return a table of the first `MOST_ROWS` rows, and how many more there are.

    Args:
        columns: the wide one begins with ``*``.
        more: attributes of the table.
    """
    head = "".join(
        f'<th scope="col"{" class=wide" if name.startswith("*") else ""}>{name.removeprefix("*")}</th>'
        for name in columns
    )
    table = f"<table{more}><thead><tr>{head}</tr></thead><tbody>{''.join(rows[:MOST_ROWS])}</tbody></table>"
    return _scrolls(table) + (f"<p>and {len(rows) - MOST_ROWS:,} more</p>" if len(rows) > MOST_ROWS else "")


def _scrolls(table: str) -> str:
    return f'<div class="scrolls" tabindex="0" role="region" aria-label="table">{table}</div>'


def _marked(account: Account, accounts: Sequence[Account]) -> str:
    """Return the mark of a run's colour; nothing where there is only one."""
    place = next(number for number, each in enumerate(accounts) if each is account)
    return f'<span class="run run{place % 8}" aria-hidden="true"></span> ' if len(accounts) > 1 else ""


def _times_word(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _number(value: Any) -> str:
    if not is_number(value):
        return "" if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _mean(account: Account, name: str) -> float | None:
    values = [value for value in account.series.get(name, {}).get("mean", ()) if is_number(value)]
    return math.fsum(values) / len(values) if values else None
