"""The report of a check of GPUs: values, JSON, text and HTML, without the names of anybody or of any place."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final, Literal

import unisono

__all__ = ["NAME", "Report", "Result", "code", "html_of", "machine", "read", "shortened", "text_of", "write"]

SCHEMA: Final = 2
NAME: Final = "gpu-report"
MOST_WORDS: Final = 1500

Outcome = Literal["passed", "failed", "skipped", "measured"]

FACTS: Final = """
import importlib, json, sys, torch
device, module = sys.argv[1:]
if module:
    importlib.import_module(module)
if not device:
    found = torch.accelerator.current_accelerator()
    device = found.type if found is not None and torch.get_device_module(found).is_available() else ""
gpus = []
if device not in ("", "cpu"):
    own = torch.get_device_module(device)
    for number in range(own.device_count() if own.is_available() else 0):
        found = own.get_device_properties(number)
        gpus.append({"name": own.get_device_name(number),
                     "memory_gib": round(getattr(found, "total_memory", 0) / 2**30, 1),
                     "capability": ".".join(str(getattr(found, part)) for part in ("major", "minor")
                                            if hasattr(found, part)),
                     "processors": getattr(found, "multi_processor_count", 0)})
is_cuda = device == "cuda" and bool(gpus)
nccl = ".".join(map(str, torch.cuda.nccl.version())) if is_cuda and torch.distributed.is_nccl_available() else ""
print(json.dumps({"device": device, "gpus": gpus, "cuda": torch.version.cuda or torch.version.hip or "",
                  "cudnn": torch.backends.cudnn.version() or 0, "nccl": nccl, "torch": torch.__version__}))
"""


@dataclass(frozen=True)
class Result:
    """What came of one check, or of a part of it."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    words: str = ""
    """Why it failed, or what was measured."""
    figures: Mapping[str, float] = field(default_factory=dict)
    goal: float | None = None
    """What the figure ``ratio`` should reach."""

    @property
    def verdict(self) -> str:
        """The outcome; of a measured ratio with a goal, whether it is reached."""
        if self.outcome != "measured" or self.goal is None:
            return self.outcome
        return "reached" if self.figures["ratio"] >= self.goal else "below the goal"


@dataclass
class Report:
    """Everything that is sent."""

    device: str
    machine: Mapping[str, Any]
    results: dict[str, list[Result]] = field(default_factory=dict)
    """By check. A check that has no entry was not begun, or not brought to its end."""
    codes: dict[str, str] = field(default_factory=dict)
    """By check: the code that was checked (`code`)."""
    unisono: str = unisono.__version__
    schema: int = SCHEMA

    def add(self, check: str, results: Iterable[Result], version: str) -> None:
        """Put the results of a whole check in the place of earlier ones."""
        self.results[check] = list(results)
        self.codes[check] = version

    def is_done(self, check: str) -> bool:
        """Return whether a check has ended and nothing of it has failed."""
        return all(one.outcome != "failed" for one in self.results[check]) if check in self.results else False

    @property
    def rows(self) -> list[Result]:
        return [one for each in self.results.values() for one in each]

    @property
    def num_failed(self) -> int:
        return sum(one.outcome == "failed" for one in self.rows)


def machine(device: str, module: str = "") -> dict[str, Any]:
    """Return versions and GPUs. Asked of another process: a process that has begun CUDA cannot fork workers.

    Args:
        device: "": the accelerator that torch finds.
        module: is imported first; it makes the device known to torch.

    Raises:
        ValueError: torch knows no such device, or there is no such module.
    """
    done = subprocess.run([sys.executable, "-c", FACTS, device, module], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"--device {device or 'of torch'} cannot be used: {why}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found |= {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["driver"] = _driver() if found["device"] == "cuda" else ""
    return found


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def code(root: Path) -> str:
    """Return a digest of the library and of these checks: results of other code are told apart."""
    digest = hashlib.blake2b(digest_size=4)
    for folder in ("src/unisono", "benchmarks/gpu"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def without_names(text: str) -> str:
    """Replace what says who and where in the words of an error: folders, the host, the user, addresses."""
    text = re.sub(r"(?<![\w.])~?/(?:[\w.+@-]+/)+", ".../", text)
    for name, stands in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(name) > 1:
            text = re.sub(rf"\b{re.escape(name)}(-[0-9a-f]{{4}})?\b", stands, text)
    return re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "<address>", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def shortened(text: str) -> str:
    """Return the end of an output, which says what went wrong, without names."""
    text = without_names(text.strip())
    return text if len(text) <= MOST_WORDS else f"... {text[-MOST_WORDS:]}"


# -- texts -------------------------------------------------------------------------------------------------------


def text_of(report: Report) -> str:
    """Return the report for people."""
    rows = report.rows
    width = max((len(one.name) for one in rows), default=0)
    wide = max((len(one.verdict) for one in rows), default=0)
    lines = [*_head(report), ""]
    for one in rows:
        first, *rest = one.words.splitlines() or [""]
        lines.append(f"{one.verdict:{wide}}  {one.name:{width}}  {one.seconds:6.1f} s  {first}".rstrip())
        lines += [f"{'':{wide}}  {line}" for line in rest]
    return "\n".join([*lines, "", _sum(report), ""])


def _head(report: Report) -> list[str]:
    found = report.machine
    gpus = ", ".join(f"{one['name']} ({one['memory_gib']} GiB, {one['capability']})" for one in found["gpus"]) or "none"
    versions = " ".join(f"{name} {found[name]}" for name in ("torch", "python", "cuda", "cudnn", "nccl", "driver"))
    return [
        f"Unisono {report.unisono} on {report.device}",
        f"GPUs: {gpus}",
        f"{versions}; {found['system']} {found['machine']}, {found['cores']} cores",
    ]


def _sum(report: Report) -> str:
    counts = {kind: sum(one.outcome == kind for one in report.rows) for kind in ("passed", "failed", "skipped")}
    words = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    below = sum(one.verdict == "below the goal" for one in report.rows)
    versions = len(set(report.codes.values()))
    words += f", {below} below the goal" if below else ""
    return words + (f"; of {versions} states of the code" if versions > 1 else "")


STYLE: Final = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1c1c1c;background:#fff}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.35rem .6rem;
border-bottom:1px solid #ddd}td.n{text-align:right;white-space:nowrap}pre{margin:0;white-space:pre-wrap;font-size:.85em}
.v{white-space:nowrap;font-weight:600}.passed,.reached{color:#12703a}.failed,.below{color:#b3261e}.skipped{color:#666}
@media(prefers-color-scheme:dark){body{color:#eee;background:#181818}td,th{border-color:#444}
.passed,.reached{color:#6fcf8f}.failed,.below{color:#ff8a80}.skipped{color:#aaa}}
"""


def html_of(report: Report) -> str:
    """Return the report as one HTML file, which fetches nothing: a verdict for each row."""
    head = _head(report)
    rows = []
    for one in report.rows:
        first, *rest = one.words.splitlines() or [""]
        more = f"<pre>{escape(chr(10).join(rest))}</pre>" if rest else ""
        kind = one.verdict.partition(" ")[0]
        rows.append(
            f'<tr><td class="v {kind}">{escape(one.verdict)}</td><td>{escape(one.name)}</td>'
            f'<td class="n">{one.seconds:.1f} s</td><td>{escape(first)}{more}</td></tr>'
        )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(head[0])}</title><style>{STYLE}</style>",
            f"<h1>{escape(head[0])}</h1>",
            *(f"<p>{escape(line)}</p>" for line in head[1:]),
            f"<p><b>{escape(_sum(report))}</b></p>",
            "<table><tr><th>Verdict</th><th>Check</th><th>Time</th><th>What was found</th></tr>",
            *rows,
            "</table></html>\n",
        ]
    )


def write(report: Report, folder: Path) -> None:
    """Write ``gpu-report.json``, ``gpu-report.txt`` and ``gpu-report.html``. Each is whole at any time."""
    for ending, text in (
        ("json", json.dumps(asdict(report), indent=1) + "\n"),
        ("txt", text_of(report)),
        ("html", html_of(report)),
    ):
        new = folder / f".{NAME}.{ending}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / f"{NAME}.{ending}")


def read(folder: Path) -> Report | None:
    """Return the report that lies in a folder, or None.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / f"{NAME}.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']}, and this version writes {SCHEMA}")
        found["results"] = {name: [Result(**one) for one in each] for name, each in found["results"].items()}
        return Report(**found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path.name} cannot be read ({error})") from error
