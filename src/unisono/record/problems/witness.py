"""What a process can say about itself, and about the processes that it has started: stacks, memory, environment.

Without source lines and values of variables: a source may lie on a disk that does not answer, and values are nobody
else's business.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Final

from unisono.core.messages import Beat, Statement
from unisono.core.words import position_words, shown_bytes
from unisono.record.problems.evidence import shown_environment
from unisono.system.descendants import descendants
from unisono.system.stacks import in_one_line

__all__ = ["about_machine", "about_process", "main_place", "own_stacks", "statement", "versions"]

MAX_FRAMES: Final = 40
MAX_THREADS: Final = 24
MAX_CHARACTERS: Final = 16_000
PACKAGES: Final = ("unisono", "torch", "numpy", "msgspec", "websockets")
_OWN: Final = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES: Final = tuple(
    {
        path + os.sep
        for path in (sysconfig.get_paths().get(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        if path
    }
)


def statement(number: int, now: Beat) -> Statement:
    """Return what a worker is doing, with what this process can say about itself.

    Args:
        number: of the head's question; -1: the head has not asked.
        now: where its loop is.
    """
    at = position_words(now.step, now.microbatch, now.samples, evaluates=now.evaluates) or "before its training"
    doing = "waits for others" if now.waiting else "computes"
    text, place, known = f"at {at}: {doing}, for {now.seconds_at:.1f} s", "", {}
    try:
        text, place = f"{text}\n{about_process()}\n{own_stacks()}", main_place()
        known = shown_environment(os.environ)
    except Exception as error:  # evidence never ends a worker
        text += f"\n(no more could be found out: {in_one_line(error)})"
    return Statement(number=number, text=text, place=place, environment=known)


def own_stacks() -> str:
    """Return the Python stacks of all threads of this process, the main thread's first, the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = []
    for ident, frame in frames[:MAX_THREADS]:
        if ident == own and own != main:
            continue  # the thread that answers
        lines = [f"  {_place(each)}" for each in _without_beginning(list(_frames(frame)))]
        name = "main thread" if ident == main else f"thread {names.get(ident, ident)}"
        parts.append("\n".join([f"{name}:", *lines]))
    if len(frames) > MAX_THREADS:
        parts.append(f"({len(frames) - MAX_THREADS} more threads)")
    return "\n".join(parts)[:MAX_CHARACTERS]


def main_place() -> str:
    """Return the innermost line of the script's own code in which the main thread is; "" if it is in none.

    ``dataset.py:33 __getitem__``; where that has called a library: ``dataset.py:33 __getitem__ (in socket.py:720
    readinto)``.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(_frames(frame)) if frame is not None else []
    if not frames:
        return ""
    own = next((each for each in frames if _is_of_script(each.f_code.co_filename)), None)
    if own is None:
        return _place(frames[0], short=True)
    called = "" if own is frames[0] else f" (in {_place(frames[0], short=True)})"
    return _place(own, short=True) + called


def _frames(frame: FrameType | None) -> Iterable[FrameType]:
    number = 0
    while frame is not None and number < MAX_FRAMES:
        yield frame
        frame, number = frame.f_back, number + 1


def _without_beginning(frames: list[FrameType]) -> list[FrameType]:
    """Return the frames without those outermost ones in which this library starts the script."""
    last = max((number for number, each in enumerate(frames) if _is_of_script(each.f_code.co_filename)), default=-1)
    return frames[: last + 1] if last >= 0 else frames


def _place(frame: FrameType, *, short: bool = False) -> str:
    file = frame.f_code.co_filename
    return f"{os.path.basename(file) if short else file}:{frame.f_lineno} {frame.f_code.co_qualname.rpartition('.')[2]}"


def _is_of_script(file: str) -> bool:
    return not file.startswith((_OWN, *_LIBRARIES, "<frozen "))


def about_process(pid: int | str = "self") -> str:
    """Return the memory and the state of a process, as the kernel sees it, in one line; "": there is none."""
    status = _fields(Path(f"/proc/{pid}/status"))
    if not status:
        return ""
    parts = [f"state {status.get('State', '?')}", f"{status.get('Threads', '?')} threads"]
    for name, word in (("VmRSS", "memory"), ("VmHWM", "at most"), ("VmSwap", "swapped out")):
        if name in status and (name != "VmSwap" or not status[name].startswith("0 ")):
            parts.append(f"{word} {_kilobytes(status[name])}")
    with contextlib.suppress(OSError):
        if (channel := Path(f"/proc/{pid}/wchan").read_text().strip()) not in ("", "0"):
            parts.append(f"waits in the kernel's {channel}")
    return ", ".join(parts)


def about_machine(processes: Sequence[tuple[str, int]], limits: str = "") -> str:
    """Return the memory of this machine and of its processes.

    Args:
        processes: (name, pid).
        limits: the limit of the memory of this process's group, in words.
    """
    memory = _fields(Path("/proc/meminfo"))
    found = [
        f"{name} {_kilobytes(memory[name])}" for name in ("MemTotal", "MemAvailable", "SwapFree") if name in memory
    ]
    lines = [f"memory: {', '.join(found)}"] if found else []
    if limits:
        lines.append(f"limit: {limits}")
    with contextlib.suppress(OSError):
        lines.append(f"load: {' '.join(f'{load:.2f}' for load in os.getloadavg())}, {os.cpu_count()} cores")
    known = {pid for _, pid in processes}
    for name, pid in processes:
        lines.append(f"{name} (pid {pid}): {about_process(pid) or 'has ended'}")
        others = [child for child in descendants(pid) if child not in known]
        lines += [f"  started by it: {child}: {about_process(child)}" for child in others[:16]]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Return the versions of what matters, without importing any of it."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _fields(file: Path) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in file.read_text().splitlines())
        return {name: value.strip() for name, _, value in lines}
    return {}


def _kilobytes(value: str) -> str:
    number = value.split()[0] if value.split() else ""
    return shown_bytes(int(number) * 1024) if number.isdecimal() else value
