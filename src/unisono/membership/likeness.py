"""Likeness of a worker that says hello: whether it would compute the same bits as the others."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.core.messages import Hello
from unisono.membership.roster import State

__all__ = ["differences", "objection", "refusal"]


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the entries in which two fingerprints differ, as sentences."""
    return [
        f"{key} is {other.get(key, 'unknown')!r} and not {first.get(key, 'unknown')!r}"
        for key in sorted({*first, *other})
        if first.get(key) != other.get(key)
    ]


def refusal(state: State, hello: Hello) -> str:
    """Return why this worker may not take part and what to do about it; "" if it may."""
    if not state.settings.allow_different_script and (text := _other_script(state, hello)):
        return (
            f"{text}, so it would compute other gradients, and is refused; was the script edited after the run had "
            "begun? Put back the text that the run was started with, or start the run with --set "
            "allow-different-script=yes"
        )
    if state.settings.strict and (text := objection(state, hello)):
        return f"{text}; refused (--strict)"
    return ""


def objection(state: State, hello: Hello) -> str:
    """Return how this worker differs, as a sentence without its subject; "" if it does not."""
    texts = []
    if found := differences(state.fingerprint or hello.fingerprint, hello.fingerprint):
        texts.append(f"computes differently: {', '.join(found)}")
    if text := _other_script(state, hello):
        texts.append(text)
    return " and ".join(texts)


def _other_script(state: State, hello: Hello) -> str:
    # "" is no text at all: of a script that is not there, which says so itself, or of none that is a file.
    if hello.script in ("", state.script) or not state.script:
        return ""
    return f"has another text of the script (checksum {hello.script}) than the run (checksum {state.script})"
