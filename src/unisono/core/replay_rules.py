"""Replay of a run up to one of its steps: where it begins, and what of a step must be equal. Without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from unisono.core.errors import UsageError
from unisono.core.events import EQUAL_FIELDS
from unisono.core.rehearsals import digest_of

__all__ = [
    "LEFT",
    "Replay",
    "ReplayStart",
    "audited_with",
    "compare_audits",
    "find_difference",
    "seconds_left",
    "starts",
    "with_words",
]

LEFT: Final = 3
"""Exit code where the user has left the debugger before the end."""


class Replay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is replayed, and what is done in it: the settings of the inspector ``replay``."""

    run: str
    """Directory of the run."""
    step: int
    """The last step, by its number in the run; of local steps, the round."""
    turn: int = 0
    """The pass over the global batch (``step.again``)."""
    leaf: int = -1
    """The micro-batch that is looked at; -1: all of the step, if any."""
    replica: int = -1
    """Of local steps, the replica; -1: all."""
    inner: int = -1
    """Of a replica, its step within the round; -1: all."""
    looks: bool = False
    """Show each micro-batch that is looked at."""
    anomaly: bool = False
    """Look for the operation that gives a NaN, with autograd's anomaly detection."""
    debugger: bool = False
    """Stop before each micro-batch that is looked at, in the line of the script that follows."""
    save: str = ""
    """Folder into which each micro-batch that is looked at is written; "": none."""
    fingerprint: dict[str, str] = {}
    """What the arithmetic of the run depended on."""

    def is_wanted(self, *, step: int, turn: int, leaf: int, replica: int, inner: int) -> bool:
        """Return whether a micro-batch is looked at."""
        if not self.looks or (step, turn) != (self.step, self.turn):
            return False
        asked = ((self.leaf, leaf), (self.replica, replica), (self.inner, inner))
        return all(wanted in (-1, found) for wanted, found in asked)


def audited_with(audits: Mapping[str, str], leaf: int) -> tuple[int, ...]:
    """Return the micro-batches whose digests the journal has together with that of a micro-batch, which is among them;
    () if it has none of it.

    Args:
        audits: of a step's line, by micro-batches: "3", or "3,7".
    """
    for key in audits:
        leaves = _leaves(key)
        if leaf in leaves:
            return leaves
    return ()


def compare_audits(audits: Mapping[str, str], here: Mapping[int, int]) -> list[tuple[tuple[int, ...], str, str]]:
    """Return the (micro-batches, digest in the journal, digest here) of which there are both.

    Args:
        audits: of a step's line.
        here: digests by micro-batch.
    """
    return [
        (leaves, str(digest), f"{digest_of([here[leaf] for leaf in leaves]):016x}")
        for leaves, digest in ((_leaves(key), digest) for key, digest in audits.items())
        if leaves and all(leaf in here for leaf in leaves)
    ]


def _leaves(key: str) -> tuple[int, ...]:
    """Return the micro-batches that a key of the journal names."""
    return tuple(int(leaf) for leaf in key.split(",") if leaf.isdecimal())


class ReplayStart(msgspec.Struct, frozen=True):
    """A checkpoint from which a replay may begin."""

    path: str
    step: int
    """Steps of the run that are done in it."""
    delay: int = 0
    """Steps that are under way in it: their micro-batches are computed, and not those of a replay from here."""


def starts(found: Iterable[ReplayStart], step: int) -> list[ReplayStart]:
    """Return the checkpoints from which all micro-batches of a step are computed again, the nearest first."""
    return sorted((one for one in found if one.step + one.delay <= step), key=lambda one: -one.step)


def find_difference(line: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the name of the first value of a step that is not that of the journal; "" if there is none.

    Args:
        line: of the journal. A value that it lacks, because an older version wrote it, is not compared.
        result: of the replay, as JSON would have it.
    """
    return next((name for name in EQUAL_FIELDS if name in line and line[name] != result.get(name)), "")


def seconds_left(done: int, total: int, elapsed_s: float) -> float | None:
    """Return the seconds that the rest takes at the pace so far; None before the first step."""
    return elapsed_s / done * (total - done) if done else None


def with_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `Replay` for ``--with anomaly``, ``--with debugger`` and ``--with save=DIR``.

    Raises:
        UsageError: a word is none of these.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, has_value, value = word.partition("=")
        if name == "save" and value:
            found["save"] = value
        elif name in ("anomaly", "debugger") and not has_value:
            found[name] = True
        else:
            raise UsageError(f"--with takes anomaly, debugger, or save=DIR; got {word!r}")
    return found
