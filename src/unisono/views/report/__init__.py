"""Report of a run, or of several side by side: one HTML file that needs nothing else.

account     what there is to say about one run, from the files in its directory
runs_table  many runs, a row for each
html        the file
"""

from __future__ import annotations

from unisono.views.report.account import Account, account
from unisono.views.report.html import report
from unisono.views.report.runs_table import RunsTable, runs_table

__all__ = ["Account", "RunsTable", "account", "report", "runs_table"]
