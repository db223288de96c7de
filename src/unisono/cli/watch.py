"""``unisono watch``: look at a run that is going, here or over a network, or at one that has ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from unisono.cli.looking import Seen, as_invitation, look
from unisono.cli.reach import NotGoing, ask_status, check_head, find
from unisono.cli.saying import say, say_json
from unisono.cli.status import runs_in, show_once
from unisono.cluster.trust.invitation import is_invitation
from unisono.core.errors import UsageError
from unisono.record.overview import Overview
from unisono.system.tasks import is_for_person
from unisono.views.page.opening import redirecting
from unisono.views.watch.terminal.canvas import is_drawable
from unisono.views.watch.terminal.plain_lines import OverviewLines
from unisono.views.watch.terminal.viewer import Viewer

__all__ = ["watch"]

READ_S: Final = 10.0
"""A browser has read a file within this time."""
GIVE_UP_S: Final = 60.0
"""A program's output ends if no head has answered for so long; a person may wait longer."""
HELP: Final = (
    "RUN is the run's directory, an invitation (`unisono watch --once` shows one for watching only), the address of "
    "the run's page, or - to read an invitation from standard input."
)


@click.command(epilog=HELP)
@click.argument("runs", nargs=-1, required=True, type=click.Path(), metavar="RUN...")
@click.option(
    "--web",
    is_flag=True,
    help=("Show the run in a browser: print and open the address of its page. Several directories are overlaid."),
)
@click.option(
    "--port",
    default=0,
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port on this machine, for --web and a run without a head.",
)
@click.option("--once", is_flag=True, help="Print the state of the run, or how it ended, and exit.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="For programs: everything that is shown, as a line of JSON a second; with --once, the state.",
)
def watch(runs: tuple[str, ...], web: bool, port: int, once: bool, as_json: bool) -> int:
    """Watch a run, live or finished: loss, speed, workers, where their time goes, what happened.

    Ends with the run, with exit code 1 if the run failed; watching does not affect the run. For a folder with several
    runs, each gets a line.

    --once also shows the person who started the run the line with which other machines join it. Keep that line
    to yourself: whoever has it can run programs as you. The lines for watching allow watching only.
    """
    if web:
        return _web(runs, port)
    if len(runs) > 1:
        raise UsageError(f"one run fits a terminal, got {len(runs)}; --web overlays several")
    is_folder = not is_invitation(runs[0]) and bool(runs_in(Path(runs[0])))
    try:
        if once or is_folder:
            return show_once(runs[0], as_json=as_json)
        return _look(look(runs[0]), as_json=as_json)
    except BrokenPipeError:  # the reader has what it wanted: `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _look(seen: Iterator[Seen], *, as_json: bool) -> int:
    if as_json:
        return _json(seen)

    if sys.stdout.isatty() and is_drawable(dict(os.environ)):
        return _interactive(Viewer(), seen)
    return _lines(seen)


def _interactive(viewer: Viewer, seen: Iterator[Seen]) -> int:
    first = next(seen)
    viewer.show(first.overview, first.note)
    with viewer:
        is_finished = first.is_over
        return _code(viewer.follow(((each.overview, each.note, each.is_over) for each in seen), stays=is_finished))


def _json(seen: Iterator[Seen]) -> int:
    last, note = None, ""
    for each in _until_over(seen):
        before, note = note, each.note.partition(";")[0]
        if note not in ("", before):
            say(f"unisono: {each.note}", err=True)
        last = each.overview or last
        if each.overview is not None:
            say_json(each.overview, in_one_line=True)
    return _code(last)


def _lines(seen: Iterator[Seen]) -> int:
    lines, last = OverviewLines(), None
    for each in _until_over(seen):
        if each.note:
            lines.note(each.note)
        if each.overview is not None:
            last = each.overview
            lines.take(last)
    if last is not None:
        lines.close(last)
    return _code(last)


def _until_over(seen: Iterator[Seen]) -> Iterator[Seen]:
    for each in seen:
        yield each
        if each.is_over:
            return
        if each.lost_s > GIVE_UP_S:
            raise NotGoing(f"{each.note}; given up")


def _code(overview: Overview | None) -> int:
    return int(overview is not None and overview.state == "failed")


# -- in a browser --------------------------------------------------------------------------------------


def _web(runs: tuple[str, ...], port: int) -> int:
    if len(runs) == 1 and (address := _page_of_head(runs[0])):
        _show_page(address)
        return 0
    if wrong := [run for run in runs if run == "-" or is_invitation(run)]:
        raise UsageError(f"several runs are overlaid from their directories; {wrong[0]!r} is not one")
    if missing := [run for run in runs if not Path(run).exists()]:
        raise UsageError(f"there is no run directory {missing[0]}")
    from unisono.views.page.directory_server import run as serve

    return serve([Path(run) for run in runs], port, _has_browser())


def _show_page(address: str) -> None:
    """Open the page of a head in a browser, and say on a terminal where it is: whoever has the address may look."""
    if is_for_person(sys.stdout, os.environ):
        say(f"unisono: the page is at {address}")
        say("unisono: whoever has this address may watch the run, and do nothing else")
    else:
        say(
            "unisono: the address of the page is shown on a terminal only, and by `unisono watch --once RUN`: it has "
            "a token"
        )
    if _has_browser():
        import webbrowser

        with redirecting(address) as file:
            webbrowser.open(file)
            time.sleep(READ_S)


def _page_of_head(run: str) -> str:
    """Return the address of the page on the head's port; "" for the directory of a run without a head.

    Raises:
        UsageError: an invitation is wrong.
    """
    try:
        invitation = find(as_invitation(run))
        check_head(invitation)
        if run != "-" and not is_invitation(run):
            ask_status(invitation)  # a head that has ended has left nothing else
    except NotGoing:
        if run == "-" or is_invitation(run):
            raise
        return ""
    return invitation.page


def _has_browser() -> bool:
    """Return whether a browser can be opened that does not take this terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
