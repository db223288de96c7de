"""The text of a file of evidence, without secrets. Values in, text out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from unisono.record.problems.kinds import Trouble, sentence, what_to_do

__all__ = ["MAX_CHARACTERS", "Evidence", "Witness", "redacted", "shown", "shown_environment"]

MAX_CHARACTERS: Final = 400_000
"""Of a file. What is longer is cut in the middle of its longest parts."""
MAX_PART: Final = 16_000
MAX_PARTS: Final = 64
HIDDEN: Final = "(hidden)"

_NAMES: Final = (
    r"[\w.-]{0,40}(?:token(?!iz|s)|passw(?:or)?d|passphrase|secret|credential|api[-_]?key|access[-_]?key|private[-_]?key"
    r"|authorization)[\w.-]{0,40}"
)
_VALUE: Final = r"""(?:"[^"\n]*"|'[^'\n]*'|(?:bearer |basic )?[^\s,;"'&)\]}]+)"""
_PATTERNS: Final = (
    # The address of a webhook is all that one needs to write there.
    (re.compile(r"(\bwebhook[=:]\s?)[^\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    # A user and a password in an address, and whatever follows a "#" of an invitation.
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@\"']{1,500}@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(r"(\b(?:wss?|https?|unisono)://[^\s\"'#]{1,500}#)[^\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    # --token X, --api-key=X, password: X, "secret": "X", API_KEY=X; also as two elements of a list.
    (re.compile(rf"((?<![\w-])--?{_NAMES}[\"']?(?:\s*=\s*|\s*,\s*|\s+))(?!-){_VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"(\b{_NAMES}[\"']?\s*[=:]\s*){_VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    # What is a key by its form.
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abp]-|glpat-|AKIA)[A-Za-z0-9_-]{10,}"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
)
SHOWN: Final = re.compile(
    r"UNISONO_(?!.*TOKEN|WEBHOOK)\w+|OMP_\w+|MKL_\w+|KMP_\w+|OPENBLAS_\w+|CUDA_\w+|CUBLAS_\w+|NCCL_\w+|GLOO_\w+"
    r"|TORCH_\w+|PYTORCH_\w+|NVIDIA_(?:TF32_OVERRIDE|VISIBLE_DEVICES)|ATEN_CPU_CAPABILITY|ONEDNN_\w+|DNNL_\w+|MALLOC_\w+|LD_PRELOAD"
    r"|PYTHON(?:HASHSEED|FAULTHANDLER|MALLOC|UNBUFFERED|OPTIMIZE)|LANG|LC_ALL|TZ"
)
"""The environment variables that a file of evidence may name."""


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker or the agent of a machine says about itself at the moment of a problem."""

    name: str
    """``w2``, or the host of an agent."""
    text: str = ""
    """Stacks, memory; "": it has not answered."""
    missing: str = ""
    """Why it has not answered."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that goes into a file."""

    trouble: Trouble
    facts: Mapping[str, str] = {}
    """The run, in words, by name."""
    workers: Sequence[Witness] = ()
    machines: Sequence[Witness] = ()
    events: Sequence[str] = ()
    """The last ones, a line each."""
    versions: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    settings: str = ""
    recipe: str = ""


def shown(evidence: Evidence, secrets: Collection[str] = ()) -> str:
    """Return the text of the file.

    Args:
        secrets: words that must not stand in it, whatever they look like: the run's token.
    """
    trouble = evidence.trouble
    culprit = trouble.worker_id
    first = sorted(evidence.workers, key=lambda witness: witness.name != culprit)[:MAX_PARTS]

    def part(title: str, text: str) -> list[str]:
        return _part(title, redacted(_cut(text), secrets))

    said = redacted(f"{sentence(trouble)}.\n\nWhat to do: {what_to_do(trouble)}.", secrets)
    parts = [
        f"{_title(f'Unisono: {trouble.kind}', '=')}\n\n{said}",
        redacted(_table(evidence.facts), secrets),
        "Nothing that looked like a password, token or key was written here. Check the output and the settings all "
        "the same before you share this file.",
    ]
    parts += part("What the culprit reports", trouble.detail)
    parts += part("Traceback, or last output of the culprit", trouble.traceback)
    stacks = _witnesses(first, secrets) or "(no worker was left to ask)"
    parts += _part("Stacks of all workers, at the moment of the problem", stacks)
    machines = list(evidence.machines)[:MAX_PARTS]
    parts += _part("Machines, and the memory of their processes", _witnesses(machines, secrets))
    parts += part("Last events", "\n".join(evidence.events))
    parts += part("Versions", _table(evidence.versions))
    parts += part("Relevant environment variables", _table(evidence.environment))
    parts += part("Settings of the run", evidence.settings)
    parts += part("Recipe", evidence.recipe)
    whole = "\n\n".join(filter(None, parts)) + "\n"
    return whole if len(whole) <= MAX_CHARACTERS else whole[:MAX_CHARACTERS] + "\n(cut here)\n"


def redacted(text: str, secrets: Collection[str] = ()) -> str:
    """Return a text without what looks like a password, a token or a key."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, HIDDEN)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those environment variables that a file of evidence may name."""
    return {name: value[:500] for name, value in sorted(environment.items()) if SHOWN.fullmatch(name)}


def _witnesses(witnesses: Sequence[Witness], secrets: Collection[str]) -> str:
    """Return what each has said; those that have said the same stand together."""
    said: dict[str, list[str]] = {}
    for witness in witnesses:
        text = _cut(witness.text) or f"(no answer: {witness.missing})"
        said.setdefault(redacted(text, secrets), []).append(witness.name)
    return "\n\n".join(f"[{', '.join(names)}]\n{text}".rstrip() for text, names in said.items())


def _part(title: str, text: str) -> list[str]:
    return [f"{_title(title)}\n{text}"] if text.strip() else []


def _title(title: str, line: str = "-") -> str:
    return f"{title}\n{line * len(title)}"


def _table(values: Mapping[str, str]) -> str:
    width = max(map(len, values), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in values.items() if value)


def _cut(text: str) -> str:
    if len(text) <= MAX_PART:
        return text
    half = MAX_PART // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out) ...\n{text[-half:]}"
