"""Digests of values: equal for equal values, and almost surely another one if a bit or an order differs.

Identity does not count: two tensors that share memory, and two that do not, have the same digest if their elements are
equal. So objects are walked, attribute by attribute, and not pickled: the bytes of a pickle depend on identity.
"""

from __future__ import annotations

import functools
import itertools
import random
import types
import zlib
from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from torchhooks.common.memory import bytes_of
from torchhooks.common.trees import changes_in_place

_CHUNK = 1 << 22  # elements of a tensor on a device that are mixed at a time: each takes eight bytes or more
_MIX = -7046029254386353131  # 2**64 over the golden ratio, an odd number whose bits are well mixed
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
)


def digest(value: object) -> str:
    """Return the digest of ``value``. Waits for the device that a tensor in it is on."""
    return digests([value])[0]


def digests(values: Iterable[object]) -> list[str]:
    """Return the digest of each of ``values``, with one wait for each device.

    Reads containers, tensors, arrays, numbers, strings, random generators and the attributes of other objects. Does not
    iterate over anything else, and draws no random number.

    The elements of a tensor on the CPU are read as bytes, and the elements of one on a device are mixed and added up
    there. So a tensor does not have the same digest in both places.
    """
    begun = [BegunDigest(value) for value in values]
    sums = [each for one in begun for each in one.sums]
    numbers: dict[int, int] = {}
    for device in {each.device for each in sums}:
        own = [each for each in sums if each.device == device]
        numbers |= zip(map(id, own), torch.stack(own).tolist(), strict=True)
    return [one.finish([numbers[id(each)] for each in one.sums]) for one in begun]


KnownSums = dict[int, tuple[int, torch.Tensor]]
"""The sums of tensors by their ids, with the tensors: the id of a tensor that is gone may be that of another one."""


class BegunDigest:
    """The digest of ``value``, complete but for the tensors that are on a device. Does not wait for the device.

    Args:
        value: what :func:`digests` reads.
        known: the sums of tensors on the CPU, for several values with the same tensors. A tensor that changes in
            place between two of them needs another dict.
    """

    def __init__(self, value: object, known: KnownSums | None = None) -> None:
        self._known = {} if known is None else known
        self.sums: list[torch.Tensor] = []
        """For each tensor on a device, the sum of its mixed elements there."""
        self._texts: list[str] = []
        self._note = self._texts.append
        self._inside: set[int] = set()
        self.add(value)
        self._known = {}  # it has the tensors, and what is read back from a device may take many runs

    def finish(self, numbers: Iterable[int]) -> str:
        """Return the digest, given the values of :attr:`sums`, which have arrived on the host. Called once."""
        for number in numbers:
            self._note(f"sum {number}")
        # The repr of a list of strings is another one for each list, and plain ASCII but for printable characters.
        return f"{zlib.crc32(repr(self._texts).encode()):08x}"

    def add(self, value: Any) -> None:
        """Add ``value``."""
        kind = type(value)
        if kind is torch.Tensor:
            self._add_tensor(value)
        elif kind in _PLAIN:
            # Not repr() of an integer, which Python limits to 4300 digits.
            self._note(f"{kind.__name__} {value:x}" if kind is int else f"{kind.__name__} {value!r}")
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value.to_local() if hasattr(value, "to_local") else value)  # this rank's part of a DTensor
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(np.asarray(value))
        elif isinstance(value, (type, types.ModuleType)) or hasattr(value, "__qualname__"):
            self._note(f"{kind.__name__} {value.__module__ if hasattr(value, '__module__') else ''} {value.__name__}")
        elif id(value) in self._inside:
            self._note("part of itself")
        else:
            self._inside.add(id(value))
            self._add_members(kind, value)
            self._inside.discard(id(value))

    def _add_members(self, kind: type, value: object) -> None:
        self._note(_name_of(kind))
        if isinstance(value, (dict, UserDict)):
            # The order of the keys is none of the values: an optimizer has another one after it was loaded.
            for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
                self.add(key)
                self.add(value[key])
        elif isinstance(value, (list, tuple)):
            self._note(f"of {len(value)}")
            for each in value:
                self.add(each)
        elif isinstance(value, torch.Generator):
            self.add(value.get_state())
        elif isinstance(value, np.random.Generator):
            self.add(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            self.add(value.get_state(legacy=False))
        elif isinstance(value, random.Random):
            self.add(value.getstate())
        elif isinstance(value, torch.nn.Module):
            self.add(dict(value.state_dict()))  # whether it is in training mode is no value
        elif isinstance(value, (set, frozenset)):
            for each in sorted(map(digest, value)):
                self._note(each)
        else:
            slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
            members = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            for name, member in sorted((members | getattr(value, "__dict__", {})).items()):
                self._note(name)
                self.add(member)

    def _add_array(self, array: np.ndarray) -> None:
        self._note(f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            for each in array.flat:
                self.add(each)
        else:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            self._note(f"{zlib.crc32(data):08x}")

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        text = f"{_name_of(tensor.dtype)} {tuple(tensor.shape)}"
        if has_plain_elements(tensor):
            if tensor.is_cpu:
                self._note(f"{text} {self._sum_on_host(tensor):08x}")
            else:
                self._note(text)
                self.sums.append(mixed_sum(_bits(tensor)))
            return
        self._note(text)
        for part in _parts_of(tensor.detach()):
            self._add_tensor(part)

    def _sum_on_host(self, tensor: torch.Tensor) -> int:
        known, _ = self._known.get(id(tensor), (None, None))
        if known is None:
            is_plain = tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
            known = zlib.crc32(bytes_of(tensor if is_plain else _bits(tensor)))
            self._known[id(tensor)] = known, tensor
        return known


@functools.cache
def _name_of(kind: type | torch.dtype) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def has_plain_elements(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` are in its memory, one after the other."""
    return (
        type(tensor) in _TENSORS
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a sparse or quantized one consists of."""
    if tensor.is_meta:
        return ()
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return whole.indices(), whole.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.int_repr(), tensor.dequantize()) if tensor.is_quantized else ()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))


def mixed_sum(bits: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed integers ``bits``, each with its place. Does not wait for the device.

    Mixing a place and an element is invertible, so that one other element always changes the sum. It is not linear, so
    that elements that change places almost surely do.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        mixed = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=bits.device)
        mixed.mul_(_MIX).bitwise_xor_(chunk)
        for _ in range(2):
            mixed.bitwise_xor_((mixed >> 32) & 0xFFFFFFFF).mul_(_MIX)
        total += mixed.bitwise_xor_((mixed >> 29) & 0x7FFFFFFFF).sum()
    return total


# -- items ------------------------------------------------------------------------------------------------------------

ItemDigest = dict[str, list[Any]]
"""By the path of a leaf: its description, torch's count of its in-place changes, and the digest of its value."""

# How much of an item is read at each checkpoint: enough to tell two batches apart, also nested ones.
_MOST_LEAVES = 32
_MOST_DEPTH = 8


def item_digest(item: object) -> ItemDigest | None:
    """Return the digests of the leaves of ``item``, an item of a data set; ``None`` if it cannot be read.

    Does not wait for a device, and reads no other objects than containers: of a tensor on a device, only the shape and
    the dtype count, and of another object the type.
    """
    try:
        return {path: _leaf(leaf) for path, leaf in itertools.islice(_leaves(item), _MOST_LEAVES)}
    except Exception:  # an item of an odd kind must not prevent a checkpoint
        return None


def differ(one: ItemDigest | None, other: ItemDigest | None, noisy: bool = False) -> bool:
    """Return whether two digests are of different items; false unless both exist.

    A leaf that only one of them has does not count: the body of a loop may take it out, as ``batch.pop("labels")``
    does. Nor does the content of a tensor that was changed in place. With ``noisy``, no leaf of floats counts.
    """
    if one is None or other is None:
        return False
    for path in one.keys() & other.keys():
        (kind, version, content), (other_kind, other_version, other_content) = one[path], other[path]
        if noisy and "float" in kind:
            continue
        if kind != other_kind or (version == other_version and content != other_content):
            return True
    return False


def _leaves(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    members: Any = None
    if isinstance(value, (dict, UserDict)):
        members = value.items()
    elif isinstance(value, (list, tuple)):
        members = enumerate(value)
    elif hasattr(type(value), "__dataclass_fields__"):
        members = getattr(value, "__dict__", {}).items()
    if members is None or depth == _MOST_DEPTH:
        yield path, value
        return
    for number, (key, member) in enumerate(itertools.islice(members, _MOST_LEAVES)):
        yield from _leaves(member, f"{path}[{key if type(key) in (int, str) else number}]", depth + 1)


def _leaf(value: object) -> list[Any]:
    if isinstance(value, torch.Tensor):
        version = changes_in_place(value)
        is_read = value.device.type == "cpu" and has_plain_elements(value)
        return [f"{value.dtype} {list(value.shape)}", version, digest(value) if is_read else ""]
    if isinstance(value, (np.ndarray, np.generic)):
        return [f"{value.dtype} {list(value.shape)}", 0, "" if value.dtype.hasobject else digest(value)]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return [kind, 0, digest(value) if type(value) in _PLAIN else ""]
