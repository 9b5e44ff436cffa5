"""Digests of the items of a data set, as checkpoints have them: a resume compares the item that it passes over.

A checkpoint of an older version has the digests of that version, so how they are made never changes. All others are
made by :mod:`torchhooks.common.digests`.
"""

from __future__ import annotations

import itertools
import zlib
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchhooks.common.digests import has_plain_elements, sum_on_host
from torchhooks.common.trees import changes_in_place

ItemDigest = dict[str, list[Any]]
"""By the path of a leaf: its description, torch's count of its in-place changes, and the digest of its value."""

# How much of an item is read at each checkpoint: enough to tell two batches apart, also nested ones.
_MOST_LEAVES = 32
_MOST_DEPTH = 8
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
)


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
    # A key of another type is named by its place. Its repr() would be code of the script, and may have an address,
    # which is another one in the process that resumes.
    for number, (key, member) in enumerate(itertools.islice(members, _MOST_LEAVES)):
        yield from _leaves(member, f"{path}[{key if type(key) in (int, str) else number}]", depth + 1)


def _leaf(value: object) -> list[Any]:
    if isinstance(value, torch.Tensor):
        version = changes_in_place(value)
        is_read = value.device.type == "cpu" and has_plain_elements(value)
        return [f"{value.dtype} {list(value.shape)}", version, _digest(value) if is_read else ""]
    if isinstance(value, (np.ndarray, np.generic)):
        return [f"{value.dtype} {list(value.shape)}", 0, "" if value.dtype.hasobject else _digest(value)]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return [kind, 0, _digest(value) if type(value) in _PLAIN else ""]


def _digest(value: Any) -> str:
    """Return the digest of a leaf that ledgers had in their first format, and checkpoints have."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        texts = [f"{value.dtype} {tuple(value.shape)} {sum_on_host(value):08x}"]
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        texts = [f"{array.dtype} {array.shape}", f"{zlib.crc32(data):08x}"]
    else:
        # Not repr() of an integer, which Python limits to 4300 digits.
        texts = [f"{kind.__name__} {value:x}" if kind is int else f"{kind.__name__} {value!r}"]
    # The repr of a list of strings is another one for each list, and plain ASCII but for printable characters.
    return f"{zlib.crc32(repr(texts).encode()):08x}"
