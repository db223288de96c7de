"""Optional packages, the extras of pyproject.toml: whether they are there, and the command that installs them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Final

from unisono.core.errors import UsageError

__all__ = ["PackageMissing", "check_platform", "install_words", "need", "needs_torch"]

CPU_BUILDS: Final = "https://download.pytorch.org/whl/cpu"
BUILDS: Final = "https://pytorch.org/get-started/locally"


class PackageMissing(UsageError, ImportError):
    """A package that is not installed: the error has the command that installs it."""


def need(module: str, what: str, extra: str) -> None:
    """Check that an optional package is there, without importing it.

    Raises:
        PackageMissing: it is missing.
    """
    from importlib.util import find_spec

    with contextlib.suppress(ModuleNotFoundError):  # a parent of a dotted name is missing
        if find_spec(module) is not None:
            return
    raise PackageMissing(f"{what} needs the package {module.partition('.')[0]}: {install_words(extra)}")


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Where torch is imported in the block and is not installed, raise `PackageMissing` for it, with how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "torch":
            need("torch", what, "torch")
        raise


def install_words(extra: str) -> str:
    """Return the command that installs an extra: ``pip install 'ray>=2.9'``.

    It names the packages that this installation asks for, and not ``unisono[ray]``: this library is on no index, and
    what may be there under its name is another one.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires("unisono") or []
    except PackageNotFoundError:  # it is imported from its source, which was not installed
        listed = []
    marked = re.compile(rf"extra == (['\"]){re.escape(extra)}\1")
    packages = [f"'{package.strip()}'" for package, _, marker in (each.partition(";") for each in listed)
                if marked.search(marker)]  # fmt: skip
    if not packages:
        return f"pip install '.[{extra}]' in a clone of unisono"
    command = f"pip install {' '.join(packages)}"
    if extra == "torch" and sys.platform == "linux":
        return (
            f"{command} --index-url {CPU_BUILDS} is the build for machines without a GPU; {command} includes CUDA, "
            f"several gigabytes; {BUILDS} has the commands for ROCm and other versions of CUDA"
        )
    return command


def check_platform() -> None:
    """Raise UsageError on a system that has no processes to fork, no file locks and no Unix sockets."""
    if sys.platform == "win32":
        raise UsageError(
            "unisono needs Linux (or macOS, where it was not tried), and this is Windows; install it in WSL 2, which "
            "is Linux: https://learn.microsoft.com/windows/wsl/install"
        )
