"""Address and token of the head, in the run directory."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from unisono.record.rundir import ADDRESS_FILE, TOKEN_FILE, is_taken
from unisono.system.owned import write_whole

__all__ = ["AddressFiles"]


class AddressFiles:
    """The two files that a head writes into a run directory.

    Args:
        made: the directory that was made for an earlier head; if it is gone, it is not made again.
    """

    def __init__(self, run_id: str, url: str, token: str, made: str) -> None:
        self._run_id = run_id
        self._url = url
        self._token = token
        self._made = made
        self._written: dict[Path, str] = {}

    def write(self, run_dir: str) -> bool:
        """Write the head's address and token into the run directory; `remove` removes both.

        Called before the directory is claimed, so that machines can join, and again after the claim, because another
        run may have written its own address meanwhile. A directory that another run holds is left alone.

        Returns:
            Whether the files were written now.

        Raises:
            OSError: the directory cannot be written to.
        """
        folder = Path(run_dir)
        is_there = self._written and all(_holds(path, text) for path, text in self._written.items())
        if is_there or is_taken(folder, self._run_id):
            return False
        if run_dir != self._made:
            folder.mkdir(parents=True, exist_ok=True)
            self._made = run_dir
        token_file = folder / TOKEN_FILE
        token_file.unlink(missing_ok=True)
        descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self._token)
        self._written[token_file] = self._token
        address = folder / ADDRESS_FILE
        known = {"url": self._url, "pid": os.getpid(), "run_id": self._run_id}
        text = json.dumps(known) + "\n"
        write_whole(address, text.encode())
        self._written[address] = text
        return True

    def remove(self) -> None:
        """Remove the files, unless another head has written its own."""
        for path, text in self._written.items():
            if _holds(path, text):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        self._written.clear()


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False
