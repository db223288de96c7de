"""Golden bits: those that a training had when a test was updated, in a small file beside the test.

A file has one entry for each arithmetic (`unisono.system.fingerprint`) that it was updated with: another version of
torch, or a processor with other instructions, has other bits. The name of the processor and the version of Python are
not told apart: what they do to the bits, the probe of the fingerprint says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.record.explaining import changed_lines, unequal
from unisono.system.owned import write_whole

__all__ = ["GoldenBits", "changed_words", "digests_by_object", "golden_difference", "golden_file", "read", "write"]

MOST_TEXT: Final = 64 << 10
"""Characters of a script whose text is kept."""
NAMES_OF_MACHINES: Final = ("machine", "processor", "python")


class GoldenBits(msgspec.Struct, frozen=True, kw_only=True):
    """The bits of the first steps of a training, computed by one worker."""

    arithmetic: dict[str, str]
    """What they depend on besides the script: of the run's fingerprint, all but `NAMES_OF_MACHINES`."""
    steps: int
    """How many steps were asked for."""
    digests: list[str]
    """Of each step's gradient."""
    state: dict[str, str]
    """Digest of each tracked object after these steps, by name."""
    script: list[str] = []
    """The lines of the script; empty where it is longer than `MOST_TEXT`."""


def digests_by_object(parts: Mapping[str, str]) -> dict[str, str]:
    """Return a digest (16 hexadecimal digits) of each tracked object.

    Args:
        parts: the state as text (tensors: shape and digest), by path: ``model['0.weight']``.
    """
    hashes: dict[str, hashlib.blake2b] = {}
    for path in sorted(parts):
        name = re.split(r"[\[.]", path, maxsplit=1)[0]
        hashes.setdefault(name, hashlib.blake2b(digest_size=8)).update(f"{path}\0{parts[path]}\0".encode())
    return {name: found.hexdigest() for name, found in hashes.items()}


def golden_difference(golden: GoldenBits, now: GoldenBits) -> str:
    """Return the first difference from golden bits, in words; "" if there is none."""
    for step, (then, here) in enumerate(zip(golden.digests, now.digests, strict=False)):
        if then != here:
            return f"step {step} is the first that differs: its gradient has the digest {here}, the golden one {then}"
    steps = count(len(now.digests), "step")
    if len(golden.digests) != len(now.digests):
        return f"there are {steps}, and {len(golden.digests)} golden ones"
    if not (paths := unequal(golden.state, now.state)):
        return ""
    return (
        f"all gradients of the {steps} are the golden ones, but {paths[0]} differs after them. So the updates "
        "differ, or something done between the steps"
    )


def changed_words(golden: GoldenBits, now: GoldenBits, name: str) -> str:
    """Return which lines of a script are not those of its golden bits; "" where its text is not known.

    Args:
        name: of the script.
    """
    if not golden.script or not now.script:
        return ""
    return changed_lines(("\n".join(now.script), "\n".join(golden.script)), (name, f"the golden {name}")) or (
        f"{name} has not changed. So something that it reads has: a module, its data, or a package. `unisono compare "
        "--bisect GOOD BAD SCRIPT` finds the commit"
    )


# -- the file ------------------------------------------------------------------------------------------


def golden_file(test: Path, name: str) -> Path:
    """Return the file of golden bits: ``test_train.NAME.bits.json`` beside ``test_train.py``.

    Raises:
        UsageError: the name would not be a part of a file's name everywhere.
    """
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise UsageError(f"golden={name!r} is part of a file name: use letters, digits, and - _ .")
    return test.with_name(f"{test.stem}.{name}.bits.json")


def read(path: Path) -> list[GoldenBits]:
    """Return what a file holds; empty if there is no such file.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[GoldenBits])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} has no golden bits: {error}; remove it, and run pytest --unisono-update") from None


def write(path: Path, now: GoldenBits) -> None:
    """Write golden bits in place of those with the same arithmetic; others stay as they are.

    Raises:
        UsageError: the file holds something else, or cannot be written.
    """
    found = [*(one for one in read(path) if one.arithmetic != now.arithmetic), now]
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
