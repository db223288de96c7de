"""``unisono verify``: check a certificate, and compute stretches of its run again."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono.cli.again import variables_of
from unisono.cli.given import script_arguments
from unisono.cli.resume import command_of, own_command
from unisono.cli.saying import say, say_lines
from unisono.core.errors import UsageError
from unisono.core.words import count, duration, harmless
from unisono.record.rundir import WITHOUT_FILE, read_facts
from unisono.record.without import read_without
from unisono.system.fingerprint import script_file
from unisono.system.lifetime import scratch_folder
from unisono.system.owned import read_regular

if TYPE_CHECKING:
    from unisono.tools.certificate.statement import Predicate
    from unisono.tools.certificate.stretches import Stretch

__all__ = ["verify"]

RIGHT, WRONG = 0, 1
MOST_THREADS = 256
EXAMPLE = 20
"""How sure a check is, is said for one false stretch of up to so many; of more, for one in so many."""


@click.command()
@click.argument("certificate", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
@click.option("--run", "run", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR",
              help="The run's directory: check its journal and checkpoints as well.")  # fmt: skip
@click.option("--model", "models", type=click.Path(path_type=Path, dir_okay=False), multiple=True, metavar="FILE",
              help="Check that this file holds a certified model.")  # fmt: skip
@click.option("--segments", "number", type=click.IntRange(min=1), metavar="N",
              help="Recompute N stretches of the run, drawn at random.")  # fmt: skip
@click.option("--all", "is_all", is_flag=True, help="Recompute the whole run, from its beginning.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help=("Number of workers that recompute it. Default: one process alone."),
)
@click.option("--without", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
              help="The samples that the run leaves out. Default: those in --run DIR.")  # fmt: skip
@click.option("--signer", "signers", multiple=True, metavar="KEY",
              help="Who must have signed it: SHA256:..., an ssh public key, or a file of them.")  # fmt: skip
@click.option("--any-signer", is_flag=True, help="Accept any signature, or none.")
def verify(
    certificate: Path,
    script: tuple[str, ...],
    run: Path | None,
    models: tuple[Path, ...],
    number: int | None,
    is_all: bool,
    workers: int,
    without: Path | None,
    signers: tuple[str, ...],
    any_signer: bool,
) -> int:
    """Check CERTIFICATE: its signature, and whatever else of its run is given. With --segments or --all, stretches of
    the run are recomputed on this machine and must end with the certified bits.

    \b
        unisono verify digits.json --signer lab.key.pub --model model.safetensors
        unisono verify digits.json --signer lab.key.pub --run runs/digits --segments 3 digits.py
        unisono verify digits.json --signer SHA256:fzG... --all digits.py -- --epochs 5

    Nothing named by the certificate or the run's directory is executed unasked: give the script after the options, or
    confirm it at the terminal.

    Exit code: 0 everything checked is correct, by the named signer; 1 something is wrong; 2 it cannot be checked.
    """
    from unisono.tools.certificate.checking import check_models, check_run
    from unisono.tools.certificate.keys import check_signature, fingerprint_of, is_named
    from unisono.tools.certificate.statement import MOST_BYTES, parse_envelope, parse_statement

    run = run.resolve() if run is not None else None
    if number is not None and is_all:
        raise UsageError("--segments N draws stretches, --all takes the whole run; give only one of them")
    if script and number is None and not is_all:
        raise UsageError(f"how much of {script[0]} should be recomputed? Give --segments N or --all")
    try:
        data = read_regular(certificate.resolve(), MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{certificate} cannot be read: {error.strerror}") from None
    envelope = parse_envelope(data)
    statement = parse_statement(envelope.content)
    said, wrong = statement.predicate, False
    if (signer := check_signature(envelope, statement)) is None:
        return _wrong("its signature is wrong: it was changed after it was signed")
    for line in _described(said):
        say(line)
    shown = fingerprint_of(signer) if signer else "nobody"
    if any_signer:
        say(f"signed by {shown}: not checked, as --any-signer asks")
    elif signer and signers and is_named(signer, signers):
        say(f"signed by {shown}, who was named")
    else:
        hint = "whom --signer does not name" if signers and signer else "and --signer names nobody" if signer else ""
        wrong = bool(_wrong(f"it is signed by {shown}{', ' if hint else ''}{hint}"))
    for words in check_models(said, models):
        wrong = bool(_wrong(words))
    begins: dict[int, Path] = {}
    if run is not None:
        try:
            checked = check_run(run, said)
        except (OSError, ValueError) as error:
            return _wrong(f"the journal of {run} cannot be read: {error}")
        for words in checked.right:
            say(f"right: {words}")
        for words in checked.wrong:
            wrong = bool(_wrong(words))
        begins = checked.begins
    if models and not wrong:
        say(f"right: {', '.join(map(str, models))}")
    if wrong:
        return WRONG
    if number is None and not is_all:
        say("no step was computed again: --segments N or --all does that")
        return RIGHT
    return _computed(said, run, begins, script, number, workers, _left_out(said, run, without))


def _wrong(words: str) -> int:
    say(f"WRONG: {words}")
    return WRONG


def _described(said: Predicate) -> list[str]:
    """Return what a certificate is about, in lines."""
    script = f"of {said.script.name} " if said.script.name else ""
    lines = [f"a certificate {script}about {count(said.run.steps, 'step')} of run {said.run.id}"]
    lines += [f"  {name}: sha256 {value}" for name, value in (said.end.models if said.end is not None else {}).items()]
    lines += [f"  not certified: {note}" for note in said.notes]
    lines += [f"  not certified: the lines {gap.first} to {gap.last}" for gap in said.gaps]
    if said.run.resumed:
        lines.append("  not computed again: the recipe, because the run was resumed")
    return lines


def _computed(
    said: Predicate,
    run: Path | None,
    begins: dict[int, Path],
    script: tuple[str, ...],
    number: int | None,
    workers: int,
    without: str,
) -> int:
    """Compute stretches again; returns the exit code."""
    from unisono.script.inspected import INTERRUPTED
    from unisono.tools.certificate.recomputing import Target, recomputed
    from unisono.tools.certificate.stretches import Stretch, chosen, cut

    if not said.arithmetic:
        raise UsageError("the certificate does not say what the bits depend on, so nothing can be computed again")
    found = cut(begins, said.run.steps)
    if not found:
        raise UsageError("the certificate is about no step that could be computed again")
    taken = [Stretch(0, said.run.steps)] if number is None else chosen(found, number, random.SystemRandom().sample)
    folder, arguments = _script(said, run, script)
    target = Target(said, run, begins, folder, arguments, _threads(said), _variables(said), workers, without)
    began, done, computing = time.monotonic(), 0, 0.0
    with scratch_folder("unisono-verify-") as scratch:
        for each in taken:
            directory = scratch / str(each.first)
            directory.mkdir()
            say(f"unisono: recomputing the steps {each.first} to {each.last - 1}", err=True)
            result = recomputed(target, each, directory)
            computing += result.seconds
            shutil.rmtree(directory, ignore_errors=True)
            if result.code == WRONG:
                return _wrong(result.words)
            if result.code == INTERRUPTED:
                return INTERRUPTED
            if result.code:
                raise UsageError(result.words)
            done += each.num_steps
            say(f"right: the steps {each.first} to {each.last - 1}, computed again")
    took = time.monotonic() - began
    whole = (took - computing) / len(taken) + computing / done * said.run.steps
    say_lines(_worth(said, found, taken, done, took, whole))
    return RIGHT


def _worth(
    said: Predicate, found: Sequence[Stretch], taken: Sequence[Stretch], done: int, took: float, whole: float
) -> str:
    """Return what a check of some stretches is worth.

    Args:
        done: the number of their steps.
        took: in seconds.
        whole: in seconds, how long the whole run would take.
    """
    from unisono.tools.certificate.checking import held_steps
    from unisono.tools.certificate.stretches import chance

    total, held = said.run.steps, held_steps(said)
    if len(taken) == 1 and taken[0].num_steps == total:
        return f"all {count(total, 'step')} were computed again, in {duration(took)}"
    false = max(1, len(found) // EXAMPLE)
    return (
        f"{count(done, 'step')} of {total} were computed again ({len(taken)} of {count(len(found), 'stretch')}, in "
        f"{duration(took)}); {100 * held // total} % of the steps lead to a state whose SHA-256 is certified\n"
        f"if {false} of the {len(found)} stretches {'was' if false == 1 else 'were'} false, this check found it with a "
        f"probability of {100 * chance(len(found), len(taken), false):.0f} %. --all takes about "
        f"{duration(whole)}"
    )


def _left_out(said: Predicate, run: Path | None, given: Path | None) -> str:
    """Return the path of the samples that the run leaves out; "": none.

    Raises:
        UsageError: the list is not there, or is not the certified one.
    """
    match said.recipe.get("without"):
        case None:
            return ""
        case {"samples": int(number), "sha256": str(digest)}:
            path = given or (run / WITHOUT_FILE if run is not None else None)
            found = read_without(str(path), said.data.num_samples or number + 1) if path is not None else None
            if found is None or found.sha256 != digest:
                raise UsageError(
                    f"the run leaves out {count(number, 'sample')}: give the list whose SHA-256 is {digest} (--without "
                    f"FILE){f'; {path} has {found.sha256}' if found is not None else ''}"
                )
            return str(path.resolve()) if path is not None else ""
    raise UsageError("the certificate does not say which samples the run leaves out")


def _script(said: Predicate, run: Path | None, given: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the folder and the words of the script that is computed again: given by the user, or confirmed.

    Raises:
        UsageError: nobody says which, or it is not the certified one.
    """
    from unisono.tools.certificate.gathering import arguments_in

    wanted = "give the script after the options: ... SCRIPT [-- ARGUMENTS]"
    if given:
        folder, more = os.getcwd(), given[1:]
        if not given[1:]:
            more = _own_arguments(run, given[0])
        arguments = script_arguments(given[0], None, more)
    else:
        command = own_command(run, wanted) if run is not None else None
        if command is None:
            raise UsageError(f"only a script that you have named is executed; {wanted}")
        folder, arguments = command
        if not sys.stdin.isatty():
            raise UsageError(
                f"{run} names {shlex.join(arguments)} in {folder}. It is not executed without asking; {wanted}"
            )
        if not click.confirm(harmless(f"Execute {' '.join(map(ascii, arguments))} in {folder}?"), err=True):
            raise UsageError(f"nothing was executed; {wanted}")
    if said.script.arguments not in (None, arguments_in(arguments)):
        own, certified = arguments_in(arguments), said.script.arguments or ()
        raise UsageError(
            f"the script was certified with the arguments {shlex.join(certified) or 'none'}, and gets "
            f"{shlex.join(own) or 'none'}; give them after it: ... SCRIPT -- ARGUMENTS"
        )
    if said.script.sha256 is None:
        say("unisono: the certificate does not say which text the script had", err=True)
        return folder, arguments
    path = script_file(arguments, folder)
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else ""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if digest != said.script.sha256:
        raise UsageError(
            f"{arguments[0]} is not the certified script: its SHA-256 is {digest}, not {said.script.sha256}"
        )
    return folder, arguments


def _own_arguments(run: Path | None, script: str) -> tuple[str, ...]:
    """Return the arguments of the run for a script that was given without any, where the user's own files say them."""
    from unisono.tools.certificate.gathering import arguments_in

    own: list[str] = []
    if run is not None and (command := command_of(read_facts(run))) is not None:
        own = arguments_in(command[1])
        if own:
            own_command(run, f"give the arguments as well: ... {script} -- ARGUMENTS")
    if own:
        say(f"unisono: {script} gets the arguments of the run: {shlex.join(own)}", err=True)
    return tuple(own)


def _threads(said: Predicate) -> int:
    threads = said.recipe.get("threads")
    if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"the run had {threads!r} threads per worker; 1 to {MOST_THREADS} are possible here")
    return threads


def _variables(said: Predicate) -> dict[str, str]:
    """Return the environment variables that bits depend on, as the run had them."""
    seed = said.versions.get("hash seed", "")
    is_one = re.fullmatch("[0-9]{1,10}", seed) and int(seed) < 1 << 32
    found = variables_of(said.arithmetic, seed if is_one else "")
    if strange := [name for name, value in found.items() if not re.fullmatch(r"[!-~]{1,100}", value)]:
        raise UsageError(f"the certificate says that {strange[0]} was {found[strange[0]]!r}, which cannot be set")
    return found
