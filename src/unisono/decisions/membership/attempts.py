"""Attempts: the starts of all processes of a plain script (``unisono run --plain``), one after the other."""

from __future__ import annotations

from typing import Final

import msgspec

from unisono.words import exit_words

__all__ = ["Attempt", "Failure", "Part", "spread"]

_OF_A_LOST_PEER: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one machine."""

    agent: str
    num_processes: int


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process with another exit code than 0."""

    name: str
    host: str
    exit_code: int
    """0: it was ended after it had shown an error."""
    at: float
    """When it began to show an error."""
    last_output: str

    def words(self) -> str:
        code = self.exit_code
        how = exit_words(code) if code < 0 else f"ended with exit code {code}" if code else "failed"
        return f"{self.name} on {self.host} {how}"

    @property
    def is_lost_connection(self) -> bool:
        """Whether its last words are those of a process whose peer has gone."""
        return any(words in self.last_output.lower() for words in _OF_A_LOST_PEER)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of all processes, on some machines. Nothing of it is kept when a process fails or a machine comes."""

    number: int
    """Counted over the whole run, from 1."""
    parts: tuple[Part, ...]
    """By rank: the first part has rank 0."""
    restarts: int = 0
    """How many attempts before this one have failed."""
    why: str = ""
    """Why the attempt before this one was ended; "": this is the first."""
    is_started: bool = False
    """The machines have the order to start. Before, the agent of rank 0 looks for a free port."""
    address: str = ""
    """Of the machine of rank 0."""
    port: int = 0
    """Where the processes meet there."""
    failures: tuple[Failure, ...] = ()
    """Of processes that nobody had ended."""
    ending: str = ""
    """Why all processes are being ended; "" while none needs to end."""

    waits: bool = False
    """It is over, and there are too few machines for the next one."""

    @property
    def num_processes(self) -> int:
        return sum(part.num_processes for part in self.parts)

    @property
    def cause(self) -> Failure | None:
        """The failure that came first: where a process fails, the others lose their connections to it and fail too.

        On a busy machine the times of two failures may be noted in the other order; so lost connections come last.
        """
        return min(self.failures, key=lambda failure: (failure.is_lost_connection, failure.at), default=None)

    def name(self, rank: int) -> str:
        """Return the name of a process, which is not used again."""
        return f"rank{rank}" if self.number == 1 else f"rank{rank}.{self.number}"

    def names(self) -> dict[str, list[str]]:
        """Return the names of the processes of each agent, by rank."""
        found, first = {}, 0
        for part in self.parts:
            found[part.agent] = [self.name(rank) for rank in range(first, first + part.num_processes)]
            first += part.num_processes
        return found


def spread(offers: dict[str, int], maximum: int) -> tuple[Part, ...]:
    """Return how many processes each agent is to have: as many as it offers, in this order, up to the maximum."""
    parts = []
    for agent, offered in offers.items():
        number = min(offered, maximum)
        maximum -= number
        if number:
            parts.append(Part(agent=agent, num_processes=number))
    return tuple(parts)
