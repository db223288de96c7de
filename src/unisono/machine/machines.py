"""The agents on other machines, as the command that has started them sees them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Machines", "MachinesObserver"]


class MachinesObserver(Protocol):
    """Receives what agents on other machines print, and how they end."""

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        """Receive one line of the output of the agent on machine ``name``."""

    def on_notice(self, text: str) -> None:
        """Receive a sentence for the user."""

    def on_machines_lost(self, reason: str) -> None:
        """Receive that no agent is left, and that one of them has failed. The run may be over."""


class Machines(Protocol):
    """Agents on other machines that this command has started (`unisono.launchers.fleet.Fleet`)."""

    def start(self, observer: MachinesObserver) -> None:
        """Start the agents.

        Raises:
            UsageError: one of them cannot be started.
        """

    async def close(self, patience_s: float) -> None:
        """Wait for the agents to end by themselves, then end them."""
