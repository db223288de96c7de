"""The sentences with which a run says how other machines join it, and where to look at it."""

from __future__ import annotations

import os
import shlex
import sys

from unisono.cluster.machine.headprocess import Service, other_addresses
from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.core.words import listed
from unisono.system.interfaces import is_local
from unisono.system.tasks import is_for_person

__all__ = ["welcome_words"]


def welcome_words(invitation: Invitation, service: Service, run_dir: str) -> list[str]:
    """Return how other machines join, if they can reach the run; on a terminal, also where to look at it.

    Lines with a token are for a terminal. They are not written into a file or a pipe, which others may be able to read:
    whoever has the run's token can run code as this user.
    """
    is_terminal = any(is_for_person(stream, os.environ) for stream in (sys.stdout, sys.stderr))  # see `watch.terminal`
    found = []
    host = HeadUrl.parse(invitation.url).host
    if not is_local(host):
        status = shlex.join(["unisono", "watch", "--once", run_dir]) if run_dir else "unisono watch --once RUN"
        words = f"other machines join with the line that `{status}` shows (it is secret, so it is not written here)"
        if is_terminal:
            words = f"other machines join with: {invitation.command}"
        others = [f"{each.address} ({each.name})" for each in other_addresses(service)]
        if others:
            words += f"\nthe head is reached at {host}; this machine has {listed(others)} as well: "
            words += "--set advertise=HOST names another"
        found.append(words)
    if is_terminal:
        found.append(f"watch it in a browser: {invitation.page}")
    return found
