"""The manifest of a checkpoint, written last: what the folder is, which files it has, and what is in them.

model.ckpt-700/
    state.pt                                    of torch.save: everything, or what is not sharded
    rank-1.pt, rank-2.pt                        with DTensors: what belongs to another rank alone
    .metadata, __0_0.distcp, __1_0.distcp       with DTensors: of torch.distributed.checkpoint
    manifest.json

The manifest is JSON, in one line that ends in the CRC-32 of what precedes:

    {"format": 2, "name": "model.ckpt-700", "order": 8, "step": 700, "time": 1752000000.0, "kept": false,
     "world_size": 1, "score": null, "metadata": {"lr": 0.1}, "files": {"state.pt": [51234, 1234567890]},
     "crc32": 987654321}

``order`` numbers the checkpoints of a folder as they are written. ``files`` has the size and the CRC-32 of each file.
``metadata`` is the loop's, or null if JSON cannot hold it, such as a tensor. ``state.pt`` has it too.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

NAME = "manifest.json"
STATE = "state.pt"
FORMAT = 2
_CHUNK = 1 << 20
_END = b', "crc32": %d}\n'

Files = dict[str, tuple[int, int]]
"""The size and the CRC-32 of each file, by name."""


def has_manifest(path: str) -> bool:
    """Return whether ``path`` is a folder with a manifest."""
    return os.path.exists(os.path.join(path, NAME))


def file_sums(path: str, names: list[str]) -> Files:
    """Return the size and the CRC-32 of the files ``names`` in the folder ``path``."""
    found, buffer = {}, memoryview(bytearray(_CHUNK))
    for name in names:
        size = checksum = 0
        with open(os.path.join(path, name), "rb", buffering=0) as file:
            while length := file.readinto(buffer):
                size, checksum = size + length, zlib.crc32(buffer[:length], checksum)
        found[name] = size, checksum
    return found


def encoded(manifest: dict[str, Any]) -> bytes:
    """Return the contents of the file for ``manifest``."""
    text = json.dumps(manifest).encode()[:-1]
    return text + _END % zlib.crc32(text)


def as_json(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``metadata``, or ``None`` if something else is read from JSON than what was written to it."""
    try:
        same = repr(json.loads(json.dumps(metadata))) == repr(metadata)
    except (TypeError, ValueError):
        return None
    return dict(metadata) if same else None


def read_manifest(path: str) -> dict[str, Any]:
    """Return the manifest of the folder ``path``.

    Raises:
        ValueError: it is not what was written.
        OSError: it cannot be read.
    """
    with open(os.path.join(path, NAME), "rb") as file:
        data = file.read()
    text = data.rpartition(_END[:5])[0]
    if data != text + _END % zlib.crc32(text):
        raise ValueError("its checksum does not match")
    manifest: dict[str, Any] = json.loads(data)
    if manifest["format"] != FORMAT:
        raise ValueError(f"it has format {manifest['format']!r}, and this version of torchhooks reads {FORMAT}")
    return manifest


def damaged_file(path: str, files: Files) -> str | None:
    """Return the name of a file in the folder ``path`` that is not what was written, ``None`` if all are."""
    for name, expected in files.items():
        if os.path.basename(name) != name or file_sums(path, [name])[name] != tuple(expected):
            return name
    return None
