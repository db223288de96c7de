"""State dicts as a skeleton and a list of tensors, without pickle.

A newcomer receives, and a checkpoint holds, the ``state_dict()`` of each tracked object. `pack` takes the tensors out
of it and encodes the rest, the skeleton, as MessagePack; `unpack` puts both together again. Nothing is executed on the
way. A value of an unknown type is refused before anything is sent or written; the error has its path.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from unisono.core.cursor import MASK, mix
from unisono.core.errors import UsageError
from unisono.system import accelerators
from unisono.system.reading import read

__all__ = [
    "Packed",
    "described",
    "digest_of_each",
    "digest_of_state",
    "digest_of_tensor",
    "digest_of_tensors",
    "from_bytes",
    "grouped",
    "is_same_state",
    "pack",
    "pack_held",
    "quick_digest",
    "same_bits",
    "to_bytes",
    "unpack",
]

T = TypeVar("T")

TOGETHER_BYTES = 1 << 16
"""Tensors up to this size are concatenated before a digest is taken, because every digest costs some operations."""

BLOCK = 1 << 16
"""Words of a tensor that are added up to one number, of which its digest is made."""
BLOCKS_AT_ONCE = 128
"""On a device, where each launch costs time and each product memory: 64 MiB."""

_PLAIN = (bool, int, float, str, bytes, type(None))
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Packed(NamedTuple):
    """A state as skeleton and tensors."""

    skeleton: bytes
    tensors: list[Tensor]
    """In the order of the skeleton; not copied, detached."""
    paths: list[str]
    """The path of each tensor in the state, for messages."""

    def copied(self) -> Packed:
        """Return the state with tensors of its own."""
        return self._replace(tensors=[tensor.clone() for tensor in self.tensors])


def pack(state: Any, name: str = "state") -> Packed:
    """Split a state into skeleton and tensors.

    Args:
        name: the beginning of all paths.

    Raises:
        UsageError: a value is neither plain data nor a tensor; the message has its path.
    """
    packed = pack_held(state, name)
    for path, tensor in zip(packed.paths, packed.tensors, strict=True):
        if tensor.is_meta:
            raise _refusal(path, "strided tensor on meta")
    return packed


def pack_held(state: Any, name: str = "state") -> Packed:
    """Do what `pack` does with a state of which this worker holds some tensors; meta tensors stand for the others.

    The skeleton is that of the whole state.
    """
    found: list[tuple[str, Tensor]] = []
    skeleton = msgspec.msgpack.encode(_pack(state, name, found))
    return Packed(skeleton, [tensor for _, tensor in found], [path for path, _ in found])


def unpack(skeleton: bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the state that `pack` has split."""
    return _unpack(msgspec.msgpack.decode(skeleton), tensors)


def grouped(items: Sequence[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Return items in the groups in which they travel, in their order: of at most ``most`` bytes, or of one item."""
    groups: list[list[T]] = []
    together = 0
    for item in items:
        size = num_bytes(item)
        if not groups or together + size > most:
            groups.append([])
            together = 0
        groups[-1].append(item)
        together += size
    return groups


class _Parcel(msgspec.Struct, frozen=True):
    """A state as one piece: its skeleton, and (dtype, shape, content) of its tensors."""

    skeleton: bytes
    tensors: list[tuple[str, list[int], bytes]]


def to_bytes(state: Any, name: str = "state") -> bytes:
    """Return a small state as bytes, with its tensors.

    Raises:
        UsageError: a value is neither plain data nor a tensor; the message has its path, which begins with ``name``.
    """
    packed = pack(state, name)
    tensors = [(str(one.dtype), list(one.shape), _content(one)) for one in packed.tensors]
    return msgspec.msgpack.encode(_Parcel(packed.skeleton, tensors))


def from_bytes(data: bytes) -> Any:
    """Return the state that `to_bytes` was given; its tensors are on the CPU."""
    parcel = msgspec.msgpack.decode(data, type=_Parcel)
    return unpack(parcel.skeleton, [_from_content(kind, shape, raw) for kind, shape, raw in parcel.tensors])


def _content(tensor: Tensor) -> bytes:
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())


def _from_content(kind: str, shape: Sequence[int], raw: bytes) -> Tensor:
    dtype = _DTYPES[kind]
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(list(shape))


def _pack(value: Any, path: str, found: list[tuple[str, Tensor]]) -> Any:
    # Containers become [tag, content], so that no value of the user can be mistaken for a tag.
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise _refusal(path, f"{str(value.layout).removeprefix('torch.')} tensor on {value.device}")
        found.append((path, value.detach().resolve_conj().resolve_neg()))
        return ["tensor", len(found) - 1]
    if type(value) in _PLAIN:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return ["int", str(value)]
        return value
    if isinstance(value, Mapping):
        kind = "ordered" if isinstance(value, collections.OrderedDict) else "dict"
        return [
            kind,
            [[_pack(k, f"{path} (a key)", found), _pack(v, f"{path}[{k!r}]", found)] for k, v in value.items()],
        ]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        tag = next(t for t in ("list", "tuple", "frozenset", "set") if isinstance(value, _CONTAINERS[t]))
        return [tag, [_pack(v, f"{path}[{i}]", found) for i, v in enumerate(items)]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return ["numpy", [value.dtype.str, value.tobytes()]]
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return ["array", [value.dtype.str, list(value.shape), numpy.ascontiguousarray(value).tobytes()]]
    raise _refusal(path, f"{type(value).__module__}.{type(value).__qualname__}")


def _refusal(path: str, kind: str) -> UsageError:
    return UsageError(
        f"{path} is a {kind}; a value for other workers and a tracked object's state_dict() may hold tensors (strided, "
        "with data), numbers, strings, bytes, None, numpy arrays, and dicts, lists, tuples and sets of them"
    )


_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "frozenset": frozenset, "set": set}


def _unpack(value: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    tag, content = value
    if tag == "tensor":
        return tensors[content]
    if tag in ("dict", "ordered"):
        pairs = [(_unpack(k, tensors), _unpack(v, tensors)) for k, v in content]
        return collections.OrderedDict(pairs) if tag == "ordered" else dict(pairs)
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](_unpack(v, tensors) for v in content)
    return _SCALARS[tag](content)


def _numpy_scalar(content: list[Any]) -> Any:
    import numpy

    return numpy.frombuffer(content[1], dtype=content[0])[0]


def _numpy_array(content: list[Any]) -> Any:
    import numpy

    return numpy.frombuffer(content[2], dtype=content[0]).reshape(content[1]).copy()


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
    "complex": lambda content: complex(*content),
    "numpy": _numpy_scalar,
    "array": _numpy_array,
}


def digest_of_tensor(tensor: Tensor) -> int:
    """Return a 64-bit fingerprint of a tensor's shape, dtype and bits."""
    return digest_of_each([tensor])[0]


def digest_of_each(tensors: Sequence[Tensor]) -> list[int]:
    """Return the fingerprint of each tensor. What lies on a device is added up there, and read with one wait."""
    sums = read([part for tensor in tensors for part in (_sums_of_blocks(tensor), _rest(tensor))])
    found = []
    for tensor, blocks, rest in zip(tensors, sums[::2], sums[1::2], strict=True):
        value = mix(hash_bytes(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))
        for block in blocks.tolist():
            value = mix((value ^ block) & MASK)
        found.append(mix(value ^ hash_bytes(bytes(rest.tolist()))))
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to(accelerators.adds_on(tensor.device)).contiguous().view(-1).view(torch.uint8)


def _rest(tensor: Tensor) -> Tensor:
    """Return the last bytes of a tensor, behind its words of 8."""
    flat = _bytes_of(tensor)
    return flat[len(flat) // 8 * 8 :]


def _sums_of_blocks(tensor: Tensor) -> Tensor:
    """Return by block of a tensor the sum of each word times an odd number that belongs to its index in the block,
    modulo 2**64, where the tensor lies: (blocks,) int64.
    """
    flat = _bytes_of(tensor)
    flat = flat[: len(flat) // 8 * 8]
    words = (flat.clone() if flat.storage_offset() % 8 or flat.data_ptr() % 8 else flat).view(torch.int64)
    factors = _odd_numbers(words.device)
    if words.device.type == "cpu":  # block by block, to stay in the cache
        return torch.stack([(one * factors[: len(one)]).sum() for one in words.split(BLOCK)]) if len(words) else words
    whole = words[: len(words) // BLOCK * BLOCK].view(-1, BLOCK)
    last = words[whole.numel() :]
    sums = [(part * factors).sum(dim=1) for part in whole.split(BLOCKS_AT_ONCE)]
    return torch.cat([*sums, (last * factors[: len(last)]).sum().view(1)[: len(last)]])


def digest_of_tensors(tensors: Sequence[Tensor]) -> int:
    """Return a 64-bit fingerprint of the bits of some tensors, in their order. Much faster than tensor by tensor.

    For comparing processes of one version only: shapes and dtypes do not count.
    """
    small: dict[torch.device, list[Tensor]] = {}
    large = []
    for tensor in tensors:
        if tensor.nbytes > TOGETHER_BYTES:
            large.append(tensor)
        elif tensor.numel():
            small.setdefault(tensor.device, []).append(_bytes_of(tensor))
    value = len(tensors)
    for digest in digest_of_each([*large, *map(torch.cat, small.values())]):
        value = mix(value ^ digest)
    return value


def quick_digest(state: Any) -> int:
    """Return a 64-bit fingerprint of a state, for comparing processes of one version. Never store it.

    Of a tensor that this worker does not hold (a meta tensor), only the place counts.
    """
    packed = pack_held(state)
    skeleton = torch.frombuffer(bytearray(packed.skeleton), dtype=torch.uint8)
    return digest_of_tensor(skeleton) ^ digest_of_tensors([one for one in packed.tensors if not one.is_meta])


def digest_of_batch(batch: Any) -> int:
    """Return a 64-bit fingerprint of the dense tensors in a batch; 0 where there are none, or others as well."""
    found = list(_tensors_in(batch))
    if not found or any(one.layout != torch.strided or one.is_meta or one.is_quantized for one in found):
        return 0
    return hash_bytes(repr(digest_of_each(found)).encode())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one)


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    """Return an odd number for each index of a block: the same in all processes and versions."""
    mixed = torch.arange(BLOCK, dtype=torch.int64) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed | 1).to(device)


def hash_bytes(data: bytes) -> int:
    """Return a 64-bit fingerprint of some bytes."""
    value = len(data)
    for start in range(0, len(data), 8):
        value = mix(value ^ int.from_bytes(data[start : start + 8], "little"))
    return value


def is_same_state(a: Any, b: Any) -> bool:
    """Return whether two states have the same skeleton, and tensors of the same bits; a meta tensor equals another."""
    ours, theirs = pack_held(a), pack_held(b)
    return ours.skeleton == theirs.skeleton and all(map(same_bits, ours.tensors, theirs.tensors))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; a meta tensor equals another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device:
        return True  # one tensor: many objects keep the tensors that they load
    if a.device != b.device:
        a, b = read([a, b])
    words = [_bytes_of(tensor) for tensor in (a, b)]
    whole = words[0].numel() // 8 * 8
    if whole and all(tensor.data_ptr() % 8 == 0 for tensor in words):
        # Comparing words of 8 bytes takes a quarter of the time.
        if not torch.equal(words[0][:whole].view(torch.int64), words[1][:whole].view(torch.int64)):
            return False
        words = [tensor[whole:] for tensor in words]
    return torch.equal(words[0], words[1])


def digest_of_state(state: Any, others: Mapping[int, int] = MappingProxyType({})) -> int:
    """Return a 64-bit fingerprint of a state: of its skeleton and the bits of its tensors.

    Args:
        others: the digests of the tensors that this worker does not hold (meta tensors), by their numbers in the order
            of the state.
    """
    packed = pack_held(state)
    own = iter(digest_of_each([tensor for tensor in packed.tensors if not tensor.is_meta]))
    value = hash_bytes(packed.skeleton)
    for number, tensor in enumerate(packed.tensors):
        value = mix(value ^ (others[number] if tensor.is_meta else next(own)))
    return value


def described(state: Any, name: str) -> dict[str, str]:
    """Return every value of a state as text, by its path; a tensor as its shape and digest.

    For a message that names the first difference between two states. Slow for large containers.
    """
    packed = pack_held(state, name)
    held = [(path, one) for path, one in zip(packed.paths, packed.tensors, strict=True) if not one.is_meta]
    digests = digest_of_each([tensor for _, tensor in held])
    found = {
        path: f"a tensor {tuple(tensor.shape)} with digest {digest:016x}"
        for (path, tensor), digest in zip(held, digests, strict=True)
    }
    _describe(state, name, found)
    return found


def _describe(value: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _describe(item, f"{path}[{key!r}]", found)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _describe(item, f"{path}[{index}]", found)
    elif not isinstance(value, Tensor):
        found[path] = repr(value)
