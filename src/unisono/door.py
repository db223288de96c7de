"""What a worker is told by the agent that starts it: one value, which leaves the environment when it is read.

So nothing of it reaches the processes that the script starts: a `unisono.Run` of theirs, or an ``unisono run``, is a
run of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

from unisono.errors import UsageError
from unisono.lifetime import TOKEN_FILE, take_token

__all__ = ["WORKER", "Door"]

WORKER: Final = "UNISONO_WORKER"
"""The environment variable with a worker's `Door` (JSON), but for the token."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """What a worker is told by the agent that starts it. With the default values: a script that runs alone."""

    head: str = ""
    """The head's address, ``ws://HOST:PORT``."""
    token: str = dataclasses.field(default="", repr=False)
    worker_id: str = ""
    host: str = ""
    agent: int = 0
    """Process id of the command that has started this worker."""
    run_dir: str = ""
    """From the command line; wins over the script's, as all that follows."""
    overwrite: bool = False
    """The run directory may hold another run; it goes."""
    resume: str = ""
    """The run or the checkpoint to go on from; "auto": what the run directory holds."""
    resume_anyway: tuple[str, ...] = ()
    """What of the recipe may differ then."""
    command: str = ""
    """What ``unisono run --resume`` needs to know (JSON)."""
    threads: int = 1
    local_rank: int = 0
    """Position among the workers of its machine: which GPU it takes."""
    head_away_s: float = 60.0
    """How long training goes on without the head."""

    def environment(self) -> dict[str, str]:
        """The variable from which a worker takes it. The token is handed down apart (`lifetime.TOKEN_FILE`)."""
        told = dataclasses.asdict(self)
        del told["token"]
        return {WORKER: json.dumps(told)}

    @classmethod
    def take(cls, environment: MutableMapping[str, str] | None = None) -> Door | None:
        """Take what the agent has left out of the environment; None when no agent has started this process.

        Raises:
            UsageError: the variables do not fit together.
        """
        found = os.environ if environment is None else environment
        text = found.pop(WORKER, None)
        if text is None:
            return None
        try:
            told = json.loads(text)
            told["resume_anyway"] = tuple(told.get("resume_anyway", ()))
            return cls(**told, token=take_token(found))
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise UsageError(
                f"{WORKER} is set, but with {TOKEN_FILE} it does not make a worker ({type(error).__name__}: {error}); "
                "start workers with `unisono run` or `unisono join`"
            ) from error
