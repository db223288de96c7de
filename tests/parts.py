"""Whether tests that have many cases run all of them (`make nightly`), or the part that each of them names."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["ALL"]

ALL: Final = bool(os.environ.get("UNISONO_TEST_ALL"))
"""A file that reads this is run by `make nightly`; its part is run by `make test` or `make test-more`."""
