"""The journal, as a reader sees it that does not want all of it: blocks of lines, and lines by their offset."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

from unisono.record.history import index
from unisono.record.history.index import BLOCK_LINES, Block, Placed, Scanned, block_of, lines_in, scan
from unisono.record.journal.file import backwards
from unisono.system.owned import open_regular

__all__ = ["Lines"]

PIECE_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 40
MOST_LINE_BYTES: Final = 1 << 24
"""What is longer is no line of a journal."""
BUDGET_S: Final = 0.25
"""For so long a call reads lines that no index has; the next call goes on."""
WORTH_SAVING: Final = 64
"""So many blocks, and a quarter of all, are new before the index is saved again."""
KNOWN_BYTES: Final = 256
"""So much before the end of what was read shows, at the next look, whether the file is still the same."""


class Lines:
    """Lines of a journal that may grow while it is read.

    Args:
        path: of the journal, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[Block] = []
        """By offset, each from the end of the one before. The last of them may have room for more lines."""
        self.names: dict[str, None] = {}
        self.size = 0
        """Of the journal."""
        self.num_broken = 0
        self.first_broken = ""
        self.head = b""
        """How the file begins, where it has no whole line."""
        self.error = ""
        self.turn = 0
        """Grows when the file is another one, or was cut: what was known of it holds no more."""
        self._open: list[Placed] = []
        """The lines of the last block, while it has room."""
        self._end = 0
        """All whole lines before this offset are in a block."""
        self._before_end = b""
        """What the journal has before that offset."""
        self._is_all_read = True
        self._num_saved = 0
        """So many blocks are in the index."""
        self._may_save = True
        self._identity: tuple[int, int] | None = None
        self._with_steps: list[Block] | None = None

    @property
    def missing(self) -> float:
        """Part of the journal that was not looked at yet, 0 to 1: no index has it."""
        return (self.size - self._end) / self.size if self.size and not self._is_all_read else 0.0

    def refresh(self, budget_s: float | None = None) -> None:
        """Look at what is new, for ``budget_s`` (default: `BUDGET_S`); the next call goes on."""
        deadline = time.monotonic() + (BUDGET_S if budget_s is None else budget_s)
        try:
            with open_regular(self.path) as file:
                found, descriptor = os.fstat(file.fileno()), file.fileno()
                if (found.st_dev, found.st_ino) != self._identity or not self._is_same(descriptor):
                    self._forget()
                    self._identity = (found.st_dev, found.st_ino)
                    self._load(descriptor)
                self.size, self.error = found.st_size, ""
                self._is_all_read = False
                while self._end < self.size and (placed := _piece(descriptor, self._end, self.size)):
                    self._take(placed, descriptor)
                    if time.monotonic() > deadline:
                        break
                else:
                    self._is_all_read = True  # the rest is half a line
                self.head = os.pread(descriptor, HEAD_BYTES, 0) if not self.blocks else b""
                begin = max(0, self._end - KNOWN_BYTES)
                self._before_end = os.pread(descriptor, self._end - begin, begin)
                self._save()
        except FileNotFoundError:
            if self._identity is not None:
                self._forget()
        except OSError as error:
            self.error = f"{self.path} cannot be read: {error.strerror or error}"

    @property
    def with_steps(self) -> list[Block]:
        """The blocks that have a step."""
        if self._with_steps is None:
            self._with_steps = [block for block in self.blocks if block.steps]
        return self._with_steps

    def between(self, first: int, last: int) -> Sequence[Block]:
        """Return the blocks that have a step from ``first`` to ``last``."""
        blocks = self.with_steps
        begin = bisect.bisect_left(blocks, first, key=attrgetter("last"))
        end = bisect.bisect_right(blocks, last, lo=begin, key=attrgetter("first"))
        return blocks[begin:end]

    def read(self, blocks: Sequence[Block]) -> Iterator[Scanned]:
        """Yield the lines of some blocks."""
        if not blocks:
            return
        with open_regular(self.path) as file:
            at = 0
            while at < len(blocks):
                begin = at
                at += 1
                while at < len(blocks) and blocks[at].offset == blocks[at - 1].end and at - begin < BLOCK_LINES:
                    at += 1
                offset, end = blocks[begin].offset, blocks[at - 1].end
                yield from lines_in(os.pread(file.fileno(), end - offset, offset))

    def offset_of_last(self, num_lines: int) -> int:
        """Return the offset of the last so many lines; that of the end where they cannot be read."""
        with contextlib.suppress(OSError), open_regular(self.path) as file:
            offsets = [offset for offset, _ in itertools.islice(backwards(file), num_lines)]
            return offsets[-1] if offsets else 0
        return self.size

    def texts(self, offset: int) -> list[bytes]:
        """Return the whole lines from ``offset`` on that were there when the file was last looked at."""
        if offset >= self.size:
            return []
        try:
            with open_regular(self.path) as file:
                data = os.pread(file.fileno(), self.size - offset, offset)
        except OSError:
            return []
        return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)

    def _is_same(self, descriptor: int) -> bool:
        """Return whether the file still has what was read of it; it may have been cut, and written on."""
        begin = self._end - len(self._before_end)
        return os.pread(descriptor, len(self._before_end), begin) == self._before_end

    def _forget(self) -> None:
        self.turn += 1
        self.blocks, self.names, self._open = [], {}, []
        self.size = self._end = self._num_saved = self.num_broken = 0
        self.first_broken = self.error = ""
        self.head = self._before_end = b""
        self._is_all_read = True
        self._identity = self._with_steps = None

    # -- the index -----------------------------------------------------------------------------------

    def _load(self, descriptor: int) -> None:
        for block in index.load(self.path, descriptor):
            self._add(block)
            self._end = block.end
        self._num_saved = len(self.blocks)

    def _save(self) -> None:
        """Save what the next reader of a long journal need not read again."""
        whole = self.blocks[:-1] if self._open else self.blocks
        num_new = len(whole) - self._num_saved
        if self._may_save and num_new >= max(WORTH_SAVING, len(whole) // 4):
            try:
                index.save(self.path, whole)
                self._num_saved = len(whole)
            except (OSError, UnicodeEncodeError):  # this process may not write; the name of a log has half a character
                self._may_save = False

    # -- from lines to blocks ------------------------------------------------------------------------

    def _take(self, placed: Sequence[Placed], descriptor: int) -> None:
        at = 0
        while at < len(placed):
            part = placed[at : at + BLOCK_LINES - len(self._open)]
            at += len(part)
            self._open += part
            self._put_open()
            if len(self._open) == BLOCK_LINES:
                self._open = []
        self._end = placed[-1].end
        for each in placed:
            if each.line is None:
                self.num_broken += 1
                if not self.first_broken:
                    text = os.pread(descriptor, min(HEAD_BYTES, each.end - each.offset), each.offset)
                    self.first_broken = text.decode(errors="replace").rstrip("\n")

    def _put_open(self) -> None:
        block = block_of(self._open)
        if self.blocks and self.blocks[-1].offset == block.offset:
            self.blocks.pop()
        self._add(block)

    def _add(self, block: Block) -> None:
        self.blocks.append(block)
        self._with_steps = None
        if not block.values.keys() <= self.names.keys():
            self.names.update(dict.fromkeys(block.values))
        for _, _, totals in block.evaluations:
            self.names.update(dict.fromkeys(f"evaluation/{name}" for name in totals))


def _piece(descriptor: int, begin: int, end: int) -> list[Placed]:
    """Return some whole lines from ``begin`` on; none if none ends before ``end``, or the first one is too long."""
    num_bytes = min(PIECE_BYTES, end - begin)
    while not (placed := scan(begin, os.pread(descriptor, num_bytes, begin))):
        if num_bytes >= min(MOST_LINE_BYTES, end - begin):
            break
        num_bytes = min(4 * num_bytes, MOST_LINE_BYTES, end - begin)
    return placed
