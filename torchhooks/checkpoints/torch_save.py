"""``torch.save`` for checkpoints: without checksums, as a manifest has one, and without keeping the state in memory."""

from __future__ import annotations

import pickle
import zlib
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from torchhooks.common.files import Disk


def write_state(state: dict[str, Any], path: str, disk: Disk) -> tuple[int, int]:
    """Write ``state`` to a new file at ``path``, sync it, and return its size and its CRC-32."""
    with disk.create(path) as file:
        sink = Sink(disk, file)
        save(state, sink)
        sink.check()
        disk.sync(file)
    return sink.size, sink.checksum


def save(state: dict[str, Any], file: Any) -> None:
    """Write ``state`` to the open ``file``; keep no reference to its tensors."""
    # Before torch 2.10, the class that torch.save derives from Pickler has a method that refers to every storage. A
    # class is part of a reference cycle, so all of them stayed in memory until the garbage collector ran.
    derived: list[Any] = []

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            derived.append(cls)

    sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # every byte is in the sum that the manifest has
    try:
        torch.save(state, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
    finally:
        torch.serialization.set_crc32_options(sums)
        for pickler in derived:
            pickler.persistent_id = None


class Sink:
    """A file that is being written, as ``torch.save`` sees it.

    torch replaces an error of ``write`` by one about positions in the file. So the first error is stored until
    :meth:`check` raises it, and nothing is written after it.
    """

    def __init__(self, disk: Disk, file: BinaryIO) -> None:
        self.size = self.checksum = 0
        self._file = file
        self._disk = disk
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self._error is None:
            try:
                self._disk.write(self._file, data)
            except BaseException as error:  # a Ctrl-C arrives here too
                self._error = error
        self.size, self.checksum = self.size + len(data), zlib.crc32(data, self.checksum)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is synced as a whole."""

    def check(self) -> None:
        """Raise the first error of :meth:`write`, if there was one."""
        if self._error is not None:
            raise self._error
