"""The head's key-value store as a ``torch.distributed.Store``, in which the members of a generation find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.cluster.worker.member import Member

__all__ = ["HeadStore"]


class HeadStore(dist.Store):
    """A ``torch.distributed.Store`` over a member's connection to the head.

    Args:
        prefix: put before every key: groups with different prefixes do not see each other.
        generation: the group is made for it: waits end (as an error of the operation) when an immediate notice of a
            later one arrives. None: they end at their timeout only.
    """

    def __init__(
        self, member: Member, prefix: str = "", *, generation: int | None = None, timeout_s: float = 60.0
    ) -> None:
        super().__init__()
        self._member = member
        self._prefix = prefix
        self._generation = generation
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", [key]).values[0])

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", [key], amount=amount).amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", [key], [_bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._call("compare_set", [key], [_bytes(expected), _bytes(desired)]).values[0])

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys).amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._call("wait", keys, timeout_s=timeout.total_seconds() if timeout else None)

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", [key]).amount)

    def num_keys(self) -> int:
        """Return the number of keys of the whole store, of all prefixes together."""
        return int(self._call("num_keys", []).amount)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [bytes(value) for value in self._call("get", keys).values]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._call("set", keys, [_bytes(value) for value in values])

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> HeadStore:
        return HeadStore(self._member, self._prefix, generation=self._generation, timeout_s=self._timeout_s)

    def _call(
        self,
        operation: str,
        keys: list[str],
        values: list[bytes] | None = None,
        amount: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        return self._member.store.call(
            operation,
            [self._prefix + key for key in keys],
            values or [],
            amount,
            self._timeout_s if timeout_s is None else timeout_s,
            self._generation,
        )


def _bytes(value: str | bytes | list[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
