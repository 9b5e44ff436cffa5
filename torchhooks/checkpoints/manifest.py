"""Checkpoints that are folders: a manifest, written last, that says what files a folder has and what is in them.

model.ckpt-700/
    .metadata, __0_0.distcp, __1_0.distcp       of torch.distributed.checkpoint
    rank-0.pt, rank-1.pt                        what is not sharded, and what belongs to one rank alone
    manifest.json
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

NAME = "manifest.json"
_CHUNK = 1 << 20

Files = dict[str, tuple[int, int]]
"""The size and the CRC-32 of each file, by name."""


def has_manifest(path: str) -> bool:
    """Return whether ``path`` is a folder with a manifest."""
    return os.path.exists(os.path.join(path, NAME))


def file_sums(path: str, names: list[str]) -> Files:
    """Return the size and the CRC-32 of the files ``names`` in the folder ``path``."""
    found = {}
    for name in names:
        size = checksum = 0
        with open(os.path.join(path, name), "rb") as file:
            while chunk := file.read(_CHUNK):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        found[name] = size, checksum
    return found


def encoded(manifest: dict[str, Any]) -> bytes:
    """Return the contents of the file for ``manifest``: a line of JSON, and its CRC-32."""
    line = json.dumps(manifest).encode()
    return b"%s\n%08x\n" % (line, zlib.crc32(line))


def read_manifest(path: str) -> tuple[dict[str, Any], str]:
    """Return the manifest of the folder ``path``, and its checksum.

    Raises:
        ValueError: it is not what was written.
        OSError: it cannot be read.
    """
    with open(os.path.join(path, NAME), "rb") as file:
        line, checksum = file.read().splitlines()
    if checksum != b"%08x" % zlib.crc32(line):
        raise ValueError("its checksum does not match")
    manifest: dict[str, Any] = json.loads(line)
    return manifest, checksum.decode()


def damaged_file(path: str, files: Files) -> str | None:
    """Return the name of a file in the folder ``path`` that is not what was written, ``None`` if all are."""
    for name, expected in files.items():
        if os.path.basename(name) != name or file_sums(path, [name])[name] != tuple(expected):
            return name
    return None
