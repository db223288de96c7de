"""Certificates: the chain of a journal, the statement, keys, files with weights, stretches."""

from __future__ import annotations

import base64
import getpass
import hashlib
import json
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import torch
from safetensors.torch import save, save_file

from tests.pure.test_journal import end, evaluation, journal_of, numbered, run_with, step
from unisono.cli.certify import _password
from unisono.core.errors import CheckpointError, UsageError
from unisono.core.events import LinesLost
from unisono.engine.state.weights import sha256_of_weights
from unisono.record import checkpoint_files as files
from unisono.record.journal import JOURNAL, Line, conclude, read, to_line, truncate
from unisono.record.journal.chain import BEGIN, canonical, linked, links, written
from unisono.record.rundir import describe
from unisono.tools.certificate.checking import check_models, check_run
from unisono.tools.certificate.gathering import chained, gathered
from unisono.tools.certificate.keys import check_signature, fingerprint_of, is_named, make_key, read_key, sign, text_of
from unisono.tools.certificate.statement import (
    MOST_BYTES,
    ChainPart,
    Data,
    End,
    Envelope,
    Gap,
    Predicate,
    RunFacts,
    Script,
    State,
    Statement,
    Subject,
    parse_envelope,
    parse_statement,
    subjects,
)
from unisono.tools.certificate.states import weights_sha256
from unisono.tools.certificate.stretches import Stretch, chance, chosen, cut

HEX = "5f" * 32


def said(**changes: Any) -> Predicate:
    values: dict[str, Any] = {
        "run": RunFacts(id="a1", steps=9, has_ended=True), "recipe": {}, "script": Script(name="train.py", sha256=HEX),
        "data": Data(num_samples=48, order="shuffled", digest=None), "versions": {}, "arithmetic": {},
        "chain": [ChainPart(first=0, last=9, value=HEX, made="training")], "gaps": [],
        "states": [State(step=4, phase=0, phase_step=4, lines=4, chain=HEX, sha256=HEX)],
        "end": End(digests={}, models={"model": HEX}),
    }  # fmt: skip
    return Predicate(**{**values, **changes})


def statement(**changes: Any) -> Statement:
    return Statement(subject=subjects(said(**changes)), predicate=said(**changes))


def plain_chain(events: list[Any]) -> list[str]:
    """The chain, by its definition in docs/certificate.md alone."""
    value, found = bytes(32), []
    for event in events:
        line = to_line(event)
        keys = {"step": ("step", "epoch", "samples", "digest", "loss", "weight", "totals", "losses"),
                "evaluation": ("step", "totals"), "end": ("ok", "digests", "sha256")}[line["kind"]]  # fmt: skip
        part = json.dumps({key: line[key] for key in ("kind", *keys) if key in line})
        value = hashlib.sha256(value + part.encode()).digest()
        found.append(value.hex())
    return found


# -- the chain of a journal --------------------------------------------------------------------------


def test_every_line_has_the_chain_up_to_it(tmp_path: Path) -> None:
    events = [
        step(0),
        step(1, loss=float("nan"), time=3.0),
        evaluation(1, time=7, right=[1, 2]),
        end(sha256={"model": HEX}),
    ]
    folder = run_with(tmp_path / "run", *events)
    told = [line["chain"] for line in read(folder)]
    assert told == plain_chain([step(0), step(1, loss="nan"), *events[2:]])
    assert [link.value.hex() for link in links(read(folder))] == told
    text = (folder / JOURNAL).read_text().splitlines()
    assert all(json.loads(line) for line in text)


def test_the_chain_is_the_same_for_any_writers(tmp_path: Path) -> None:
    """One has written all, with other times; three have followed each other, and the first has left half a line."""
    calm = run_with(tmp_path / "calm", *(step(number, time=1.0) for number in range(6)), end())
    (tmp_path / "hurt").mkdir()
    writers = [journal_of(tmp_path / "hurt", writer=number == 0) for number in range(3)]
    for number in range(6):
        if number in (2, 4):
            with (tmp_path / "hurt" / JOURNAL).open("a") as file:
                file.write('{"line": 2, "ki')
            writers.pop(0)
            writers[0].start(writer=True)
        for writer in writers:
            writer.emit(step(number, time=5.0 + number, generation=number))
    for writer in writers:
        writer.emit(end())
    assert [line["chain"] for line in read(tmp_path / "hurt")] == [line["chain"] for line in read(calm)]


def test_the_chain_is_cut_with_the_journal(tmp_path: Path) -> None:
    calm = run_with(tmp_path / "calm", *map(step, range(5)))
    hurt = run_with(
        tmp_path / "hurt", *(step(number, digest="odd" if number > 2 else f"{number:016x}") for number in range(4))
    )
    conclude(hurt, "all were lost")
    assert all(link.is_right for link in links(read(hurt)))
    truncate(hurt / JOURNAL, 3)
    journal = journal_of(hurt, writer=False)
    journal.go_on_at(3)
    journal.start(writer=True)
    for number in (3, 4):
        journal.emit(step(number))
    assert [line["chain"] for line in read(hurt)] == [line["chain"] for line in read(calm)]


def test_the_chain_begins_anew_after_a_gap_and_after_lines_of_an_older_version(tmp_path: Path) -> None:
    lines, value = [], BEGIN
    for event in numbered(step(0), step(1), LinesLost(first=2, last=4), step(2)):
        number = event.number if event.number < 3 else 5
        text, value = written(4 if isinstance(event, LinesLost) else number, to_line(event), value)
        lines.append(text)
    old = [{key: value for key, value in json.loads(text).items() if key != "chain"} for text in lines[:2]]
    (tmp_path / JOURNAL).write_text("".join(f"{line}\n" for line in [*map(json.dumps, old), *lines[2:]]))
    begins = [(link.number, link.begins, link.is_told) for link in links(read(tmp_path))]
    assert begins == [(0, True, False), (1, False, False), (5, True, True)]
    found = chained(tmp_path, {2, 6})
    assert [(part.first, part.last, part.made) for part in found.parts] == [(0, 1, "afterwards"), (5, 5, "training")]
    assert found.gaps == [Gap(2, 4)]
    assert found.values == {2: linked(linked(BEGIN, canonical(old[0])), canonical(old[1])).hex(),
                            6: linked(BEGIN, canonical(json.loads(lines[3]))).hex()}  # fmt: skip
    journal = journal_of(tmp_path, writer=False)  # a writer of this version goes on with an older one's lines
    (tmp_path / JOURNAL).write_text("".join(f"{json.dumps(line)}\n" for line in old))
    journal.go_on_at(2)
    journal.start(writer=True)
    journal.emit(step(2))
    assert [link.begins for link in links(read(tmp_path))] == [True, False, True]
    assert all(link.is_right for link in links(read(tmp_path)))


@pytest.mark.parametrize(
    ("number", "change"),
    [(1, {"loss": 0.5}), (3, {"digest": "0" * 16}), (2, {"totals": {"right": 1}}), (0, {"weight": 25.0})],
)
def test_a_line_that_was_edited_is_named(number: int, change: Line, tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", *map(step, range(5)), end())
    lines = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    lines[number] = {**lines[number], **change}
    (folder / JOURNAL).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert chained(folder, ()).wrong.startswith(f"line {number} of the journal (that of step {number}) is not")


def test_a_step_that_was_left_out_is_named(tmp_path: Path) -> None:
    """The lines are numbered and chained anew, so only the steps tell."""
    folder, value = run_with(tmp_path / "run", step(0)), BEGIN
    texts = []
    for number, event in enumerate([step(0), step(2), step(3)]):
        text, value = written(number, to_line(event), value)
        texts.append(f"{text}\n")
    (folder / JOURNAL).write_text("".join(texts))
    assert chained(folder, ()).wrong == "line 1 of the journal is that of step 2, not 1"


def test_the_chain_of_a_certificate_ends_with_the_script_or_with_the_last_step(tmp_path: Path) -> None:
    done = run_with(tmp_path / "done", step(0), step(1), evaluation(2), end())
    failed = run_with(tmp_path / "failed", step(0), step(1), evaluation(2), end(ok=False, reason="no"))
    assert [part.last for part in chained(done, ()).parts] == [3]
    assert [part.last for part in chained(failed, ()).parts] == [1]
    assert chained(failed, ()).end is None


def test_what_follows_the_last_step_of_a_run_that_has_not_ended_is_not_certified(tmp_path: Path) -> None:
    """Its checkpoint may be behind an evaluation: the chain up to there is no part of the certificate either."""
    run = run_with(tmp_path / "run", step(0), step(1), evaluation(2), end(ok=False, reason="no"))
    found = chained(run, {2, 3})
    assert [part.last for part in found.parts] == [1]
    assert [*found.values] == [2]


# -- the statement -----------------------------------------------------------------------------------


def test_a_statement_is_read_as_it_was_written() -> None:
    content = msgspec.json.encode(statement())
    assert parse_statement(content) == statement()
    assert parse_envelope(msgspec.json.encode(sign(content, None))).content == content


@pytest.mark.parametrize(
    "changes",
    [
        {"chain": [ChainPart(first=0, last=9, value="zz", made="training")]},
        {"chain": [ChainPart(first=5, last=2, value=HEX, made="training")]},
        {"chain": [ChainPart(first=0, last=5, value=HEX, made=""), ChainPart(first=5, last=9, value=HEX, made="")]},
        {"gaps": [Gap(-3, 2)]},
        {"gaps": [Gap(12, 14)]},
        {"chain": [ChainPart(first=1, last=9, value=HEX, made="training")]},
        {"end": None},
        {"states": [State(step=10, phase=0, phase_step=0, lines=0, chain=None, sha256=HEX)]},
        {"states": [State(step=3, phase=0, phase_step=0, lines=-1, chain=None, sha256=HEX)]},
        {"states": 2 * [State(step=3, phase=0, phase_step=0, lines=3, chain=None, sha256=HEX)]},
        {"end": End(digests={}, models={"model": "../../etc/passwd"})},
        {"run": RunFacts(id="a", steps=-1, has_ended=True), "states": []},
        {"run": RunFacts(id="a", steps=3, has_ended=True), "states": [], "chain": []},
    ],
)
def test_a_statement_with_impossible_values_is_refused(changes: Any) -> None:
    with pytest.raises(UsageError, match="this is not the certificate of a run"):
        parse_statement(msgspec.json.encode(statement(**changes)))


def test_a_statement_about_something_else_than_it_says_is_refused() -> None:
    other = msgspec.structs.replace(statement(), subject=[Subject("model.safetensors", {"sha256": "0" * 64})])
    with pytest.raises(UsageError, match="its subjects are not those of its predicate"):
        parse_statement(msgspec.json.encode(other))


def test_a_key_with_a_password_needs_somebody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: str) -> str:
        raise ending

    monkeypatch.setattr(getpass, "getpass", nobody)
    ending: BaseException = EOFError()
    with pytest.raises(UsageError, match=r"lab\.key is encrypted, and there is no terminal"):
        _password(Path("lab.key"))()
    ending = KeyboardInterrupt()
    with pytest.raises(click.Abort):
        _password(Path("lab.key"))()


@pytest.mark.parametrize(
    ("script", "right"),
    [
        (Script(name="a.py", sha256=hashlib.sha256("ä\r\n".encode()).hexdigest(), text="ä\r\n"), True),
        (Script(name="a.py", sha256=HEX, text="print()"), False),
        (Script(name="a.py", sha256=None, text="print()"), False),
        (Script(name="a.py", sha256=f"{HEX}\n"), False),
    ],
)
def test_the_text_of_a_script_is_that_of_its_sha256(script: Script, right: bool) -> None:
    data = msgspec.json.encode(statement(script=script))
    if right:
        assert parse_statement(data).predicate.script == script
    else:
        with pytest.raises(UsageError, match=r"the text of its script|matching regex|length <= 64"):
            parse_statement(data)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"payload": 3}', b"[" * 100_000, b" " * (MOST_BYTES + 1)])
def test_what_is_no_certificate_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"this is not a certificate|more than 64 MiB"):
        parse_envelope(data)


def test_an_envelope_that_holds_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="holds 'text/plain'"):
        parse_envelope(msgspec.json.encode(Envelope(payload_type="text/plain", payload="", signatures=[])))
    with pytest.raises(UsageError, match="not base64"):
        _ = Envelope(payload="?", signatures=[]).content
    later = msgspec.structs.replace(statement(), predicate_type="urn:unisono:certificate:v2")
    with pytest.raises(UsageError, match="this version reads"):
        parse_statement(msgspec.json.encode(later))


# -- keys --------------------------------------------------------------------------------------------


def test_a_certificate_is_of_the_key_that_has_signed_it(tmp_path: Path) -> None:
    for name in ("own", "other"):
        make_key(tmp_path / name)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="exists"):
        make_key(tmp_path / "own")
    own, other = (read_key(tmp_path / name, str) for name in ("own", "other"))
    signed = statement(signer=text_of(own))
    content = msgspec.json.encode(signed)
    envelope = sign(content, own)
    assert check_signature(envelope, signed) == text_of(own)
    assert check_signature(sign(content, other), signed) is None, "another has signed it"
    assert check_signature(sign(content, None), signed) is None, "the signature was taken away"
    assert check_signature(sign(msgspec.json.encode(statement()), None), statement()) == ""
    assert check_signature(envelope, statement()) is None, "the key was taken away"
    changed = content.replace(b'"steps":9', b'"steps":8')
    moved = msgspec.structs.replace(envelope, payload=base64.b64encode(changed).decode())
    assert check_signature(moved, parse_statement(changed)) is None

    for named in (str(tmp_path / "own.pub"), text_of(own), fingerprint_of(text_of(own))):
        assert is_named(text_of(own), [named])
        assert not is_named(text_of(other), [named])
    (tmp_path / "signers").write_text(f"# the lab\nann@lab {text_of(own)} x\nbob@lab {text_of(other)}\n")
    assert is_named(text_of(other), [str(tmp_path / "signers")])
    (tmp_path / "ssh-ed25519-keys").mkdir()
    (tmp_path / "own.pub").rename(tmp_path / "ssh-ed25519-keys" / "own.pub")
    assert is_named(text_of(own), [str(tmp_path / "ssh-ed25519-keys" / "own.pub")])
    with pytest.raises(UsageError, match="names no key"):
        is_named(text_of(own), [__file__.replace("test_certificate", "conftest")])


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    key = generate_private_key(SECP256R1())
    for kind in (form.PrivateFormat.OpenSSH, form.PrivateFormat.PKCS8):
        (tmp_path / "key").write_bytes(key.private_bytes(form.Encoding.PEM, kind, form.NoEncryption()))
        with pytest.raises(UsageError, match="takes Ed25519"):
            read_key(tmp_path / "key", str)
    (tmp_path / "key").write_text("ssh-rsa nothing")
    with pytest.raises(UsageError, match="no private key that can be read"):
        read_key(tmp_path / "key", str)


def test_a_key_of_openssl_with_a_password_is_taken(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    make_key(tmp_path / "key")
    key = read_key(tmp_path / "key", str)
    closed = form.BestAvailableEncryption(b"open")
    (tmp_path / "pem").write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, closed))
    assert text_of(read_key(tmp_path / "pem", lambda: "open")) == text_of(key)
    with pytest.raises(UsageError, match="no private key that can be read"):
        read_key(tmp_path / "pem", lambda: "sesame")


# -- files with weights ------------------------------------------------------------------------------

KINDS = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8),
    *(torch.bool, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint64),
)


def weights() -> dict[str, torch.Tensor]:
    found = {f"layer.{number % 7}.{number}": torch.randn(number % 4, 3).to(kind) for number, kind in enumerate(KINDS)}
    return {**found, "é": torch.tensor(3), 'a "name"\n': torch.ones(7), "b": torch.randn(4, 3).t()}


def test_the_sha256_of_weights_is_that_of_a_file_of_the_library(tmp_path: Path) -> None:
    state = {name: one.contiguous() for name, one in weights().items()}
    assert sha256_of_weights(weights().keys() and state) == hashlib.sha256(save(state)).hexdigest()
    assert (
        sha256_of_weights({"a": state["b"].t()}) == hashlib.sha256(save({"a": state["b"].t().contiguous()})).hexdigest()
    )
    assert sha256_of_weights({"a": 3}) == ""
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    torch.save(state, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        assert sha256_of_weights(state) in weights_sha256(tmp_path / name)
        assert check_models(said(end=End(digests={}, models={"m": sha256_of_weights(state)})), [tmp_path / name]) == []
    state["b"][0, 0] += 1
    torch.save(state, tmp_path / "tuned.pt")
    assert "tuned.pt does not hold a certified model" in check_models(said(), [tmp_path / "tuned.pt"])[0]


@pytest.mark.parametrize(
    "kind", ["bomb", "pickle", "header", "offsets", "overlap", "expanded", "stack", "text", "pipe"]
)
def test_a_hostile_file_with_weights_does_no_harm(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if kind == "bomb":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data/0", bytes(1 << 24))
    elif kind == "pickle":
        torch.save({"model": Harmful(tmp_path / "harm")}, path)
    elif kind == "header":
        path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    elif kind == "offsets":
        text = json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 1 << 50]}}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    elif kind == "overlap":
        one = {"dtype": "F32", "shape": [250], "data_offsets": [0, 1000]}
        text = json.dumps({str(number): one for number in range(9)}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(1000))
    elif kind == "expanded":
        torch.save({"a": torch.zeros(1).expand(10**12)}, path)
    elif kind == "stack":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02.")
            archive.writestr("archive/version", b"3\n")
    elif kind == "text":
        path.write_text("hello, this is a text")
    else:
        os.mkfifo(path)
    with pytest.raises(UsageError):
        weights_sha256(path)
    assert not (tmp_path / "harm").exists()


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "step-0000000003"
    folder.mkdir()
    for name in ("../secret", "/etc/hostname", ".hidden"):
        manifest = files.Manifest(
            step=3, phase=0, phase_step=3, lines=3, recipe={}, fingerprint={}, metrics={}, num_workers=1, saved=0.0,
            seconds=0.0, tensors=[], files={name: files.FileFacts(1, [0])},
        )  # fmt: skip
        files.write_manifest(folder, manifest)
        with pytest.raises(CheckpointError, match="lies elsewhere"):
            files.verify(folder)
    (folder / files.MANIFEST).unlink()
    os.mkfifo(folder / files.MANIFEST)
    with pytest.raises(CheckpointError, match="not a regular file"):
        files.verify(folder)


# -- a run and its certificate -----------------------------------------------------------------------


def run_of(folder: Path, *events: Any) -> Path:
    run = run_with(folder, *events)
    facts = {
        "run_id": "a1",
        "recipe": {"num_samples": 48, "order": "shuffled"},
        "environment": {"host": "secret-host", "torch": "2"},
        "command": {"folder": "/secret/folder", "arguments": ["/secret/train.py", "--token", "xyz"]},
    }
    describe(run, facts)
    return run


def test_a_certificate_says_nothing_that_is_secret(tmp_path: Path) -> None:
    run = run_of(tmp_path / "secret-run", *map(step, range(3)), end())
    found = gathered(run)
    text = msgspec.json.encode(found).decode()
    assert "secret" not in text
    assert "xyz" not in text
    assert found.predicate.script.name == "train.py"
    assert found.predicate.versions == {"torch": "2"}
    assert "xyz" in msgspec.json.encode(gathered(run, words=["arguments"])).decode()
    with pytest.raises(UsageError, match="the script's text is not there"):
        gathered(run, words=["script"])


def test_a_run_is_as_it_was_certified_or_the_first_thing_that_is_not_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *map(step, range(6)), end())
    found = gathered(run).predicate
    assert check_run(run, found).wrong == check_run(run, gathered(run, words=["arguments"]).predicate).wrong == ()
    for change, words in {
        "the journal does not end as it is certified": {"end": End(digests=found.end.digests, models={"model": HEX})},
        "the journal does not end as": {"end": None},
        "had the arguments --token xyz, and the certificate says --lr 1": {
            "script": Script(name="train.py", sha256=None, arguments=["--lr", "1"])
        },
        "are 6 steps, not 7": {"run": RunFacts(id="a1", steps=7, has_ended=True)},
    }.items():
        assert change in check_run(run, msgspec.structs.replace(found, **words)).wrong[0]
    other = run_of(tmp_path / "other", *(step(number, loss=0.25) for number in range(6)), end())
    assert "a line from 0 to 6 differs" in check_run(other, found).wrong[0], "chained anew"
    assert "the certificate is for run b2" in check_run(
        run, msgspec.structs.replace(found, run=RunFacts(id="b2", steps=6, has_ended=True))
    ).wrong[0]  # fmt: skip
    lines = (run / JOURNAL).read_text().splitlines(keepends=True)
    (run / JOURNAL).write_text("".join(lines[:3] + lines[4:]))
    assert check_run(run, found).wrong == ("line 3 of the journal is missing",)
    (run / JOURNAL).write_text("".join(lines[:4]))
    assert "a line from 0 to 6 differs, or is missing" in check_run(run, found).wrong[0]
    (run / JOURNAL).write_text("".join([*lines, lines[2]]))
    with pytest.raises(ValueError, match="after line 6"):
        check_run(run, found)
    for name in (JOURNAL, "run.json"):
        shutil.copytree(run, tmp_path / name)
        (tmp_path / name / name).unlink()
        os.mkfifo(tmp_path / name / name)
        with pytest.raises(ValueError, match="is not a regular file"):
            check_run(tmp_path / name, found)


def test_a_run_may_have_gone_on_since_it_was_certified(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *map(step, range(3)))
    found = gathered(run).predicate
    journal = journal_of(run, writer=False)
    journal.go_on_at(3)
    journal.start(writer=True)
    journal.emit(step(3))
    assert check_run(run, found).wrong == ()


# -- stretches ---------------------------------------------------------------------------------------


def test_a_run_is_cut_where_checks_may_begin() -> None:
    assert cut([3, 6], 9) == [Stretch(0, 3), Stretch(3, 6), Stretch(6, 9)]
    assert cut([], 9) == [Stretch(0, 9)]
    assert cut([9], 9) == [Stretch(0, 9)]
    assert sum(one.num_steps for one in cut([0, 4, 5], 9)) == 9


@pytest.mark.parametrize(("total", "checked", "false"), [(4, 1, 1), (10, 3, 2), (10, 10, 1), (7, 2, 7), (20, 5, 3)])
def test_a_check_finds_a_false_stretch_as_often_as_is_said(total: int, checked: int, false: int) -> None:
    stretches = cut(range(1, total), total)
    wrong = set(random.Random(0).sample(stretches, false))
    found = sum(bool(wrong & {*chosen(stretches, checked, random.Random(seed).sample)}) for seed in range(4000))
    assert found / 4000 == pytest.approx(chance(total, checked, false), abs=0.03)


def test_the_same_stretch_is_not_drawn_twice() -> None:
    stretches = cut([2, 4], 6)
    assert chosen(stretches, 99, random.Random(1).sample) == stretches
