"""The key-value store that ``torch.distributed`` needs to connect a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from unisono.cluster.worker.packed import pack_values
from unisono.core.errors import DeadlineExceeded, ProtocolError
from unisono.core.messages import StoreAnswer, StoreCall

__all__ = ["Keys"]


class Keys:
    """Keys and values in memory; waits have a timeout."""

    MAX_KEYS = 1_000_000

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._made_for: dict[int, set[str]] = {}
        self._oldest = 0
        self._asked_last: tuple[tuple[str, ...], list[bytes], bytes] = ((), [], b"")
        self._waiting: dict[str, set[_Waiter]] = {}  # by the key that is missing

    async def answer(self, call: StoreCall) -> StoreAnswer:
        """Return the answer to one call of `unisono.cluster.worker.store.HeadStore`; it carries errors as well."""
        try:
            values, amount = await self._do(call)
        except (ProtocolError, DeadlineExceeded) as error:
            return StoreAnswer(call=call.call, error=str(error))
        if packed := self._packed_for(call, values):
            return StoreAnswer(call=call.call, packed=packed, amount=amount)
        return StoreAnswer(call=call.call, values=values, amount=amount)

    def _packed_for(self, call: StoreCall, values: list[bytes]) -> bytes:
        """Return many values in short, made once for the members of a group, who all ask for the same ones."""
        if call.operation != "get" or len(values) < 2:
            return b""
        asked = tuple(call.keys)
        if self._asked_last[:2] != (asked, values):
            self._asked_last = (asked, values, pack_values(values))
        return self._asked_last[2]

    async def _do(self, call: StoreCall) -> tuple[list[bytes], int]:
        held = self._values
        match call.operation, call.keys, call.values:
            case "set", keys, values if len(keys) == len(values):
                for key, value in zip(keys, values, strict=True):
                    self._put(key, value, call)
                return [], len(keys)
            case "get", keys, []:
                await self._wait(keys, call.timeout_s)
                return [held[key] for key in keys], len(keys)
            case "wait", keys, []:
                await self._wait(keys, call.timeout_s)
                return [], len(keys)
            case "check", keys, []:
                return [], int(all(key in held for key in keys))
            case "add", [key], []:
                total = _integer(key, held.get(key, b"0")) + call.amount
                self._put(key, str(total).encode(), call)
                return [], total
            case "append", [key], [value]:
                self._put(key, held.get(key, b"") + value, call)
                return [], 1
            case "compare_set", [key], [expected, desired]:
                if held.get(key, b"") == expected:
                    self._put(key, desired, call)
                return [held.get(key, expected)], 1
            case "delete", keys, []:
                return [], sum(held.pop(key, None) is not None for key in keys)
            case "num_keys", [], []:
                return [], len(held)
        raise ProtocolError(
            f"the store knows no {call.operation!r} with {len(call.keys)} keys and {len(call.values)} values"
        )

    def end_generations(self, before: int) -> None:
        """Delete the keys of generations with lower numbers: these are over."""
        self._oldest = max(self._oldest, before)
        for generation in [number for number in self._made_for if number < before]:
            for key in self._made_for.pop(generation):
                self._values.pop(key, None)

    def _put(self, key: str, value: bytes, call: StoreCall) -> None:
        if 0 < call.generation < self._oldest:
            return  # the caller does not know yet that this generation is over; no other caller needs the key
        if key not in self._values and len(self._values) >= self.MAX_KEYS:
            raise ProtocolError(f"the store holds {self.MAX_KEYS} keys already")
        self._values[key] = value
        if call.generation > 0:
            self._made_for.setdefault(call.generation, set()).add(key)
        for waiter in self._waiting.pop(key, ()):
            waiter.num_missing -= 1
            if waiter.num_missing == 0:
                waiter.has_all.set()

    async def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        missing = {key for key in keys if key not in self._values}
        if not missing:
            return
        # All members wait for a key of each member: who waits for a key is found without a look at all who wait.
        waiter = _Waiter(len(missing))
        for key in missing:
            self._waiting.setdefault(key, set()).add(waiter)
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await waiter.has_all.wait()
        except TimeoutError:
            late = [key for key in keys if waiter in self._waiting.get(key, ())]
            shown = ", ".join(late[:3])
            raise DeadlineExceeded(f"timeout: no key {shown} within {timeout_s:.1f} s") from None
        finally:
            self._forget(waiter, missing)

    def _forget(self, waiter: _Waiter, keys: Iterable[str]) -> None:
        """Take a waiter from the keys that have not come."""
        if waiter.num_missing == 0:
            return
        for key in keys:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiting[key]


class _Waiter:
    """A call that waits for keys."""

    def __init__(self, num_missing: int) -> None:
        self.num_missing = num_missing
        self.has_all = asyncio.Event()


def _integer(key: str, value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise ProtocolError(f"key {key} holds no number: {value[:40]!r}") from None
