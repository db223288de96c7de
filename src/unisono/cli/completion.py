"""``unisono completion``: the script with which a shell completes commands, options, runs and step numbers."""

from __future__ import annotations

import click

__all__ = ["completion"]

VARIABLE = "_UNISONO_COMPLETE"
"""Where it is set, the command answers the shell and does nothing else; the name is click's."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the script for SHELL; it asks the command itself what fits.

    \b
        eval "$(unisono completion bash)"         in ~/.bashrc (bash 4.4 or newer)
        eval "$(unisono completion zsh)"          in ~/.zshrc, after compinit
        unisono completion fish > ~/.config/fish/completions/unisono.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(click.Group(), {}, "unisono", VARIABLE).source())
    return 0
