"""``unisono checkpoints``: list, check and export what a run has written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import click

from unisono.cli.saying import say
from unisono.core.cadence import best_step
from unisono.core.errors import CheckpointError, UsageError
from unisono.core.words import count, shown_bytes, without_password
from unisono.engine.checkpoint import copies
from unisono.engine.checkpoint.copies import absolute, is_copy
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import Manifest
from unisono.views import date

__all__ = ["checkpoints"]

ACTIONS: Final = ("list", "check", "export")


def _check_action(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value not in ACTIONS:
        raise UsageError(f"unknown action {value!r}; use {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}")
    return value


@click.command()
@click.argument("place", type=click.Path(), metavar="DIR")
@click.argument("action", callback=_check_action, default="list")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--step", type=int, default=None, metavar="N", help="The checkpoint of this step. Default: the newest.")
@click.option(
    "--best",
    default=None,
    metavar="FIGURE",
    help="The checkpoint with the smallest value of this figure; max:FIGURE: with the largest.",
)
@click.option("--name", default=None, help="export: which tracked object. Default: the model.")
def checkpoints(
    place: str, action: str, file: Path | None, step: int | None, best: str | None, name: str | None
) -> int:
    """List the checkpoints of the run in DIR, check every byte of them, or write one's weights into a single file.

    \b
        unisono checkpoints runs/digits
        unisono checkpoints runs/digits check
        unisono checkpoints runs/digits export model.safetensors
        unisono checkpoints runs/digits export best.safetensors --best max:val/accuracy
        unisono checkpoints runs/digits export optimizer.pt --name optimizer --step 500

    DIR may also be a place of copies (s3://bucket/runs/digits), for list and check.
    """
    if step is not None and best is not None:
        raise UsageError("--step and --best both name a checkpoint: give one of them")
    if is_copy(absolute(place)):
        if best is not None:
            raise UsageError("--best needs the directory of a run, and not a place of copies")
        if action == "export":
            raise UsageError("export needs the directory of a run; fetch a copy first: unisono run --resume URL")
        return _list_copies(absolute(place), step, check=action == "check")
    directory = Path(place)
    found = _find(directory, step, best)
    if action == "export":
        if file is None:
            raise UsageError("which file to export to? unisono checkpoints DIR export FILE.safetensors (or FILE.pt)")
        _export(found[-1] if len(found) == 1 else directory, file, name)
        return 0
    if file is not None:
        raise UsageError(f"{action} takes no file, got {file}")
    return _list(found, check=action == "check")


def _find(directory: Path, step: int | None, best: str | None) -> list[Path]:
    folder = files.find(directory)
    found = files.candidates(folder)
    if not found:
        raise CheckpointError(f"{folder} has no checkpoint yet")
    if best is not None:
        step = _best(found, best)
    if step is None:
        return found
    chosen = [path for path in found if path.name == files.step_name(step)]
    if not chosen:
        steps = ", ".join(str(int(path.name[5:])) for path in found if path.name.startswith("step-"))
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; there are {steps}")
    return chosen


def _best(found: list[Path], wanted: str) -> int:
    """Return the step of the best checkpoint by a figure; ``max:FIGURE`` means the largest value."""
    name = wanted.removeprefix("max:")
    saved: dict[int, dict[str, float]] = {}
    for path in found:
        with contextlib.suppress(CheckpointError):  # a broken one is none
            manifest = files.read_manifest(path)
            saved[manifest.step] = manifest.metrics
    step = best_step(saved, name, "min" if name == wanted else "max")
    if step is None:
        names = ", ".join(sorted({one for metrics in saved.values() for one in metrics})) or "none"
        raise CheckpointError(f"no checkpoint has a figure {name!r}; there are: {names}")
    return step


def _list(found: list[Path], *, check: bool) -> int:
    """Print a line for each checkpoint; returns 1 if one is broken."""
    num_broken = 0
    for path in found:
        try:
            manifest = files.verify(path) if check else files.read_manifest(path)
        except CheckpointError as error:
            num_broken += 1
            say(f"{path.name}  broken: {error}")
        else:
            say(f"{path.name}  {_line(manifest)}{'  every byte is correct' if check else ''}")
    return 1 if num_broken else 0


def _list_copies(place: str, step: int | None, *, check: bool) -> int:
    """Print a line for each whole copy; returns 1 if one is broken."""
    copies.check([place])
    found = [one for one in reversed([*copies.find([place])]) if step is None or one[1].step == step]
    if not found:
        which = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{without_password(place)} has no complete copy of a checkpoint{which}")
    num_broken = 0
    for store, copy in found:
        try:
            if check:
                store.verify(copy)
        except CheckpointError as error:
            num_broken += 1
            say(f"{copy.name}  broken: {error}")
        else:
            say(f"{copy.name}  {_line(copy.manifest)}{'  every byte is correct' if check else ''}")
    return 1 if num_broken else 0


def _line(manifest: Manifest) -> str:
    metrics = "".join(f"  {name} {value:.6g}" for name, value in manifest.metrics.items())
    return (
        f"{date(manifest.saved)}  {shown_bytes(manifest.num_bytes)}  {count(manifest.num_workers, 'worker')}{metrics}"
    )


def _export(location: Path, file: Path, name: str | None) -> None:
    if file.suffix not in (".safetensors", ".pt", ".pth"):
        raise UsageError(f"{file} must end in .safetensors or, for torch.save, in .pt or .pth")
    import torch

    from unisono.engine.checkpoint.loading import load_weights

    state: dict[str, Any] = load_weights(location, name=name)
    temporary = file.with_name(f".{file.name}.new")
    try:
        if file.suffix == ".safetensors":
            _write_safetensors(temporary, state)
        else:
            with temporary.open("wb") as target:
                torch.save(state, target)
        files.synchronize(temporary)
        temporary.replace(file)
    except (OSError, RuntimeError) as error:  # torch raises the second when a disk is full
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise CheckpointError(f"{file} cannot be written: {why}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    say(f"{file}: {len(state)} entries, {shown_bytes(file.stat().st_size)}")


def _write_safetensors(file: Path, state: dict[str, Any]) -> None:
    from unisono.engine.state.weights import weight_of, write_weights

    others = [key for key, value in state.items() if weight_of(key, value) is None]
    if others:
        raise UsageError(
            f"a safetensors file holds only tensors, and {others[0]!r} is not one; export to a .pt file, or choose "
            "another --name"
        )
    with file.open("wb") as target:
        try:
            write_weights(state, target.write)
        except ValueError as error:
            raise UsageError(f"{error}; export to a .pt file") from None
