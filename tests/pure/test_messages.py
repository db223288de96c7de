"""What goes over the wire, and what is refused."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core import messages
from unisono.core.errors import ProtocolError
from unisono.core.events import Announcement, Event, MachineUsed, WorkerUse
from unisono.core.messages import (
    PROTOCOL,
    Beat,
    Hello,
    Lost,
    MachineInfo,
    MemberInfo,
    Message,
    Notice,
    Start,
    StoreCall,
    decode,
    encode,
)

INFO = MemberInfo(worker_id="w0", host="lab", pid=7, device="cpu", page="/proc/7/fd/3", address="10.0.0.1")
USE = MachineUsed(
    host="lab",
    cores=1.5,
    num_cores=4,
    memory_bytes=1,
    memory_total_bytes=2,
    sent_bytes_per_s=3.0,
    received_bytes_per_s=4.0,
    workers={"w0": WorkerUse(cores=0.5, memory_bytes=1)},
)
EVERY = [cls for cls in Message.__subclasses__() if cls not in (MachineInfo, MemberInfo, Lost)]


def example(cls: type[Message]) -> Message:
    """A message of this class with its optional fields left out."""
    said = Announcement(text="a sentence")
    samples = {
        int: 3,
        str: "text",
        tuple[str, ...]: ("a", "b"),
        bytes: b"bits",
        float: 1.5,
        bool: True,
        MemberInfo: INFO,
        Event: said,
        MachineUsed: USE,
    }
    hints = typing.get_type_hints(cls)
    fields = {
        field.name: samples.get(hints[field.name], {} if "dict" in str(hints[field.name]) else [])
        for field in msgspec.structs.fields(cls)
        if field.required
    }
    return cls(**fields)


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_every_message_comes_back_as_it_was(cls: type[Message]) -> None:
    message = example(cls)
    back = decode(encode(message))
    assert type(back) is cls
    assert back == message


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_every_message_is_public(cls: type[Message]) -> None:
    assert cls.__name__ in messages.__all__


def test_members_travel_with_their_addresses() -> None:
    notice = Notice(generation=2, members=[INFO], immediate=True, reason="because")
    assert decode(encode(notice)).members == [INFO]


@pytest.mark.parametrize("message", [Lost(reason="x"), INFO], ids=["Lost", "MemberInfo"])
def test_what_is_no_message_of_the_wire_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match=f"not a message of protocol {PROTOCOL}"):
        decode(encode(message))


def changed(message: Message, **fields: object) -> bytes:
    """The message as somebody else might have written it."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(message)), **fields})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "Rm", "path": "/"}),
        changed(Start(worker_ids=["w1"]), worker_ids="w1"),
        changed(Start(worker_ids=["w1"]), worker_ids=[1]),
        changed(Start(worker_ids=["w1"]), extra=1),
        changed(Hello(info=INFO, fingerprint={}), info={"type": "MemberInfo"}),
        changed(Beat(generation=1, phase=0, step=1, microbatch=0, progress=1, waiting=False), waiting="no"),
        changed(StoreCall(call=1, operation="get", keys=["a"]), amount="1"),
    ],
)
def test_what_is_not_as_declared_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_a_message_and_never_anything_else(data: bytes) -> None:
    try:
        found = decode(data)
    except ProtocolError:
        return
    assert isinstance(found, Message)


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Start(worker_ids=[]).reason = "other"  # type: ignore[misc]
