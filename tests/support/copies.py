"""Places for the copy of a training run: a folder, or an S3 server behind a proxy; and checkpoints to copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.proxy import Fault, Proxy
from support.s3 import S3Server
from torchhooks import Saver, Session
from torchhooks.tools.mirror.copy import Copy
from torchhooks.tools.mirror.layout import order_of
from torchhooks.tools.mirror.store import Store


class FolderPlace:
    """A folder as a store."""

    proxy: Proxy | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = path.as_uri()
        self.options: dict[str, Any] = {}

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())

    def fault(self, method: str, part: str, fault: Fault, times: int = 1 << 30) -> None:
        raise OSError("a folder has no proxy, so nothing can fail")


class S3Place(FolderPlace):
    """A folder in a bucket, which is read and written here past the proxy."""

    proxy: Proxy

    def __init__(self, server: S3Server, proxy: Proxy) -> None:
        self.url = server.new_url()
        self.proxy = proxy
        # One client for all tests, which takes a second to make.
        self.options = {**server.options, "endpoint_url": proxy.endpoint, "skip_instance_cache": False}
        self._store = Store(self.url, {**server.options, "skip_instance_cache": False})

    def read(self, name: str) -> bytes:
        data = self._store.read(name)
        assert data is not None
        return data

    def write(self, name: str, data: bytes) -> None:
        self._store.write(name, data)

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def names(self) -> list[str]:
        return sorted(self._store.list())

    def fault(self, method: str, part: str, fault: Fault, times: int = 1 << 30) -> None:
        """Have the next ``times`` requests with ``method``, and with ``part`` in their path, meet ``fault``."""
        left = [times]

        def fault_of(met: str, path: str) -> Fault | None:
            if met != method or part not in path or not left[0]:
                return None
            left[0] -= 1
            return fault

        self.proxy.fault = fault_of


def new_copy(folder: Path, place: FolderPlace, keep: int = 1) -> Copy:
    """Return the copy of ``folder``, opened and restored from."""
    copy = Copy(str(folder), Store(place.url, place.options), lambda: keep)
    copy.open()
    copy.restore()
    return copy


def saving(folder: Path, max_to_keep: int | None = 5, **arguments: Any) -> Callable[[int], None]:
    """Return a function that saves a checkpoint of a step into ``folder``."""
    saver = Saver(max_to_keep=max_to_keep, **arguments)
    session = Session(torch.nn.Linear(2, 1))

    def save(step: int) -> None:
        saver.save(session, os.path.join(folder, "model.ckpt"), step)

    return save


def whole(place: FolderPlace) -> list[str]:
    """Return the names of the checkpoints in the copy that have a manifest, in their order."""
    places = [name.rpartition("/")[0] for name in place.names() if name.endswith("/manifest.json")]
    return [place.rpartition("~")[0] for place in sorted(places, key=order_of)]
