"""What the tests of the house know about the source: its files, its modules and what each of them imports."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "unisono"


@functools.cache
def modules() -> dict[str, Path]:
    """All modules below the facade, by their name without ``unisono.``: "errors", "exchange", "head.server"."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        # A package's face that only says what it is for has nothing to check.
        if name and (path.name != "__init__.py" or parse(path).body[1:]):
            found[name] = path
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def own_imports(module: str, path: Path) -> set[str]:
    """The modules of this package that ``module`` imports anywhere, also inside functions; the facade is ``""``."""
    names = {name.removeprefix("unisono.") for name in imported_names(module, path) if name.startswith("unisono.")}
    if "unisono" in imported_names(module, path):
        names.add("")
    return {_module_of(name) for name in names} - {module}


def foreign_imports(module: str, path: Path) -> set[str]:
    """The top-level packages, other than this one, that ``module`` imports anywhere."""
    return {name.partition(".")[0] for name in imported_names(module, path)} - {"unisono"}


def third_party(packages: set[str]) -> set[str]:
    return {package for package in packages if package not in sys.stdlib_module_names}


def imported_names(module: str, path: Path) -> set[str]:
    """Full names, ``unisono.core.tree.Node`` for ``from unisono.core.tree import Node``."""
    found = set()
    for statement in ast.walk(parse(path)):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            start = statement.module or ""
            if statement.level:
                package = (
                    ["unisono", *module.split(".")]
                    if path.name == "__init__.py"
                    else ["unisono", *module.split(".")[:-1]]
                )
                package = package[: len(package) - statement.level + 1]
                start = ".".join([*package, start] if start else package)
            found |= {f"{start}.{alias.name}" for alias in statement.names}
    return found


def _module_of(name: str) -> str:
    """The longest prefix of ``name`` that is a module. A single name that is none comes out of the facade."""
    whole = name
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or whole.rpartition(".")[0]
