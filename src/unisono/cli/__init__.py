"""The command ``unisono``: one command a file, loaded when it is called."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import Final

import click

from unisono.core.errors import UnisonoError
from unisono.system.extras import check_platform, needs_torch

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = {
    "run": ("unisono.cli.run:run", "Train on this machine, others, or a cluster; more can join."),
    "join": ("unisono.cli.join:join", "Add this machine's workers to an active run."),
    "evaluate": ("unisono.cli.evaluate:evaluate", "Compute a run's evaluations beside its training."),
    "slurm": ("unisono.cli.slurm:slurm", "Train in a Slurm job: submit it and follow it."),
    "watch": ("unisono.cli.watch:watch", "Watch a run, live or finished, in this terminal or a browser."),
    "report": ("unisono.cli.report:report", "Write an HTML report of one run, or of several side by side."),
    "scale": ("unisono.cli.control:scale", "Change the number of workers of a run."),
    "stop": ("unisono.cli.control:stop", "Stop a run at the end of its current step."),
    "plan": ("unisono.cli.plan:plan", "Predict how fast more workers would be, and what they need."),
    "doctor": ("unisono.cli.doctor:doctor", "Check these machines for problems that would hurt a run."),
    "check": ("unisono.cli.check:check", "Check that a script gives the same bits; name the line that does not."),
    "checkpoints": ("unisono.cli.checkpoints:checkpoints", "List, check or export the checkpoints of a run."),
    "replay": ("unisono.cli.replay:replay", "Recompute a run up to a step, and inspect its micro-batches."),
    "certify": ("unisono.cli.certify:certify", "Write a certificate of a run that others can check."),
    "verify": ("unisono.cli.verify:verify", "Check a certificate, and recompute parts of its run."),
    "completion": ("unisono.cli.completion:completion", "Print the shell completion script."),
    "compare": ("unisono.cli.compare:compare", "Tell whether two runs are identical, or where they diverge."),
}

HIDDEN: Final = ("completion",)
"""Commands that the help does not list."""


class _Commands(click.Group):
    """Loads a command's module when it is needed: ``--help`` answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if name not in HIDDEN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        check_platform()
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def _show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    import importlib.metadata
    import platform

    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "torch is not installed"
    own = importlib.import_module("unisono").__version__
    from unisono.cli.saying import say

    say(f"unisono {own} ({torch}, Python {platform.python_version()})")
    ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
              help="Show the versions of Unisono, torch and Python.")  # fmt: skip
def _group() -> None:
    """Many workers, one result: PyTorch training with the same bits at any number of workers."""


def _show_unknown(error: click.NoSuchOption) -> None:
    """Print that there is no such option, and where an option of the script belongs."""
    from unisono.cli.saying import say

    error.show()
    if error.ctx is not None and any(each.nargs == -1 for each in error.ctx.command.params):
        path = error.ctx.command_path
        say(f"Options of the script come after `--`: {path} SCRIPT -- {error.option_name}", err=True)


def main() -> None:
    """Run the command line. Errors that a user can fix are printed in one line, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # workers may print characters that this terminal cannot show
    from unisono.cli.saying import say, say_lines

    try:
        with needs_torch("this command"):
            code = _group(standalone_mode=False) or 0
        sys.exit(code)
    except click.NoSuchOption as error:
        _show_unknown(error)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except UnisonoError as error:
        say_lines(f"unisono: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # also for the buffered output, which is written when the process exits
        say(f"unisono: standard output cannot be written: {error.strerror}", err=True)
        sys.exit(2)
