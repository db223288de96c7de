"""Numbers, names and positions as words."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from typing import Final

__all__ = [
    "NAMES_THE_LINE",
    "clock_duration",
    "count",
    "duration",
    "evidence_words",
    "exit_words",
    "harmless",
    "listed",
    "number",
    "part_words",
    "position_words",
    "progress",
    "script_in",
    "short_duration",
    "shown_bytes",
    "silent_exit_words",
    "stopping_words",
    "without_evidence",
    "without_password",
]


EVIDENCE: Final = "evidence (stacks, memory, last events)"
OF_SCRIPT: Final = "what is known of the script's error"
"""Also of values that are not finite, and of memory that it has used up."""

NAMES_THE_LINE: Final = "`unisono check SCRIPT` names the line"
"""The end of an error whose cause is probably the script."""


def count(number: int, noun: str) -> str:
    """Return ``1 worker``, ``2 workers``, ``3 processes``."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}es" if noun.endswith(("s", "ch")) else f"{number} {noun}s"


def part_words(part: int, num_parts: int) -> str:
    """Return which part of the model a worker has: ``part 2 of 4``, counted from 0; "" where there is only one."""
    return f"part {part} of {num_parts}" if num_parts > 1 else ""


def without_evidence(lines: Sequence[str]) -> list[str]:
    """Return what a run has said, without the lines that name its evidence: it goes with the run's directory."""
    starts = [f"unisono: {words}: " for words in (OF_SCRIPT, EVIDENCE)]
    return [line for line in lines if not any(start in line for start in starts)]


def evidence_words(problem: str) -> str:
    """Return what the evidence of a problem of that kind is good for: an error of the script is no bug of others."""
    return OF_SCRIPT if problem in ("error", "nan", "out-of-memory") else EVIDENCE


def duration(seconds: float) -> str:
    """Return ``0.35 s``, ``12.3 s``, ``4 min 12 s``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def short_duration(seconds: float) -> str:
    """Return ``35 ms`` or ``1.2 s``, of a part of a step."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def clock_duration(seconds: float) -> str:
    """Return ``0:07``, ``2:03:04``, ``3 d 02:03``: as long while it grows."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, within = divmod(hours, 24)
    if days:
        return f"{days} d {within:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Return a number with four digits that count, in at most ten characters."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:.3e}"


def without_password(url: str) -> str:
    """Return a URL without its password; any other text as it is."""
    return re.sub(r"(://[^/@:,\s]*):[^,\s]*@", r"\1:***@", url)


def shown_bytes(number: float) -> str:
    """Return ``1.5 GB``, ``310 MB``, ``12 kB``, ``999 B``."""
    if not math.isfinite(number):
        return "an unknown amount"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if abs(number) >= size:
            value = number / size
            return f"{value:.1f} {unit}" if abs(value) < 10 else f"{value:.0f} {unit}"
    return f"{number / 1e3:.0f} kB" if abs(number) >= 1e3 else f"{number:.0f} B"


def listed(names: Sequence[str], word: str = "and") -> str:
    """Return ``w1``, ``w1 and w2``, ``w1, w2 and w3``."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def script_in(arguments: Sequence[object]) -> str:
    """Return the script of a command, or its module: ``train.py``, ``-m training``."""
    return " ".join(str(each) for each in arguments[: 2 if arguments[:1] in (["-m"], ("-m",)) else 1])


def progress(done: int, total: int, unit: str = "step") -> str:
    """Return ``3 of 40 steps``; ``3 steps`` if the total is 0, which means unknown.

    The numbers of steps (`Step.number`, the journal, errors) begin at 0. The terminal shows how many steps are done.
    """
    return f"{done} of {count(total, unit)}" if total else count(done, unit)


ALONE_ADVICE: Final = (
    "The fit() of a framework trains without Unisono: write the loop with `for step in run.steps(...)`"
)
"""What to do where a script has trained outside of the run."""


def position_words(step: int, microbatch: int, samples: Sequence[int] = (), *, evaluates: bool = False) -> str:
    """Return ``step 4, micro-batch 2 (samples 17, 3)``, without the parts that are -1 (unknown); "" if all are."""
    if evaluates:
        where = f"step {step}, " if step >= 0 else ""
        return f"{where}batch {microbatch} of an evaluation"
    if step < 0:
        return ""
    text = f"step {step}" + (f", micro-batch {microbatch}" if microbatch >= 0 else "")
    if samples:
        noun = "samples" if len(samples) > 1 else "sample"
        text += f" ({noun} {', '.join(map(str, samples[:8]))}{', ...' if len(samples) > 8 else ''})"
    return text


def stopping_words(reason: str) -> str:
    """Return the sentence about a run that was asked to stop."""
    return f"{reason}: the run ends at the end of the step"


def exit_words(exit_code: int) -> str:
    """Return how a process has ended, as a predicate: it follows the name of the process."""
    if exit_code < 0:
        try:
            name = f" ({signal.Signals(-exit_code).name})"
        except ValueError:
            name = ""
        return f"was killed by signal {-exit_code}{name}"
    return f"ended with exit code {exit_code}"


def silent_exit_words(exit_code: int) -> str:
    """Return how a process has ended that was to report an error before, and did not."""
    return f"{exit_words(exit_code)}{' and did not report an error' if exit_code >= 0 else ''}"


_ESCAPES: Final = re.compile(
    r"""
    (?P<colours> \x1b \[ [0-9;:]{0,64} m )                        # the only ones that are kept, and only if wanted
    | (?: \x1b \[ | \x9b ) [0-?]* [\ -/]* [@-~]?                  # moves of the cursor, questions to the terminal ...
    | (?: \x1b [\]PX^_] | [\x9d\x90\x98\x9e\x9f] ) [^\x07\x1b\x9c]* (?: \x07 | \x1b\\ | \x9c )?   # titles, links ...
    | \x1b [\ -/]* [0-~]?
    """,
    re.VERBOSE,
)
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
"""Also those that hide text, or turn its direction. The tab is no harm."""
_TAB: Final = 4


def harmless(text: str, *, keeps_colours: bool = False) -> str:
    """Return one line of text without anything that a terminal would obey.

    Args:
        keeps_colours: keep sequences that set colours; who writes the text resets them after it.
    """
    if text.isascii() and text.isprintable():
        return text
    kept = r"\g<colours>" if keeps_colours else ""
    pieces = []
    end = 0
    for found in _ESCAPES.finditer(text):
        pieces.append(_CONTROLS.sub("", text[end : found.start()]))
        if keeps_colours and found["colours"]:
            pieces.append(found.expand(kept))
        end = found.end()
    pieces.append(_CONTROLS.sub("", text[end:]))
    return "".join(pieces).expandtabs(_TAB)
