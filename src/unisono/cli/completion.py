"""``unisono completion``, and what a shell offers for an argument of a command: runs that lie below a folder, steps of
a run, known words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

__all__ = ["complete", "completion"]

VARIABLE = "_UNISONO_COMPLETE"
"""Where it is set, the command answers the shell and does nothing else; the name is click's."""
MOST_FOLDERS: Final = 2000
"""Are looked at, or somebody waits too long for the answer."""
DEPTH: Final = 3
RUN_FILE: Final = "run.json"

Items = list[CompletionItem]
Completer = Callable[[click.Parameter, click.Context, str], Items]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the completion script for SHELL.

    \b
        eval "$(unisono completion bash)"         in ~/.bashrc (bash 4.4 or newer)
        eval "$(unisono completion zsh)"          in ~/.zshrc, after compinit
        unisono completion fish > ~/.config/fish/completions/unisono.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(click.Group(), {}, "unisono", VARIABLE).source())
    return 0


def complete(command: click.Command) -> None:
    """Give the parameters of a command their completion, by their names."""
    for parameter in command.params:
        if parameter.name is not None and (found := _COMPLETERS.get(parameter.name)) is not None:
            setattr(parameter, "shell_complete", partial(found, parameter))  # noqa: B010  # a method, for mypy


def _runs(_: click.Parameter, ctx: click.Context, incomplete: str) -> Items:
    """Offer the run directories below the folder that was typed; where there are none, folders."""
    found = [CompletionItem(path) for path in _below(incomplete)]
    return found or [CompletionItem(incomplete, type="dir")]


def _below(incomplete: str) -> Iterator[str]:
    folder, _, begin = incomplete.rpartition("/")
    start = f"{folder}/" if "/" in incomplete else ""
    todo, seen = [(start, 0)], 0
    while todo:
        here, depth = todo.pop(0)
        try:
            names = sorted(entry.name for entry in os.scandir(os.path.expanduser(here) or ".") if entry.is_dir())
        except OSError:
            continue
        for name in names:
            if name.startswith(".") or (depth == 0 and not name.startswith(begin)):
                continue
            seen += 1
            if seen > MOST_FOLDERS:
                return
            path = f"{here}{name}"
            if (Path(path).expanduser() / RUN_FILE).exists():
                yield path
            elif depth + 1 < DEPTH:
                todo.append((f"{path}/", depth + 1))


def _steps(_: click.Parameter, ctx: click.Context, incomplete: str) -> Items:
    """Offer the last step of the run that was typed, and those at its checkpoints."""
    from unisono.record import checkpoint_files as files
    from unisono.record.history import History

    run = _run_in(ctx)
    if run is None:
        return []
    known: dict[int, str] = {}
    try:
        for path in files.complete(run / files.FOLDER):
            known[int(path.name.rpartition("-")[2])] = "the first one after a checkpoint"
    except (OSError, ValueError):
        return []
    if (last := History(run).overview().step) >= 0:
        known = {step: says for step, says in known.items() if step <= last} | {last: "the last one"}
    return [CompletionItem(str(step), help=says) for step, says in sorted(known.items()) if _fits(step, incomplete)]


def _microbatches(_: click.Parameter, ctx: click.Context, incomplete: str) -> Items:
    """Offer the micro-batches of a step."""
    from unisono.record.rundir import read_facts

    run = _run_in(ctx)
    recipe: Any = read_facts(run).get("recipe") if run is not None else None
    number = recipe.get("microbatches") if isinstance(recipe, dict) else None
    if not isinstance(number, int):
        return []
    return [CompletionItem(str(each)) for each in range(number) if _fits(each, incomplete)]


def _fits(number: int, incomplete: str) -> bool:
    return str(number).startswith(incomplete)


def _run_in(ctx: click.Context) -> Path | None:
    """Return the run of a command line that is not complete yet: an option that lacks its value ends the parsing, and
    leaves the words before it.
    """
    for given in (ctx.params.get("run"), *ctx.args):
        if isinstance(given, (str, Path)) and (Path(given).expanduser() / RUN_FILE).exists():
            return Path(given).expanduser()
    return None


def _files(_: click.Parameter, ctx: click.Context, incomplete: str) -> Items:
    return [CompletionItem(incomplete, type="file")]


def _words(*words: str) -> Completer:
    def offer(_: click.Parameter, ctx: click.Context, incomplete: str) -> Items:
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]

    return offer


_COMPLETERS: Final[dict[str, Completer]] = {
    **dict.fromkeys(("run", "runs", "run_a", "run_b", "run_dir", "resume", "place"), _runs),
    **dict.fromkeys(("script", "arguments", "without", "link"), _files),
    "step": _steps,
    "microbatch": _microbatches,
    "exchange": _words("auto", "shared", "gloo", "two-level"),
    "launcher": _words("auto", "local", "none", "ray", "kubernetes"),
    "sinks": _words("tensorboard", "mlflow", "wandb", "opentelemetry", "logging"),
    "words": _words("anomaly", "debugger", "save="),
}
"""By the name of a parameter, as its function gets it."""
