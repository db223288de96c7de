"""Whether nobody uses this machine: a command for `unisono join --while`. Exits with 0 if nobody does, else with 1.

    nice unisono join ... --while 'python examples/nobody_uses_it.py'

Somebody uses the machine for `--idle-s` seconds after the last input at a terminal, keyboard or mouse, while a
graphical session has not told logind that it is idle, and where processes with the usual nice value use the cores:
those of the run have another one, by `nice`. Standard library only. It is yours to change.
"""

from __future__ import annotations

import argparse
import glob
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

INPUTS = ("/dev/tty[0-9]*", "/dev/pts/[0-9]*", "/dev/input/event*", "/dev/input/mice")
BUSY = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp", f"unisono-busy-{os.getuid()}")
LOOK_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Exit with 0 if nobody uses this machine.")
    parser.add_argument("--idle-s", type=float, default=300.0, help="nobody has used it for so long")
    parser.add_argument("--cores", type=float, default=0.5, help="that others may use")
    parser.add_argument("--input", action="append", metavar="PATTERN", help="files that show input, instead of devices")
    options = parser.parse_args()
    last = max(input_at(options.input or INPUTS), load_at(options.cores))
    if not options.input:
        last = max(last, session_at())
    away_s = time.time() - last
    if away_s < options.idle_s:
        print(f"somebody has used this machine {max(away_s, 0.0):.0f} s ago")
        return 1
    print(f"nobody has used this machine for {options.idle_s:.0f} s")
    return 0


def input_at(patterns: list[str] | tuple[str, ...]) -> float:
    """Return when there was input: at a device the last read, as `w` shows it; in another file the last write."""
    last = 0.0
    for path in (path for pattern in patterns for path in glob.glob(pattern)):
        try:
            found = os.stat(path)
        except OSError:
            continue
        last = max(last, found.st_atime if stat.S_ISCHR(found.st_mode) else found.st_mtime)
    return last


def load_at(cores: float) -> float:
    """Return when others have used more cores than this, as far as this script has seen it: it notes that in a file."""
    began, before = time.monotonic(), user_seconds()
    time.sleep(LOOK_S)
    if (user_seconds() - before) / (time.monotonic() - began) > cores:
        BUSY.touch()
    return BUSY.stat().st_mtime if BUSY.exists() else 0.0


def user_seconds() -> float:
    """Return the CPU seconds of processes with the usual nice value, since the machine was started."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[1]) / os.sysconf("SC_CLK_TCK")


def session_at() -> float:
    """Return when a graphical session was used; one whose desktop says nothing to logind is used now."""
    last = 0.0
    for line in ask_logind("list-sessions", "--no-legend").splitlines():
        told = ask_logind("show-session", line.split()[0])
        known = dict(entry.split("=", 1) for entry in told.splitlines() if "=" in entry)
        if known.get("Type") in ("x11", "wayland", "mir") and known.get("Class") == "user":
            since = known.get("IdleSinceHint", "")
            is_idle = known.get("IdleHint") == "yes" and since.isdecimal()
            last = max(last, int(since) / 1e6 if is_idle else time.time())
    return last


def ask_logind(*words: str) -> str:
    try:
        return subprocess.run(["loginctl", *words], capture_output=True, text=True, timeout=2, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):  # a machine without logind
        return ""


if __name__ == "__main__":
    sys.exit(main())
