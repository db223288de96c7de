"""Property tests: the same examples in every run of the checks, new ones when a person runs them."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("checks", derandomize=True, deadline=None, max_examples=200)
settings.register_profile("person", deadline=None, max_examples=200)
settings.load_profile("checks" if os.environ.get("CI") else "person")
