"""The certificate: an in-toto statement (version 1) in a DSSE envelope. Values, and their JSON.

docs/certificate.md explains each field, and ``schema.json`` beside this file is the JSON Schema, made by `schema`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec

from unisono.core.errors import UsageError
from unisono.record.checkpoint_files import FOLDER, step_name

__all__ = [
    "MOST_BYTES",
    "ChainPart",
    "Data",
    "End",
    "Envelope",
    "Gap",
    "Predicate",
    "RunFacts",
    "Script",
    "Signature",
    "State",
    "Statement",
    "Subject",
    "parse_envelope",
    "parse_statement",
    "schema",
    "signed_bytes",
    "subjects",
]

MOST_BYTES: Final = 64 << 20
"""Of a certificate."""
STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "urn:unisono:certificate:v1"
PAYLOAD: Final = "application/vnd.in-toto+json"
STATE: Final = "unisonoState1"
"""The name of the digest of a checkpoint (`states.state_sha256`)."""
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]  # "$" stands before a newline as well
Number = Annotated[int, msgspec.Meta(ge=0)]


class Subject(msgspec.Struct, frozen=True):
    """What the statement is about: the weights of a model at the end, or a checkpoint."""

    name: str
    digest: dict[str, str]


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The run."""

    id: str
    steps: Annotated[int, msgspec.Meta(ge=1)]
    """Steps that its journal ends with."""
    has_ended: bool
    """Its script has come to its end."""
    resumed: Number = 0
    """How often it was resumed."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The script that was trained with."""

    name: str
    """Of its file or module, without folders; "": unknown."""
    sha256: Sha256 | None
    """Of its text; None: unknown."""
    text: str | None = None
    arguments: list[str] | None = None


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """What the samples were taken from."""

    num_samples: int | None
    order: str | None
    digest: str | None
    """Of the samples, as the script or the data set says it; None: neither does."""


class ChainPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the journal's chain, without a gap."""

    first: Number
    """Its first line."""
    last: Number
    value: Sha256
    """The chain up to its last line."""
    made: str
    """"training", or "afterwards": the lines had no chain when they were written."""


class Gap(msgspec.Struct, frozen=True):
    """Lines that the journal lacks."""

    first: Number
    last: Number

    @property
    def words(self) -> str:
        return f"line {self.first}" if self.first == self.last else f"a part, the lines {self.first} to {self.last},"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    """Steps of the run that are done in it."""
    phase: Number
    """The call of ``run.steps``, from 0."""
    phase_step: Number
    """Steps of that call that are done in it."""
    lines: Number
    """Lines of the journal before it."""
    chain: Sha256 | None
    """The chain up to the last of them; None: it was lost in a gap."""
    sha256: Sha256


class End(msgspec.Struct, frozen=True, kw_only=True):
    """What the run has ended with."""

    digests: dict[str, str]
    """Of every tracked object, as in the journal. They locate errors, and do not resist an adversary."""
    models: dict[str, Sha256]
    """SHA-256 of the weights of every tracked module, as a safetensors file."""


class Predicate(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of the subjects."""

    schema: int = 1
    run: RunFacts
    recipe: dict[str, Any]
    script: Script
    data: Data
    versions: dict[str, str]
    arithmetic: dict[str, str]
    chain: Annotated[list[ChainPart], msgspec.Meta(min_length=1)]
    gaps: list[Gap]
    states: list[State]
    end: End | None
    """None: the run has not come to its end."""
    left: dict[str, Any] | None = None
    """Where the run has left another one, without some of its samples."""
    signer: str | None = None
    """The public key, as ssh writes it; None: nobody has signed."""
    notes: list[str] = []
    """What is not certified, and why, in sentences."""


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """An in-toto statement."""

    type_: str = msgspec.field(default=STATEMENT, name="_type")
    subject: list[Subject]
    predicate_type: str = msgspec.field(default=PREDICATE, name="predicateType")
    predicate: Predicate


class Signature(msgspec.Struct, frozen=True):
    """A signature of an envelope."""

    keyid: str
    sig: str


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A DSSE envelope."""

    payload_type: str = msgspec.field(default=PAYLOAD, name="payloadType")
    payload: str
    signatures: list[Signature]

    @property
    def content(self) -> bytes:
        """The statement as JSON.

        Raises:
            UsageError: it is no base64.
        """
        try:
            return base64.b64decode(self.payload, validate=True)
        except (ValueError, binascii.Error):
            raise UsageError("the certificate's payload is not base64") from None


def signed_bytes(content: bytes) -> bytes:
    """Return the bytes that are signed of a payload: DSSE's pre-authentication encoding, version 1."""
    kind = PAYLOAD.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(content), content)


def parse_envelope(data: bytes) -> Envelope:
    """Return an envelope from its JSON.

    Raises:
        UsageError: it is none, or too large.
    """
    if len(data) > MOST_BYTES:
        raise UsageError(f"the certificate has more than {MOST_BYTES >> 20} MiB; no run needs that much")
    try:
        found = msgspec.json.decode(data, type=Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"this is not a certificate: {error}") from None
    if found.payload_type != PAYLOAD:
        raise UsageError(f"the envelope holds {found.payload_type!r}; a certificate holds {PAYLOAD}")
    return found


def parse_statement(content: bytes) -> Statement:
    """Return a statement from its JSON, when what is in it has the form that it should have.

    Raises:
        UsageError: it has not, or is of a later version.
    """
    try:
        found = msgspec.json.decode(content, type=Statement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"this is not the certificate of a run: {error}") from None
    if found.type_ != STATEMENT or found.predicate_type != PREDICATE or found.predicate.schema != 1:
        raise UsageError(
            f"the statement is {found.type_!r} with {found.predicate_type!r}, schema {found.predicate.schema}; this "
            f"version reads {STATEMENT} with {PREDICATE}, schema 1"
        )
    if why := _misformed(found):
        raise UsageError(f"this is not the certificate of a run: {why}")
    return found


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a statement: what is in ``schema.json``."""
    (found,), parts = msgspec.json.schema_components([Statement], ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "$defs": parts}


def subjects(said: Predicate) -> list[Subject]:
    """Return the subjects of a statement, by its predicate."""
    models = said.end.models if said.end is not None else {}
    return [
        *(Subject(f"{name}.safetensors", {"sha256": value}) for name, value in models.items()),
        *(Subject(f"{FOLDER}/{step_name(one.step)}", {STATE: one.sha256}) for one in said.states),
    ]


def _misformed(statement: Statement) -> str:
    """Return what is wrong with the values of a statement; "" if nothing is."""
    said = statement.predicate
    if statement.subject != subjects(said):
        return "its subjects are not those of its predicate"
    if said.run.has_ended != (said.end is not None):
        return "it does not say whether the script has reached its end"
    text = said.script.text
    if text is not None and hashlib.sha256(text.encode()).hexdigest() != said.script.sha256:
        return "the text of its script does not have the SHA-256 that it gives"
    ranges = sorted([(part.first, part.last) for part in said.chain] + [(gap.first, gap.last) for gap in said.gaps])
    if any(first > last for first, last in ranges):
        return "a part of the chain, or a gap, ends before it begins"
    if ranges[0][0] or any(before[1] + 1 != after[0] for before, after in pairwise(ranges)):
        return "the parts of its chain and the gaps are not all lines up to the last one, each once"
    steps = [state.step for state in said.states]
    if steps != sorted(set(steps)) or any(step > said.run.steps for step in steps):
        return "its checkpoints are not in the order of their steps, or lie outside of the run"
    lines = [state.lines for state in said.states]
    if lines != sorted(lines):
        return "its checkpoints are not in the order of their lines"
    return ""
