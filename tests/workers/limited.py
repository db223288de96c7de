"""Runs a script in a process that may have so much memory: ``limited.py FOLDER BYTES SCRIPT [ARGUMENT]...``.

What counts is what the process gets from here on, its part of shared memory as well; what it had before (Python,
torch) does not.
"""

from __future__ import annotations

import os
import runpy
import secrets
import sys
from pathlib import Path

LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The file with the limit of a control group, in version 2 and in version 1."""


def limit_memory(folder: Path, limit: int) -> None:
    """Put this process into a control group of its own.

    Args:
        folder: the control group to make it in.
        limit: bytes. Where there is swap, what goes there is not counted.

    Raises:
        OSError: it is not permitted here, or the kernel has no limits of memory.
    """
    group = folder / f"unisono-test-{secrets.token_hex(8)}"
    group.mkdir()
    try:
        file = next((group / name for name in LIMITS if (group / name).exists()), None)
        if file is None:
            raise FileNotFoundError(f"{group} has no limit of memory")
        file.write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        group.rmdir()
        raise


def main() -> None:
    limit_memory(Path(sys.argv[1]), int(sys.argv[2]))
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
