"""What another machine, its Python, and ssh have answered, and what that means in words."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from unisono.core.words import exit_words

__all__ = ["SSH_FAILED", "VERSION", "Answer", "why_no_answer", "why_ssh_failed"]

VERSION: Final[str] = importlib.import_module("unisono").__version__
SSH_FAILED: Final = 255
"""ssh's own exit code; a holder never ends with it."""
NOT_FOUND: Final = 127

_CAUSES: Final = (
    (r"client_loop|read from remote host|closed by remote|not responding", "has lost its connection"),
    (r"permission denied|too many authentication", "refuses the key of this user"),
    (r"host key verification failed|identification has changed", "has an unknown or a changed host key"),
    (r"could not resolve|connection refused|timed out|no route|unreachable|banner exchange", "cannot be reached"),
    (r"closed by|broken pipe|reset by|connection abort|connection closed", "has lost its connection"),
)
_ADVICE: Final = {
    "refuses the key of this user": "`ssh-copy-id {name}`, or an agent (`ssh-add`): ssh must not have to ask",
    "has an unknown or a changed host key": "call `ssh {name}` once by hand and check the key",
    "cannot be reached": "see `ssh {name}`, and the name, port and jump host in the configuration of ssh",
}


class Answer(msgspec.Struct, frozen=True):
    """What `probe.answer` returns."""

    python: tuple[int, int, int]
    executable: str
    host: str
    unisono: str = ""
    has_source: bool = False
    torch: str = ""
    arithmetic: dict[str, str] = {}
    error: str = ""
    room: int = 0
    has_folder: bool = False
    script: str = ""
    has_tree: bool = False
    copy: str = ""
    reached: tuple[str, ...] = ()

    def why_not(self, python: str) -> str:
        """Return why the Python there cannot run an agent; "" if it can."""
        version = ".".join(map(str, self.python))
        other = "name another interpreter with --set remote-python=PATH"
        if self.python < (3, 11, 0):
            return f"{python} is Python {version} there, and 3.11 is the oldest that Unisono runs with; {other}"
        if not self.unisono:
            return f"{python} has no unisono there ({self.error}); install version {VERSION}, or {other}"
        if self.unisono != VERSION:
            return f"{python} has unisono {self.unisono} there, and this is {VERSION}; install the same"
        if not self.has_source:
            return (
                f"{python} has another unisono {self.unisono} there than this one (its source differs); update both to "
                "the same commit"
            )
        if not self.torch:
            return f"{python} has no torch there ({self.error}); install it, or {other}"
        return ""


def why_ssh_failed(lines: Sequence[str]) -> tuple[str, str]:
    """Return what ssh's own words mean, as a predicate that follows the name of a machine, and the line that says so.

    Args:
        lines: the last lines of its output.
    """
    for line in reversed(lines):
        for pattern, meaning in _CAUSES:
            if re.search(pattern, line, re.IGNORECASE):
                return meaning, line.strip()
    said = [line.strip() for line in lines if line.strip()]
    return "has lost its connection", said[-1] if said else "ssh has said nothing"


def why_no_answer(name: str, python: str, code: int | None, output: str) -> str:
    """Return why a program on a machine has not said what it was to say.

    Args:
        code: the exit code of ssh; None if it took too long.
        output: what was printed, to standard error if there was something.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "nothing was printed"
    if code is None:
        return f"it has not answered in time; see `ssh {name}`"
    if code == SSH_FAILED:
        cause, line = why_ssh_failed(lines)
        advice = _ADVICE.get(cause, "").format(name=name)
        return f"it {cause} ({line}){'; ' + advice if advice else ''}"
    if code == NOT_FOUND or "not found" in last.lower() or "no such file" in last.lower():
        return (
            f"there is no {python} there ({last}); install Python with unisono {VERSION} at the same path, "
            "or say where it is with --set remote-python=PATH"
        )
    return f"{python} there {exit_words(code)}: {last}"
