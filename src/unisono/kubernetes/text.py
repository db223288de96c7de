"""Manifests as YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["dump"]

_PLAIN: Final = re.compile(r"[A-Za-z/][\w./-]*")
_WORDS: Final = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def dump(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the documents as one text, for ``kubectl apply -f -``."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a mapping or a list that is not empty."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{_scalar(key)}:", inner)
    else:
        for inner in value:
            if isinstance(inner, Mapping | list) and inner:
                first, *rest = _lines(inner)
                yield f"- {first}"
                yield from (f"  {line}" if line else "" for line in rest)
            else:
                yield f"- {_scalar(inner)}"


def _entry(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list) and value:
        yield key
        yield from (f"  {line}" if line else "" for line in _lines(value))
    elif isinstance(value, str) and _fits_a_block(value):
        yield f"{key} |"
        yield from (f"  {line}" if line else "" for line in value[:-1].split("\n"))
    else:
        yield f"{key} {_scalar(value)}"


def _fits_a_block(text: str) -> bool:
    """Return whether a text of several lines comes back as it was from YAML's literal form."""
    lines = text[:-1].split("\n")
    is_simple = text.isascii() and all(letter.isprintable() or letter == "\n" for letter in text)
    ends_well = text.endswith("\n") and bool(lines[-1].strip())
    return is_simple and ends_well and len(lines) > 1 and bool(lines[0]) and not lines[0].startswith(" ")


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
