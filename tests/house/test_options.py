"""Every option that a message, a docstring or a page names is there, for the command of which it speaks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from tests.house.rooms import ROOT
from tests.house.test_words import DOCUMENTS
from unisono import cli

SOURCE: Final = ROOT / "src" / "unisono"
OPTION: Final = re.compile(r"(?<![\w\-<|{/+.])--[a-z][a-z0-9-]*(?![\w>-])")
CALL: Final = re.compile(r"unisono ([a-z]+)((?: (?!-- )[^\s`|;(]+)*)(?: -- [^\n`]*)?")
"""A command with what follows it on its line, and the script's own arguments."""

OWN: Final[dict[str, list[str]]] = {
    "tools/certificate/keys.py": ["certify", "verify"],
    "tools/certificate/recomputing.py": ["verify"],
    "tools/certificate/gathering.py": ["certify"],
    "cli/leave_out.py": ["replay"],
    "cli/status.py": ["watch"],
    "core/replay_rules.py": ["replay"],
    "membership/agents.py": ["join"],
    "tools/bisect.py": ["compare"],
}
"""The commands of which the texts of a file speak, besides ``run`` and those that the texts name. The texts of a file
in ``cli``, and of a folder in ``tools``, speak of the command with its name."""
FOREIGN: Final = {
    "Unisono's own modules": "--callable --folder --listen",
    "the user's script": "--lr --epochs --batch-size --data --seed --api-key --token --password --config",
    "the examples": "--force-weight --quick --uniform --no-edges --forget --microbatches",
    "the benchmarks": "--alone --anew --apart --cases --cores --curve --delays --device --idle-s --import --limit-s "
    "--links --only --out --quick --same-allocator --seconds --seeds --sides --simulate --size --sizes --step-time "
    "--steps --turns --within-s",
    "Slurm and mpiexec": "--constraint --details --enable-recovery --exclusive --format --gpus-per-task --jobs "
    "--kill-on-bad-exit --map-by --no-kill --noheader --ntasks --ntasks-per-node --open-mode --overlap --pty --requeue "
    "--signal",
    "torchrun": "--log-dir --monitor-interval --nnodes --node-rank --nproc-per-node --rdzv-backend --rdzv-conf "
    "--rdzv-endpoint --rdzv-id --redirects --standalone --tee",
    "Horovod": "--host-discovery-script --max-np --min-np",
    "Ray, Kubernetes, Docker": "--build-arg --head --platform --replicas --shm-size --working-dir",
    "pip, twine, pytest, TensorBoard": "--dist --extra-index-url --index-url --logdir --no-deps --repository --strict "
    "--unisono-update",
}
"""Options of other programs, which texts name."""
AROUND: Final = {option for words in FOREIGN.values() for option in words.split()}


def options(command: str) -> set[str]:
    found = cli._group.get_command(click.Context(cli._group), command)
    assert found is not None
    return {"--help", "--version"}.union(*([*param.opts, *param.secondary_opts] for param in found.params))


KNOWN: Final = {command: options(command) for command in cli.COMMANDS}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings with several words of a module, or the paragraphs of a page, with their lines."""
    written = path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(written)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\S\s+\S", node.value):
                yield node.lineno, node.value
        return
    for found in re.finditer(r"(?:.+\n)+", written):
        yield written.count("\n", 0, found.start()) + 1, found[0].replace("\\\n", " ")


def unknown(path: Path, commands: list[str]) -> Iterator[str]:
    """Yield the options that a file names, and that are not there."""
    for line, text in texts(path):
        calls = [call for call in CALL.finditer(text) if call[1] in KNOWN]
        for call in calls:
            for option in OPTION.findall(call[2]):
                if option not in KNOWN[call[1]]:
                    yield f"{path.name}:{line}: unisono {call[1]} {option}"
        here = AROUND.union(*(KNOWN[command] for command in ["run", *commands, *(call[1] for call in calls)]))
        for option in OPTION.findall(CALL.sub("", text)):
            if option not in here:
                yield f"{path.name}:{line}: {option}"


def of_file(path: Path) -> list[str]:
    place = path.relative_to(SOURCE)
    return OWN.get(str(place), [name for name in (place.stem, place.parent.name) if name in KNOWN])


def test_every_option_that_a_message_or_a_docstring_names_is_there() -> None:
    assert [found for path in sorted(SOURCE.rglob("*.py")) for found in unknown(path, of_file(path))] == []


def test_every_option_that_a_page_names_is_there() -> None:
    pages = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    named = {path: [word for word in KNOWN if f"unisono {word}" in path.read_text()] for path in pages}
    assert [found for path in pages for found in unknown(path, named[path])] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`unisono run train.py --until 3`", ["unisono run --until"]),
        ("`unisono join RUN --hosts a,b`", ["unisono join --hosts"]),
        ("--hosts names machines, --rendezvous a folder", ["--rendezvous"]),
        ("`unisono run train.py --hosts a -- --learning-rate 1`; `--learning-rate`", ["--learning-rate"]),
    ],
)
def test_an_option_that_is_not_there_is_found(text: str, wrong: list[str], tmp_path: Path) -> None:
    page = ROOT / "docs" / "wrong.md"
    page = tmp_path / "wrong.md"
    page.write_text(f"{text}\n")
    assert [each.partition(": ")[2] for each in unknown(page, [])] == wrong
