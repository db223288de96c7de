"""``unisono completion``: click's own completion of the commands, their options, and the values that are declared."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]

VARIABLE = "_UNISONO_COMPLETE"
"""Where it is set, the command answers the shell and does nothing else; the name is click's."""


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
