"""Long messages of the head, compressed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.cluster.worker.packed import LONG_BYTES, pack, unpack
from unisono.core.errors import ProtocolError
from unisono.core.messages import Ended, MemberInfo, Notice, decode, encode


def notice(num_members: int) -> bytes:
    members = [
        MemberInfo(worker_id=f"w{i}", host=f"node{i // 8}", pid=1000 + i, device="cpu", page=f"/proc/{1000 + i}/fd/7")
        for i in range(num_members)
    ]
    return encode(Notice(generation=2, members=members, immediate=False))


@given(st.binary(max_size=64), st.integers(0, 2 * LONG_BYTES))
def test_what_is_packed_comes_back(start: bytes, num_bytes: int) -> None:
    data = (b"\x81" + start).ljust(num_bytes, b"x")
    assert unpack(pack(data)) == data


def test_a_list_of_a_thousand_members_is_a_fifth_as_long() -> None:
    data = notice(1000)
    assert len(pack(data)) < len(data) / 5
    assert decode(unpack(pack(data))) == decode(data)


def test_short_messages_travel_as_they_are() -> None:
    assert pack(notice(4)) == notice(4)


def test_the_head_unpacks_nothing() -> None:
    """A few bytes that become many would be a way to stop it."""
    with pytest.raises(ProtocolError):
        decode(pack(encode(Ended(ok=False, reason="x" * 10**6))))


def test_a_damaged_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        unpack(pack(notice(1000))[:-40] + b"0" * 40)
