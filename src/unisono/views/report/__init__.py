"""Report of a run, or of several side by side: one HTML file that needs nothing else.

account  what there is to say about one run, from the files in its directory
html     the file
"""

from __future__ import annotations

from unisono.views.report.account import Account, account
from unisono.views.report.html import report

__all__ = ["Account", "account", "report"]
