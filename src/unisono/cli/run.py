"""``unisono run``: train on the workers of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click import argument, option
from msgspec import convert
from msgspec.structs import replace

from unisono.cli.back import again, by_hand
from unisono.cli.given import (
    check_directory,
    check_text,
    directory_of_new_run,
    script_arguments,
)
from unisono.cli.options import BY_FIELD, Options, options_of
from unisono.cli.resume import Resumed, resumed, threads_of
from unisono.cli.saying import say
from unisono.cluster import launchers
from unisono.cluster.launchers import Machine
from unisono.core.errors import RunGoesBack, UsageError
from unisono.core.settings import GROUPS, SETTINGS, RunSettings, Setting, table
from unisono.core.spec import RunSpec
from unisono.record.rundir import refuse_used
from unisono.record.without import read_ranges
from unisono.system import faults, tasks
from unisono.system.capacity import Workers, parse_workers
from unisono.views import watch

__all__ = ["read", "run", "start"]

KNOWN: Final = {"launcher": launchers.known, "sink": watch.known}
"""Settings whose values are names in a table."""
GOES_BACK: Final = "the run, which goes back"
"""Source of settings."""


class _Command(click.Command):
    """Shows the options of ``unisono run`` in the groups of `unisono.core.settings`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                setting = BY_FIELD.get(param.name or "")
                rows.setdefault(GROUPS[setting.group] if setting else "Other", []).append(record)
        for title in [title for title in (*GROUPS.values(), "Other") if title in rows]:
            with formatter.section(title):
                formatter.write_dl(rows[title])


def _option(setting: Setting) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a setting as an option of its own. Its value is read by `Setting.read`, as that of ``--set``."""
    names = setting.option.split(" ")
    default = setting.shown or (setting.text(setting.default) if setting.default else "")
    words = f"{setting.help}  [default: {default}]" if default else setting.help
    if setting.is_flag:
        return option(setting.field, *names, is_flag=True, flag_value="yes", default=None, help=words)
    return option(
        setting.field,
        *names,
        multiple=setting.is_list,
        type=click.Path() if setting.form in ("DIR", "FILE") else str,
        metavar=setting.form,
        help=words,
        shell_complete=partial(_offer, setting) if setting.form not in ("DIR", "FILE") else None,
    )


def _offer(setting: Setting, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the known values of a setting that begin with what was typed, for a shell that asks."""
    words = KNOWN[setting.name]() if setting.name in KNOWN else setting.form.split("|")
    return [word for word in words if re.fullmatch("[a-z-]+", word) and word.startswith(incomplete)]


def run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the script, its arguments, and the options of ``unisono run``."""
    added: list[Callable[[Callable[..., int]], Callable[..., int]]] = [
        argument("script", required=False, type=click.Path()),
        argument("arguments", nargs=-1, type=click.UNPROCESSED),
        option("-m", "module", metavar="MODULE", help="Run a module instead of a script, as `python -m` does."),
        *(_option(setting) for setting in SETTINGS.values() if setting.option),
        option("--set", "others", multiple=True, metavar="NAME=VALUE", help="Any other setting of docs/settings.md, "
               "such as heartbeat=500ms; --dry-run prints all of them."),
    ]  # fmt: skip
    for add in reversed(added):
        command = add(command)
    return command


@click.command(cls=_Command)
@run_options
def run(**given: Any) -> int:
    """Train SCRIPT on workers of this machine, or of --hosts, with the same bits at any number of workers.

    Whatever follows -- is passed to the script:

        unisono run train.py --workers 4 -- --lr 0.01

    Settings that you use often can go into a file unisono.toml beside the script.
    """
    options = options_of(given)
    if options.dry_run and options.launcher != "kubernetes":
        read(options)
        for name, (value, source) in table(options).items():
            say(f"{name} = {value}  ({source})")
        return 0
    if options.launcher == "kubernetes":
        from unisono.cli.kubernetes import train

        return train(options)
    return start(options)


def start(options: Options) -> int:
    """Start the run of this command line, and block until it is over. Returns the exit code.

    Raises:
        UsageError: something is wrong with the command line. Nothing was started.
    """
    if options.launcher == "auto":
        tasks.refuse_unknown(os.environ)
        task = tasks.here(os.environ)
        if task is not None and task.size > 1:
            options.refuse_hosts(f"{task.command} has started this command {task.size} times, which are the machines")
            from unisono.cli.part import take_part

            try:
                return take_part(options, task, partial(read, options))
            except RunGoesBack as back:
                raise by_hand(back) from None
    dropped: frozenset[str] = frozenset()
    while True:
        spec, workers = read(options)
        _refuse_used(options, spec)
        chosen = launchers.choose(options.request(spec, workers))
        machines = [machine for machine in chosen.machines() if machine.name not in dropped]
        workers = _of_machines(options, spec, workers, machines)
        try:
            service = options.service(workers, chosen.bind())
            return launchers.run(spec, chosen, service, machines=machines, address=options.address)
        except RunGoesBack as back:
            found = again(back, workers, machines)
            sources = options.sources | {BY_FIELD[field].name: GOES_BACK for field in found.changes}
            options, dropped = replace(options, **found.changes, sources=sources), dropped | found.dropped
            if faults.ENVIRONMENT in os.environ:
                os.environ[faults.ENVIRONMENT] = faults.forget_passing(os.environ[faults.ENVIRONMENT])


def _refuse_used(options: Options, spec: RunSpec) -> None:
    """Raise RunDirectoryError, where that is certain, before workers import torch and load data only to be refused."""
    if options.script and not (options.overwrite or options.resume or options.inspect):
        new = directory_of_new_run(Path(options.script), spec.settings.run_dir)
        if new is not None:
            refuse_used(new)


def _of_machines(options: Options, spec: RunSpec, workers: Workers, machines: Sequence[Machine]) -> Workers:
    """Return how many workers the run has, where the machines say so."""
    if options.takes_all and any(machine.num_workers for machine in machines):
        return Workers.found(sum(machine.num_workers for machine in machines), options.parts)
    return workers


def read(options: Options) -> tuple[RunSpec, Workers]:
    """Return the run, and the numbers of workers that the command line asks for.

    Raises:
        UsageError: something is wrong with them. Nothing was started.
    """
    try:
        check_text("the working directory", os.getcwd())
    except FileNotFoundError:
        raise UsageError("the working directory has been removed; change to another one (cd)") from None
    check_text("the run directory", options.run_dir, options.resume)
    before = Resumed(options.run_dir, "", {})
    if options.resume:
        before = resumed(options.resume, options.run_dir, overwrite=options.overwrite)
    elif options.resume_anyway:
        raise UsageError("--set resume-anyway says what may differ when a run resumes; give --resume DIR as well")
    run_dir = str(Path(before.run_dir).resolve()) if before.run_dir else ""
    if run_dir:
        check_directory(Path(run_dir), resumes=bool(options.resume))
    copies = _places(options.copies_to)
    _check_sinks(options.sinks)
    options.check_head()
    without = os.path.abspath(options.without) if options.without else before.without()
    if without:
        check_text("the list of samples to leave out", without)
        read_ranges(without)  # raises
    arguments = _arguments(options, before)
    threads = options.threads or threads_of(before.facts)
    asks_machines = options.takes_all and options.names_hosts  # so many as the machines will say
    workers = parse_workers(f"1x{options.parts}" if asks_machines else options.workers, threads)
    if options.efficiency and workers.grows:
        raise UsageError("--set efficiency decides between A and B workers: give --workers A:B as well")
    settings = replace(
        convert(options, RunSettings, from_attributes=True),
        threads=threads,
        arithmetic=options.arithmetic or before.arithmetic(),
        run_dir=run_dir,
        resume=before.path,
        copies_to=copies,
        without=without,
    )
    return RunSpec(arguments=tuple(arguments), settings=settings), workers


def _places(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Return the places to which checkpoints are copied.

    Raises:
        UsageError: this installation does not know how to reach one of them.
    """
    if not urls:
        return ()
    from unisono.engine.checkpoint.copies import absolute, check

    check_text("a place for copies", *urls)
    if "" in urls:
        raise UsageError("--copies-to is a URL or a path, got ''")
    places = tuple(absolute(url) for url in urls)
    check(places)
    return places


def _check_sinks(texts: tuple[str, ...]) -> None:
    """Raise UsageError if one of the sinks is not known, or needs a package that is missing here."""
    if texts:
        check_text("a sink", *texts)
        for text in texts:
            watch.named(text, is_here=False)


def _arguments(options: Options, before: Resumed) -> list[str]:
    """Return the arguments of a worker."""
    if options.function:
        return ["--callable", options.function, options.result]
    if before.path and options.script is None and options.module is None:
        return before.arguments()
    arguments = script_arguments(options.script, options.module, options.arguments)
    check_text("the script or one of its arguments", *arguments)
    return arguments
