"""The sentences with which a run says how other machines join it."""

from __future__ import annotations

import shlex
import sys

from unisono.interfaces import is_local
from unisono.invitation import HeadUrl, Invitation
from unisono.machine.headprocess import Service, other_addresses
from unisono.words import listed

__all__ = ["welcome_words"]


def welcome_words(invitation: Invitation, service: Service, run_dir: str) -> list[str]:
    """Return how other machines join; nothing for a run that only this machine can reach.

    The line itself is for a terminal. It is not written into a file or a pipe, which others may be able to read:
    whoever has the token can run code as this user.
    """
    host = HeadUrl.parse(invitation.url).host
    if is_local(host):
        return []
    status = shlex.join(["unisono", "status", run_dir]) if run_dir else "unisono status RUN"
    words = f"other machines join with the line that `{status}` shows (it is secret, so it is not written here)"
    if (sys.stdout if sys.stdout.isatty() else sys.stderr).isatty():  # see `watch.terminal`
        words = f"other machines join with: {invitation.command}"
    others = [f"{found.address} ({found.name})" for found in other_addresses(service)]
    if others:
        words += (
            f"\nthe head is reached at {host}; this machine has {listed(others)} as well: --advertise names another"
        )
    return [words]
