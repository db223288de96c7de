"""Runs the Python blocks of the documentation, all in this process, each in a folder of its own.

python -m tests.docs.running                     # of README and docs/
python -m tests.docs.running docs/porting.md     # of one page
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import io
import os
import shutil
import sys
import tarfile
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch

import unisono
from tests.docs import world
from tests.docs.pages import MARKS, PAGES, Block, blocks

__all__ = ["failures", "names_read"]

USUAL_BODY = """
for images, labels in step:
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
optimizer.step()
"""
IN_A_STEP = "for step in run.steps(train_loader, microbatches=8):\n"
IN_A_MICROBATCH = """\
    for images, labels in step:
        logits, targets, mask = model(images), labels, labels != 0
"""
TRACKED = (torch.nn.Module, torch.optim.Optimizer, unisono.Carried)


def names_read(code: CodeType) -> set[str]:
    """Return the global names that this code reads and has not made before."""
    made, read = set(dir(builtins)) | {"__name__", "__file__"}, set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_NAME":
            made.add(instruction.argval)
        elif instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL") and instruction.argval not in made:
            read.add(instruction.argval)
    for inner in code.co_consts:  # functions run later: by then the rest of the module is there
        if isinstance(inner, CodeType):
            read |= names_read(inner) - made
    return read


class _UsualBody(ast.NodeTransformer):
    """Puts the usual body of a step where the documentation leaves it out: ``for step in ...: ...``."""

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        (first, *rest) = node.body
        is_left_out = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and not rest
        if isinstance(node.target, ast.Name) and node.target.id == "step" and is_left_out:
            node.body = ast.parse(USUAL_BODY).body
        return node


def _whole(block: Block) -> str:
    """Return the block's text within the loops that its mark names."""
    if block.mark == "in a step":
        before = "" if "in step" in block.text else USUAL_BODY
        return IN_A_STEP + textwrap.indent(before + block.text, "    ")
    if block.mark == "in a micro-batch":
        return IN_A_STEP + IN_A_MICROBATCH + textwrap.indent(block.text, " " * 8) + "    optimizer.step()\n"
    return block.text


def _compiled(block: Block) -> CodeType:
    shift = _whole(block).count("\n") - block.text.count("\n")  # so that errors name lines of the page
    tree = ast.increment_lineno(ast.parse(_whole(block)), block.line - 1 - shift)
    return compile(ast.fix_missing_locations(_UsualBody().visit(tree)), str(block), "exec")


def _run(block: Block, names: dict[str, Any]) -> None:
    """Run a block that is no whole script: those take too long here, and have tests of their own."""
    code = _compiled(block)
    if block.mark.startswith("not run: ") or block.mark == "script":
        return
    if block.mark != "goes on":
        _close(names)
        names.clear()
    if block.mark == "with runs":
        _make_runs()
    if block.mark == "with shards":
        _make_shards()
    names["__name__"] = "__main__"
    wanted = names_read(code) - set(names)
    if "run" in wanted:
        wanted |= {"model", "optimizer"}
    names |= {name: value for name, value in world.make(wanted).items() if name not in names}
    if "run" in wanted and ".track(" not in block.text:
        names["run"].track(**{name: value for name, value in names.items() if isinstance(value, TRACKED)})
    exec(code, names)


def _make_runs() -> None:
    """Train for an epoch in ``runs/digits``, and put copies of that run beside it."""
    with unisono.Run("runs/digits", seed=7) as run:
        made = world.make({"model", "optimizer", "train_loader"})
        run.track(model=made["model"], optimizer=made["optimizer"])
        exec(IN_A_STEP + textwrap.indent(USUAL_BODY, "    "), {**made, "run": run})
    for name in ("a", "b"):
        shutil.copytree("runs/digits", f"runs/{name}")


def _make_shards() -> None:
    """Write tar files of 4 samples each, as WebDataset does."""
    Path("data").mkdir()
    for shard in range(128):
        with tarfile.open(f"data/train-{shard:03}.tar", "w") as tar:
            for sample in range(4):
                for ending, content in (("jpg", b"picture"), ("cls", b"%d" % sample)):
                    entry = tarfile.TarInfo(f"{shard:03}-{sample}.{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def _close(names: dict[str, Any]) -> None:
    """End the run of a block: nothing else would, before the folder goes."""
    for value in names.values():
        if isinstance(value, unisono.Run):
            value.close()


def failures(pages: Sequence[Path]) -> list[str]:
    """Run all Python blocks of these pages; return what went wrong, with the block's place."""
    found = []
    for page in pages:
        names: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for block in blocks(page):
                if not block.mark.startswith(MARKS[1:]) and block.mark:
                    found.append(f"{block}: no such mark: {block.mark}; tests/docs/pages.py lists them")
                if block.language != "python":
                    continue
                printed = io.StringIO()
                try:
                    with contextlib.redirect_stdout(printed):
                        _run(block, names)
                except KeyError as error:
                    found.append(f"{block}: {error} is neither made in this block nor known to tests/docs/world.py")
                except Exception as error:
                    where = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                             if frame.filename == str(block)]  # fmt: skip
                    lines = f", line {where[-1]}" if where else ""
                    found.append(f"{block}{lines}: {type(error).__name__}: {error}")
            _close(names)
    return found


if __name__ == "__main__":
    os.environ.pop("UNISONO_WATCH", None)
    wrong = failures([Path(name).resolve() for name in sys.argv[1:]] or PAGES)
    print("\n".join(wrong))
    sys.exit(bool(wrong))
