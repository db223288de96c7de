"""The report of a check of GPUs: values, JSON and text, without the names of anybody or of any place."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import unisono

__all__ = ["Report", "Result", "machine", "text_of", "without_names", "write"]

SCHEMA: Final = 1
MOST_WORDS: Final = 1500

Outcome = Literal["passed", "failed", "skipped", "measured"]

FACTS: Final = """
import json, sys, torch
gpus = []
for number in range(torch.cuda.device_count() if sys.argv[1] == "cuda" else 0):
    found = torch.cuda.get_device_properties(number)
    gpus.append({"name": found.name, "memory_gib": round(found.total_memory / 2**30, 1),
                 "capability": f"{found.major}.{found.minor}", "processors": found.multi_processor_count})
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.distributed.is_nccl_available() else ""
print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda or "", "cudnn": torch.backends.cudnn.version() or 0,
                  "nccl": nccl, "torch": torch.__version__}))
"""


@dataclass(frozen=True)
class Result:
    """What came of one check."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    words: str = ""
    """Why it failed, or what was measured."""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Report:
    """Everything that is sent."""

    device: str
    machine: Mapping[str, Any]
    results: list[Result] = field(default_factory=list)
    unisono: str = unisono.__version__
    schema: int = SCHEMA

    def add(self, result: Result) -> None:
        self.results.append(result)

    @property
    def num_failed(self) -> int:
        return sum(one.outcome == "failed" for one in self.results)


def machine(device: str) -> dict[str, Any]:
    """Return versions and GPUs. Asked of another process: a process that has begun CUDA cannot fork workers."""
    done = subprocess.run([sys.executable, "-c", FACTS, device], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found |= {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["driver"] = _driver() if device == "cuda" else ""
    return found


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


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


def text_of(report: Report) -> str:
    """Return the report for people."""
    found = report.machine
    gpus = ", ".join(f"{one['name']} ({one['memory_gib']} GiB, {one['capability']})" for one in found["gpus"]) or "none"
    versions = " ".join(f"{name} {found[name]}" for name in ("torch", "python", "cuda", "cudnn", "nccl", "driver"))
    lines = [
        f"Unisono {report.unisono} on {report.device}",
        f"GPUs: {gpus}",
        f"{versions}; {found['system']} {found['machine']}, {found['cores']} cores",
        "",
    ]
    width = max((len(one.name) for one in report.results), default=0)
    for one in report.results:
        first, *rest = one.words.splitlines() or [""]
        lines.append(f"{one.outcome:8}  {one.name:{width}}  {one.seconds:6.1f} s  {first}".rstrip())
        lines += [f"          {line}" for line in rest]
    counts = {kind: sum(one.outcome == kind for one in report.results) for kind in ("passed", "failed", "skipped")}
    return "\n".join([*lines, "", ", ".join(f"{number} {kind}" for kind, number in counts.items()), ""])


def write(report: Report, folder: Path) -> None:
    """Write ``gpu-report.json`` and ``gpu-report.txt``."""
    (folder / "gpu-report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    (folder / "gpu-report.txt").write_text(text_of(report), encoding="utf-8")
