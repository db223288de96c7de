"""How large the library is, and how much of it a reader has to pass: python -m benchmarks.house [COMMIT ...]

Each commit is a column, and the working tree is the last one. A layer is a folder of ``src/unisono``, or a module that
stands beside the folders. Everything is counted in the source, but for the files of a step, which are those whose
functions run in one step of two workers after the first ones, and for the command line, which is asked.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import benchmarks

ROOT = Path(benchmarks.__file__).resolve().parents[1]
LIMIT_S = 300.0
TIMES = 2
"""A name that stands so many times or more is counted."""

STEP = """
import collections, json, os, sys, threading
import torch
import unisono

OWN = os.path.dirname(unisono.__file__) + os.sep
seen = set()


def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(OWN) and threading.current_thread() is threading.main_thread():
        seen.add(name[len(OWN):])


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
with unisono.Run(sys.argv[1]) as run:
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=8, microbatches=4, epochs=1):
        if step.number == 19:
            sys.setprofile(note)
        elif step.number == 20:
            sys.setprofile(None)
            if run.is_main:
                print("FILES", json.dumps(sorted(seen)))
        for inputs, targets in step:
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

COMMANDS = """
import json
import click
from unisono.cli import _group as cli
found = {}
context = click.Context(cli)
for name in cli.list_commands(context):
    command = cli.get_command(context, name)
    if not command.hidden:
        found[name] = sum(isinstance(one, click.Option) and not one.hidden for one in command.params)
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    columns = [*parser.parse_args().commits, ""]
    with tempfile.TemporaryDirectory() as folder:
        counted = [_counted(_tree(commit, Path(folder) / str(index))) for index, commit in enumerate(columns)]
    print("| " + " | ".join(["", *(commit[:8] or "now" for commit in columns)]) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in counted[-1]:
        print("| " + " | ".join([name, *(str(column[name]) for column in counted)]) + " |")


def _tree(commit: str, folder: Path) -> Path:
    """Return the root of the repository as it is in a commit; "": as it is now."""
    if not commit:
        return ROOT
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def _counted(root: Path) -> dict[str, object]:
    source = root / "src" / "unisono"
    paths = sorted(source.rglob("*.py"))
    trees = {_name(path, source): ast.parse(path.read_text()) for path in paths}
    arrows = {(_layer(module), _layer(other)) for module, tree in trees.items() for other in _imports(tree, trees)}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = Counter(name.rpartition(".")[2] for name in trees if name)
    public = Counter(node.name for node in classes if not node.name.startswith("_"))
    commands = _commands(root)
    files = _files_of_a_step(root)
    pages = list((root / "docs").rglob("*.md"))
    entries = [path.name for path in source.iterdir() if path.name not in ("__pycache__", "py.typed")]
    return {
        "lines of `src/unisono/**/*.py`": f"{sum(len(path.read_text().splitlines()) for path in paths):,}",
        "files of `src/unisono/**/*.py`": len(paths),
        "lines of `tests/**/*.py`": f"{_lines(root / 'tests'):,}",
        "entries of `ls src/unisono`, without py.typed": len(entries),
        "arrows between layers": len({(a, b) for a, b in arrows if a != b and a and b}),
        "files of the library in one plain step": len(files),
        "their lines": f"{sum(len((source / name).read_text().splitlines()) for name in files):,}",
        "arguments of `TrainingLoop`": _arguments(trees, "TrainingLoop", "__init__"),
        "arguments of `run.local_steps`": _most_arguments(trees, "local_steps"),
        "attributes of the largest class": max(_attributes(node) for node in classes),
        "protocols": sum(any("Protocol" in ast.unparse(base) for base in node.bases) for node in classes),
        "commands": len(commands),
        "visible options": sum(commands.values()),
        "visible options of `run`": commands["run"],
        "module names that stand twice or more": sum(count >= TIMES for count in names.values()),
        "public class names that stand twice or more": sum(count >= TIMES for count in public.values()),
        "pages of documentation": len(pages),
        "words of documentation": f"{sum(len(path.read_text().split()) for path in pages):,}",
    }


def _name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _layer(module: str) -> str:
    return module.partition(".")[0]


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def _imports(tree: ast.Module, modules: dict[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "unisono":
            for alias in node.names:
                name = f"{node.module}.{alias.name}".removeprefix("unisono.")
                yield name if name in modules else name.rpartition(".")[0]


def _arguments(trees: dict[str, ast.Module], owner: str, method: str) -> int:
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == owner:
                return _most_arguments({"": ast.Module(body=[node], type_ignores=[])}, method)
    return 0


def _most_arguments(trees: dict[str, ast.Module], name: str) -> int:
    return max(
        (
            len(node.args.args) + len(node.args.kwonlyargs) - 1
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        ),
        default=0,
    )


def _attributes(owner: ast.ClassDef) -> int:
    """How many attributes a class gives its objects in ``__init__``, or has as fields."""
    fields = {
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            fields |= {
                node.attr
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            }
    return len(fields)


def _commands(root: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads(_python(root, "-c", COMMANDS))
    return found


def _files_of_a_step(root: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "step.py"
        script.write_text(STEP)
        command = ("-m", "unisono", "run", str(script), "--workers", "2", "--", str(Path(folder) / "run"))
        said = _python(root, *command)
    (files,) = re.findall(r"FILES (.*)", said)
    found: list[str] = json.loads(files)
    return found


def _python(root: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout


if __name__ == "__main__":
    main()
