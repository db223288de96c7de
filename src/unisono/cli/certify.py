"""``unisono certify``: write down what a run says of itself, so that others can check it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from unisono.cli.saying import say
from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.record.rundir import CERTIFICATE
from unisono.system.owned import write_whole

__all__ = ["certify"]

WORDS = ("script", "arguments")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Where to write the certificate. Default: certificate.json in the run's directory.")  # fmt: skip
@click.option("--key", type=click.Path(path_type=Path, dir_okay=False), metavar="KEY",
              help="Sign it with this private key: Ed25519, in ssh or PEM format.")  # fmt: skip
@click.option("--make-key", is_flag=True, help="Create KEY, and KEY.pub, which others need to check it.")
@click.option("--with", "words", multiple=True, metavar="WHAT",
              help="script: include the script's text.  arguments: include its arguments.")  # fmt: skip
@click.option("--model", "models", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True,
              metavar="FILE", help="Write it only if this file holds a certified model.")  # fmt: skip
@click.option("--badge", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a badge (SVG) for a README: twelve digits of the model's SHA-256.")  # fmt: skip
def certify(
    run: Path,
    output: Path | None,
    key: Path | None,
    make_key: bool,
    words: tuple[str, ...],
    models: tuple[Path, ...],
    badge: Path | None,
) -> int:
    """Write a certificate of RUN (a directory): the SHA-256 of its model and its checkpoints, its recipe, script,
    versions and arithmetic, and a chain over all of its steps. `unisono verify` checks it, on any machine.

    \b
        unisono certify runs/digits --key ~/.ssh/id_ed25519
        unisono certify runs/digits --key lab.key --make-key -o digits.json --with script

    Exit code: 0 written, 2 this run cannot be certified.
    """
    from unisono.tools.certificate.badge import drawn
    from unisono.tools.certificate.checking import check_models
    from unisono.tools.certificate.gathering import gathered
    from unisono.tools.certificate.keys import fingerprint_of, read_key, sign, text_of
    from unisono.tools.certificate.keys import make_key as make

    if unknown := [word for word in words if word not in WORDS]:
        raise UsageError(f"--with takes script or arguments; got {unknown[0]!r}")
    if make_key and key is None:
        raise UsageError("--make-key makes the key that --key names; give both")
    statement = gathered(run, words=words)
    if wrong := check_models(statement.predicate, models):
        raise UsageError(wrong[0])
    if make_key and key is not None:
        make(key)
    private = read_key(key, _password(key)) if key is not None else None
    if private is not None:
        statement = replace(statement, predicate=replace(statement.predicate, signer=text_of(private)))
    envelope = sign(msgspec.json.encode(statement), private)
    said = statement.predicate
    written = {output or run / CERTIFICATE: msgspec.json.format(msgspec.json.encode(envelope)) + b"\n"}
    if badge is not None:
        if said.end is None or not said.end.models:
            raise UsageError("--badge shows the SHA-256 of a model, and the run has not ended with one")
        written[badge] = drawn(next(iter(said.end.models.values()))).encode()
    for file, data in written.items():
        try:
            write_whole(file, data)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    for note in said.notes:
        say(f"unisono: {note}", err=True)
    who = f"signed with {fingerprint_of(said.signer)}" if said.signer else "not signed: --key KEY signs it"
    say(f"{next(iter(written))}: {count(said.run.steps, 'step')}, {count(len(said.states), 'checkpoint')}, {who}")
    for name, value in (said.end.models if said.end is not None else {}).items():
        say(f"{name}: sha256 {value}")
    return 0


def _password(key: Path) -> Callable[[], str]:
    def asked() -> str:
        try:
            return str(click.prompt(f"password of {key}", hide_input=True, err=True))
        except click.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise
            raise UsageError(
                f"{key} is encrypted, and there is no terminal on which to ask for its password: run this in one, or "
                "write the password to standard input, or sign with another key (--key KEY --make-key)"
            ) from None

    return asked
