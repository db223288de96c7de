"""The doctor's program on a machine: ``python -m unisono.tools.doctor``, started by `unisono.tools.doctor.hosts`.

It reads orders from its standard input, and ends with it.
"""

from __future__ import annotations

import sys

import msgspec

from unisono.tools.doctor.orders import ProbeRequest, carry_out

__all__ = ["MARK", "main"]

MARK = "unisono-doctor "
"""Begins each answer: the start-up files of a shell may print, too."""


def main() -> int:
    for line in sys.stdin:
        answer = carry_out(msgspec.json.decode(line, type=ProbeRequest))
        print(MARK + msgspec.json.encode(answer).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
