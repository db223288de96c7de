"""Process that answers a head's viewers from the run's directory: ``python -m unisono.views.page.reader RUN_ID``.

Each line of its standard input is a list in JSON: a directory and a question; for each it writes one line, the answer
in JSON, or ``{}`` if the directory of the run is not to be seen here.
It has a low priority, so that workers and head come first, and ends with the head.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.record.chronicle import holder_of
from unisono.record.history import History
from unisono.record.rundir import PRIVATE
from unisono.system.lifetime import bind_to_parent, name_process
from unisono.views.page.answers import MOST_BYTES, answer

__all__ = ["main", "reply"]

NICE: Final = 10
LONGEST_S: Final = 5.0
"""For so long a question waits for lines that no index has; then it is answered from those that were read."""


def _history(known: dict[str, History], directory: str, run_id: str) -> History | None:
    """Return the run in this directory; None: it is not there.

    Args:
        known: by directory, the history that was asked for last.
    """
    found = known.pop(directory, None)
    known.clear()
    if holder_of(Path(directory)) != run_id:
        return None
    if found is None:
        found = History(Path(directory))
    else:
        found.refresh()
    found.complete(LONGEST_S)
    known[directory] = found
    return found


def reply(history: History, question: Any) -> bytes:
    """Return the answer to a question."""
    found = answer([history], question)
    if isinstance(found.get("facts"), dict):
        found = {**found, "facts": {key: found["facts"][key] for key in found["facts"] if key not in PRIVATE}}
    data = msgspec.json.encode(found)
    if len(data) > MOST_BYTES:
        text = f"this answer would have {len(data) / 1e6:.0f} MB, and one has {MOST_BYTES / 1e6:.0f} MB at most"
        return msgspec.json.encode({"error": f"{text}: ask for fewer names or points at once"})
    return data


def main() -> int:
    os.nice(NICE)
    bind_to_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's; this process ends with the head
    name_process("unisono reader")
    known: dict[str, History] = {}
    for line in sys.stdin.buffer:
        try:
            directory, question = msgspec.json.decode(line)
            history = _history(known, directory, sys.argv[1])
            found = reply(history, question) if history is not None else b"{}"
        except (
            Exception
        ) as error:  # a bug of this library, or a file that no reader has foreseen: the next one is asked
            found = msgspec.json.encode({"error": f"the run's directory cannot be read: {error}"})
        sys.stdout.buffer.write(found + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
