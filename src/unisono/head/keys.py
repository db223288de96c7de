"""The key-value store that ``torch.distributed`` needs to connect a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from unisono.errors import DeadlineExceeded, ProtocolError
from unisono.messages import StoreAnswer, StoreCall

__all__ = ["Keys"]


class Keys:
    """Keys and values in memory; waits have a timeout."""

    MAX_KEYS = 1_000_000

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._made_for: dict[int, set[str]] = {}
        self._oldest = 0
        self._changed: set[asyncio.Event] = set()

    async def answer(self, call: StoreCall) -> StoreAnswer:
        """Return the answer to one call of `unisono.store.HeadStore`; it carries errors as well."""
        try:
            values, amount = await self._do(call)
        except (ProtocolError, DeadlineExceeded) as error:
            return StoreAnswer(call=call.call, error=str(error))
        return StoreAnswer(call=call.call, values=values, amount=amount)

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
        for event in self._changed:
            event.set()

    async def _wait(self, keys: Iterable[str], timeout_s: float) -> None:
        missing = [key for key in keys if key not in self._values]
        if not missing:
            return
        event = asyncio.Event()
        self._changed.add(event)
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                while missing := [key for key in missing if key not in self._values]:
                    event.clear()
                    await event.wait()
        except TimeoutError:
            shown = ", ".join(missing[:3])
            raise DeadlineExceeded(f"timeout: no key {shown} within {timeout_s:.1f} s") from None
        finally:
            self._changed.discard(event)


def _integer(key: str, value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise ProtocolError(f"key {key} holds no number: {value[:40]!r}") from None
