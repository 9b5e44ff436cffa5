"""Digests of the items of a data set and of tensors: small, plain, and enough to notice that one is another."""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

Digest = dict[str, list[Any]]
"""By the path of a leaf: its description, torch's count of its in-place changes, a checksum of a sample of it."""

_MOST_LEAVES = 32
_MOST_DEPTH = 8
_SAMPLE = 64  # elements or characters of a leaf
_COLUMNS = 4096
_MIX = -7046029254386353131  # an odd number whose bits are well mixed: 2**64 over the golden ratio
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def digest(item: Any) -> Digest | None:
    """Return the digest of ``item``; ``None`` if it cannot be read.

    Reads containers, host tensors, arrays, numbers and strings. Of a tensor on a device, only the shape and the dtype:
    its values would have to be waited for. Of any other object, only the type: reading it could change it.
    """
    try:
        return {path: leaf_digest(leaf) for path, leaf in itertools.islice(_leaves(item), _MOST_LEAVES)}
    except Exception:  # an item of an odd kind must not prevent a checkpoint
        return None


def differ(one: Digest | None, other: Digest | None, noisy: bool = False) -> bool:
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


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return a text for each of ``tensors``, equal for equal bits, and almost surely another one for others.

    Reads each tensor once, where it is, at a tenth of the time of a cryptographic digest, and waits once for each
    device. The text is empty for a tensor without plain elements, such as a sparse one or a subclass.
    """
    texts, sums = [], []
    for tensor in tensors:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        readable = plain and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        texts.append(f"{tensor.dtype}{list(tensor.shape)} " if readable else "")
        sums.append(_weighted_sum(tensor) if readable else torch.zeros((), dtype=torch.int64, device="cpu"))
    numbers: dict[int, int] = {}
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        numbers |= zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
    return [text and f"{text}{numbers[place]}" for place, text in enumerate(texts)]


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits as integers, which wrap around, each times a weight of its column."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.view(kind)
    rows = bits.numel() // _COLUMNS
    # In their own dtype, because torch would first copy them to another one.
    columns = bits[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0, dtype=kind).to(torch.int64)
    rest = bits[rows * _COLUMNS :].to(torch.int64)
    columns[: rest.numel()] += rest * _MIX
    weights = torch.arange(_COLUMNS, dtype=torch.int64, device=tensor.device) * _MIX | 1
    return (columns * weights).sum()


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
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


def leaf_digest(value: Any) -> list[Any]:
    """Return the digest of a value that is not a container. Does not wait for a device."""
    if isinstance(value, torch.Tensor):
        version = 0 if value.is_inference() else value._version  # noqa: SLF001 - torch's own count of changes in place
        return [f"{value.dtype} {list(value.shape)}", version, _checksum(_tensor_sample(value))]
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        sample = None if value.dtype.hasobject else value.flat[_spread(value.size).numpy()].tolist()
        return [f"{value.dtype} {list(value.shape)}", 0, _checksum(sample)]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value) in (str, bytes):
        return [f"{kind} of {len(value)}", 0, _checksum([value[:_SAMPLE], value[-_SAMPLE:]])]
    return [kind, 0, _checksum(value if type(value) in _PLAIN else None)]


def _tensor_sample(tensor: torch.Tensor) -> Any:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
        return None
    try:
        return torch.take(tensor.detach(), _spread(tensor.numel())).tolist()  # copies nothing but the sample
    except RuntimeError:  # torch cannot take elements of this dtype, such as float8
        return None


def _spread(size: int) -> torch.Tensor:
    """Return at most ``_SAMPLE`` indexes, spread evenly over ``size`` elements."""
    number = min(size, _SAMPLE)
    return torch.arange(number, device="cpu") * size // max(number, 1)


def _checksum(plain: Any) -> int:
    return zlib.crc32(pickle.dumps(plain, protocol=4))
