"""How the members of a group find each other in a store: by as many calls for 6 members as for 2."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.waiting import WAIT_S
from unisono.engine.exchange.gloo import AddressStore
from unisono.engine.exchange.wire import Wire, _missing


class Counting(dist.Store):
    """A store that counts calls, for all members; each has one of its own, as over its connection to the head."""

    def __init__(self, inner: dist.Store, calls: Counter[str]) -> None:
        super().__init__()
        self._inner = inner
        self._calls = calls

    def set(self, key: str, value: str | bytes) -> None:
        self._calls["set"] += 1
        self._inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self._calls["get"] += 1
        return self._inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._calls["wait"] += 1
        self._inner.wait(keys, timeout or timedelta(seconds=WAIT_S))

    def check(self, keys: list[str]) -> bool:
        self._calls["check"] += 1
        return self._inner.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._calls["multi_get"] += 1
        return [self._inner.get(key) for key in keys]  # a hash store waits for each

    def has_extended_api(self) -> bool:
        return True


@pytest.mark.parametrize("size", [2, 6])
def test_a_member_makes_six_calls_however_many_members_a_group_has(size: int) -> None:
    calls: Counter[str] = Counter()
    store = dist.HashStore()
    wires = [
        Wire(
            Counting(store, calls),
            rank,
            size,
            device=torch.device("cpu"),
            address="127.0.0.1",
            timeout_s=WAIT_S,
        )
        for rank in range(size)
    ]
    for wire in wires:
        wire._connected()
    assert calls == {"set": 3 * size, "wait": size, "multi_get": 2 * size}
    for wire in wires:
        wire.close()


def test_keys_that_are_no_addresses_are_asked_for_as_they_are() -> None:
    calls: Counter[str] = Counter()
    store = AddressStore(Counting(dist.HashStore(), calls), 2)
    for key in ("a", "0/7", "0/x"):
        store.set(key, b"value")
        store.wait([key])
        assert store.get(key) == b"value"
    assert calls["multi_get"] == 0
    store.set("0/0", b"first")
    store.set("0/1", b"second")
    store.wait(["0/1", "0/0"])
    assert [store.get("0/0"), store.get("0/1")] == [b"first", b"second"]
    assert calls["multi_get"] == 1


def test_who_is_missing_is_found_by_a_few_questions() -> None:
    """All members ask at the same time: one question for each member would be the square of their number."""
    calls: Counter[str] = Counter()
    store, names = dist.HashStore(), [f"w{number}" for number in range(128)]
    for rank in range(128):
        if rank not in (5, 77):
            store.set(f"here-{rank}", "")
    assert _missing(Counting(store, calls), names) == ["w5", "w77"]
    assert calls["check"] < 2 * 2 * 8
    assert _missing(Counting(store, calls), []) == []
