"""What shows that somebody uses this machine: input at its terminals and devices, and the load of other processes."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import math
import os
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from unisono.decisions.idleness import Idleness, Limits, Look

__all__ = ["Watching", "last_input", "others_seconds", "own_seconds", "session_input"]

LOOK_S: Final = 1.0
KEYBOARD: Final = "i8042"
KEYBOARD_COUNTS: Final = "/proc/interrupts"
LOGIND: Final = "logind"
GRAPHICAL: Final = ("x11", "wayland", "mir")
LOGIND_EVERY_S: Final = 5.0
LOGIND_S: Final = 2.0
IDLE_HINTS: Final = ("-p", "IdleHint", "-p", "IdleSinceHint")

_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Watching:
    """Looks at the machine every second, and tells when it becomes idle or is used again.

    Args:
        inputs: patterns of files. Of a device the time of the last read counts, as `w` shows it; of another file the
            time of the last write: a program may touch one at each input that it sees. ``/proc/interrupts``: the
            keyboard's and the mouse's count, where they have lines of their own there. ``logind``: a graphical session
            counts as used as long as its desktop does not tell logind that it is idle.
        on_change: receives whether the machine is idle, and why.
    """

    def __init__(self, limits: Limits, inputs: Sequence[str], on_change: Callable[[bool, str], None]) -> None:
        self._limits = limits
        self._inputs = inputs
        self._on_change = on_change

    async def run(self) -> None:
        """Watch until cancelled."""
        at, seconds, keys, keys_at = time.time(), others_seconds(), _interrupts(), -math.inf
        session_at, asked_at = -math.inf, -math.inf
        state = Idleness(used_at=at)
        while True:
            await asyncio.sleep(min(LOOK_S, self._limits.idle_s / 4))
            now, now_seconds, now_keys = time.time(), others_seconds(), _interrupts()
            if now_keys != keys and KEYBOARD_COUNTS in self._inputs:
                keys_at = now
            if LOGIND in self._inputs and now - asked_at >= LOGIND_EVERY_S:
                session_at, asked_at = await asyncio.to_thread(session_input, now), now
            load = (now_seconds - seconds) / max(now - at, 1e-3)
            look = Look(at=now, input_at=max(last_input(self._inputs), keys_at, session_at), load=load)
            before, state = state, state.after(look, self._limits)
            at, seconds, keys = now, now_seconds, now_keys
            if state.is_idle != before.is_idle:
                self._on_change(state.is_idle, state.why)


def last_input(patterns: Sequence[str]) -> float:
    """Return when there was input at one of these files for the last time; -inf if there are none."""
    times = [-math.inf]
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                found = os.stat(path)
                times.append(found.st_atime if stat.S_ISCHR(found.st_mode) else found.st_mtime)
    return max(times)


def session_input(now: float) -> float:
    """Return when a graphical session was used for the last time, as its desktop tells logind; -inf if none is there.

    A session that is not idle, or whose desktop says nothing, is used now.
    """
    times = [-math.inf]
    for session in _ask_logind("list-sessions", "--no-legend").splitlines():
        told = _ask_logind("show-session", session.split()[0], "-p", "Type", "-p", "Class", *IDLE_HINTS)
        known = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        if known.get("Type") in GRAPHICAL and known.get("Class") == "user":
            since = known.get("IdleSinceHint", "")  # microseconds
            is_idle = known.get("IdleHint") == "yes" and since.isdecimal()
            times.append(int(since) / 1e6 if is_idle else now)
    return max(times)


def _ask_logind(*words: str) -> str:
    try:
        done = subprocess.run(["loginctl", *words], capture_output=True, text=True, timeout=LOGIND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a machine without logind
        return ""
    return done.stdout


def others_seconds() -> float:
    """Return the CPU seconds of this machine since it was started, without `own_seconds`."""
    with open("/proc/stat") as file:
        user, nice, system = (int(value) for value in file.readline().split()[1:4])
    return (user + nice + system) / _TICKS - own_seconds()


def own_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, those that have ended included."""
    ticks, children = 0, _children()
    tree = [os.getpid()]
    while tree:
        pid = tree.pop()
        tree += children.get(pid, ())
        with contextlib.suppress(OSError, IndexError):
            ticks += sum(int(value) for value in _fields(pid)[11:15])
    return ticks / _TICKS


def _children() -> dict[int, list[int]]:
    """Return the processes of this machine by their parent."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                found.setdefault(int(_fields(int(entry))[1]), []).append(int(entry))
    return found


def _fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third on."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _interrupts() -> str:
    """Return the counts of the interrupts of a keyboard and a mouse that have lines of their own."""
    with contextlib.suppress(OSError):
        return "".join(line for line in Path(KEYBOARD_COUNTS).read_text().splitlines() if KEYBOARD in line)
    return ""
