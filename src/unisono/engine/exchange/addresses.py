"""Store through which gloo connects a group: the addresses of all members in one call, and not two calls for each."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["AddressStore"]


class AddressStore(dist.Store):
    """A store of a group, for ``ProcessGroupGloo``.

    Gloo waits for each member's address and then gets it, one member after the other: in groups of 125, a thousand
    members would call the head's store a quarter of a million times for a generation. Each member needs all addresses
    before it can go on, so the first question for one of them asks for all.

    Args:
        size: of the group. Members publish their addresses as ``PREFIX/RANK``.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        super().__init__()
        self._store = store
        self._size = size
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._known[key] if self._learn(key) else self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        unknown = [key for key in keys if not self._learn(key)]
        if unknown:
            self._store.wait(unknown, timeout) if timeout is not None else self._store.wait(unknown)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._store.timeout  # type: ignore[attr-defined]
        return found

    def clone(self) -> AddressStore:
        return AddressStore(self._store, self._size)

    def _learn(self, key: str) -> bool:
        """Wait until the addresses of all members are known, if ``key`` is that of one; return whether it is."""
        if key in self._known:
            return True
        prefix, slash, rank = key.rpartition("/")
        if not (slash and rank.isdecimal() and int(rank) < self._size):
            return False
        keys = [f"{prefix}/{each}" for each in range(self._size)]
        self._known.update(zip(keys, self._store.multi_get(keys), strict=True))
        return True
