"""A run, as the one who starts it describes it to the machines and workers: made once, handed down once, read once.

Three values, each inside of the next: `RunSpec` (equal for the whole run, with its settings), `MachineSpec` (one
machine's part of the run), `WorkerSpec` (one worker's). The agent puts a worker's `WorkerSpec` into memory that one
environment variable names. The worker takes both away, so that no process that the script starts takes part in the
run.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from unisono.core.settings import DEFAULTS, RunSettings, table

__all__ = [
    "MOST_AUDITED",
    "WORKER",
    "MachineSpec",
    "RunSpec",
    "WorkerSpec",
]

WORKER: Final = "UNISONO_WORKER"
"""Name of the environment variable with the descriptor of a worker's `WorkerSpec` (JSON, without the token)."""

MOST_AUDITED: Final = 0.5
"""The largest share of the micro-batches that a second worker can compute as well (`unisono.core.audit_rules`)."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is equal for the whole run. The defaults are those of a script that runs alone."""

    arguments: tuple[str, ...] = ()
    """Script and its arguments, after ``python -m unisono.script.worker``."""
    folder: str = ""
    """Working directory of the command and of the workers."""
    script: str = ""
    """Checksum of the script's text (`unisono.system.fingerprint.script_checksum`); "" where it is not one file."""
    settings: RunSettings = DEFAULTS
    """Paths and places in it are absolute. Where it and an argument of the script's `Run` say something else, it
    counts."""

    @property
    def threads(self) -> int:
        """CPU threads of a worker."""
        return self.settings.threads or 1

    @property
    def ports(self) -> tuple[int, int]:
        """First and last port that heads listen on, also those on machines that have joined; 0: any."""
        return self.settings.ports if ":" in self.settings.port else (0, 0)

    def command(self) -> str:
        """Return what ``unisono run --resume`` needs to start the script again, and the settings with their sources, as
        run.json keeps them (JSON); "" for a function.
        """
        if not self.arguments or self.arguments[0] == "--callable":
            return ""
        return json.dumps({"folder": self.folder, "arguments": self.arguments, "settings": table(self.settings)})


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine's part of a run: what its agent does."""

    run: RunSpec
    num_workers: int
    """Number of workers that the agent offers to start."""
    num_evaluators: int = 0
    """Number of evaluators that it offers to start besides (`unisono.cli.evaluate`)."""
    address: str = ""
    """At which workers of other machines reach those of this one; "": the one by which they reach the head."""
    launched: str = ""
    """Name of this machine, where another command has started the agent, and shows what happens in the run: the agent
    prints the workers' output only; else ""."""
    condition: str = ""
    """The agent offers its workers only while this command of a shell ends with 0; "": always."""
    may_have_head: bool = True
    """The next head may be started on this machine, if that of the head is lost."""
    held: bool = False
    """A launcher holds the agent's standard input open: the agent ends with it."""
    engine: str = ""
    """What has started this agent as one of several tasks, and signals and ends all of them; "": the agent is alone."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's settings. The defaults are those of a script that runs alone."""

    run: RunSpec = RunSpec()
    head: str = ""
    """The head's address, ``ws://HOST:PORT``."""
    where: str = ""
    """File in which the agent keeps the address of the head that it follows; "": that is ``head`` for ever."""
    worker_id: str = ""
    host: str = ""
    """Equal for workers that can share memory."""
    agent: int = 0
    """Process id of the agent that has started this worker."""
    local_rank: int = 0
    """Position among the workers of its machine."""
    gpu: int = -1
    """Number of the GPU that it takes, among those that its agent may use; -1: by its local rank."""
    beats: str = ""
    """Path of the memory in which the worker leaves its heartbeats for its agent (`unisono.cluster.worker.beatpage`),
    in the slot of its local rank; "": the worker sends them to the head itself."""
    address: str = ""
    """`MachineSpec.address`."""
    token: str = ""
    """The run's token. Handed down in memory without a name (`unisono.system.lifetime.take_token`), never in a
    variable."""

    @property
    def gpu_number(self) -> int:
        """Number of its GPU; it may be more than there are: modulo these."""
        return self.gpu if self.gpu >= 0 else self.local_rank

    def encode(self) -> bytes:
        """Return the settings as the worker reads them (`WORKER`). The token is not in them."""
        return msgspec.json.encode(msgspec.structs.replace(self, token=""))

    @classmethod
    def decode(cls, text: bytes, token: str) -> WorkerSpec:
        """Return the settings in the memory that `WORKER` names.

        Raises:
            msgspec.DecodeError: the text is no `WorkerSpec`, or one of another version.
        """
        return msgspec.structs.replace(msgspec.json.decode(text, type=cls), token=token)

    def __repr__(self) -> str:
        return f"WorkerSpec({self.worker_id!r}, head={self.head!r}, host={self.host!r}, run={self.run!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("worker_id", self.worker_id), ("head", self.head), ("host", self.host), ("run", self.run)]
