"""The Dockerfile, where nobody can build an image: its instructions are carried out in an environment of this machine,
and leave what the pods of a run start with. The image that it begins with, and what it fetches, are not tried.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import unisono
from tests.house.built import built_once, needs_hatchling  # a fixture among them  # noqa: F401
from tests.house.rooms import ROOT
from tests.house.test_installed import clean, emptied, link_needed, linked
from tests.waiting import WAIT_S
from unisono.core.settings import SETTINGS

pytestmark = needs_hatchling


def instructions() -> Iterator[tuple[str, str]]:
    """The instructions of the Dockerfile, with what follows each."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        yield name, rest


class Image:
    """An image under way: its file system is a folder, but for the programs and libraries of this machine.

    Args:
        context: the folder from which COPY takes.
        root: the file system.
        programs: the folder of an environment's programs.
    """

    def __init__(self, context: Path, root: Path, programs: Path) -> None:
        self._context, self._root = context, root
        self._variables = {**clean(root), "PATH": f"{programs}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
        self._folder = root
        self.user = ""
        self.command: list[str] = []

    def _there(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def take(self, name: str, rest: str) -> None:
        match name:
            case "ARG" | "ENV":
                pairs = dict(word.partition("=")[::2] for word in shlex.split(rest))
                self._variables |= {
                    key: str(self._there(value)) if key == "HOME" else value for key, value in pairs.items()
                }
            case "FROM":
                assert rest == "python:${PYTHON}-slim"
            case "WORKDIR":
                self._folder = self._there(rest)
                self._folder.mkdir(parents=True)
            case "COPY":
                pattern, target = rest.split()
                self._there(target).mkdir(parents=True)
                for path in self._context.glob(pattern):
                    shutil.copy(path, self._there(target))
            case "RUN":
                self.run("sh", "-c", re.sub(r"(?<![\w.:/])/tmp/", f"{self._there('/tmp')}/", rest))
            case "USER":
                self.user = rest
            case "CMD":
                self.command = [word.strip('" ') for word in rest.strip("[]").split(",")]
            case _:
                raise AssertionError(f"{name} is not known to this test")

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self._folder, env=self._variables, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def image(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """What the wheel asks for is there already, and pip finds it so."""
    folder = tmp_path_factory.mktemp("image")
    programs, site = emptied(folder / "usr")
    link_needed(next(built.glob("*.whl")), site, "torch")
    linked("pip", site)
    (programs / "pip").write_text(f'#!/bin/sh\nexec "{programs}/python" -m pip "$@"\n')
    (programs / "pip").chmod(0o755)
    context = folder / "context"
    context.mkdir()
    (context / "dist").symlink_to(built)
    made = Image(context, folder / "root", programs)
    (folder / "root").mkdir()
    for name, rest in instructions():
        made.take(name, rest)
    return made


def test_the_instructions_leave_what_pods_start_with(image: Image) -> None:
    assert image.run("unisono", "--version").startswith(f"unisono {unisono.__version__} (torch 2")
    assert "Usage: unisono" in image.run(*image.command)
    for command in ("run", "join"):  # as in src/unisono/cluster/launchers/kubernetes/manifests.py
        assert "Usage: unisono" in image.run("unisono", command, "--help")
    assert int(image.user) == SETTINGS["kubernetes.user"].default > 0


def test_the_image_gets_the_wheel_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["*", "!dist/*.whl"]
    assert [rest.split()[0] for name, rest in instructions() if name == "COPY"] == ["dist/*.whl"]


def test_the_page_and_the_file_say_the_same_command() -> None:
    command = "make dist && docker build -t registry/train:1 ."
    assert command in (ROOT / "docs" / "clusters.md").read_text()
    assert command in (ROOT / "Dockerfile").read_text()
