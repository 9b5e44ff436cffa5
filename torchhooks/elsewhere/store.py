"""A folder in a store such as S3, GCS or Azure, through fsspec, and what of its address may be logged."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchhooks.summary.trackers import library

_LEAST_SECRET = 4  # shorter texts are no credentials, and would be found everywhere


def is_url(path: str) -> bool:
    """Return whether ``path`` is the address of a store, and no path of this machine."""
    return "://" in path


class Secrets:
    """Removes credentials from texts: those of an address, ``s3://KEY:SECRET@bucket/run``, and of its options."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        user, at, host = place.rpartition("@")
        self.url = f"{scheme}://{host if at else place}"
        """The address without credentials."""
        found = {user, *user.split(":"), query, *re.split("[=&]", query)[1::2], *_texts_in(options)}
        self._found = sorted((text for text in found if len(text) >= _LEAST_SECRET), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return ``text`` with ``***`` in place of each of them."""
        for secret in self._found:
            text = text.replace(secret, "***")
        return text


def _texts_in(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return set().union(*map(_texts_in, value.values()))
    return {value} if isinstance(value, str) and not is_url(value) else set()


class Store:
    """The calls of the store that a copy needs, with names relative to one address.

    Tests replace it, to have a copy fail at any of the calls.

    Raises:
        ImportError: fsspec, or the library for stores of this kind, is not installed.
        ValueError: no library knows stores of this kind.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        fsspec = library("fsspec", "mirror")
        hide = Secrets(url, options).hide
        given = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        # Outside of the except blocks, so that the traceback has no error of the library with credentials.
        error: Exception | None = None
        try:
            system, root = fsspec.core.url_to_fs(
                url, **{"use_listings_cache": False, "skip_instance_cache": True, **given, **(options or {})}
            )
        except ImportError as raised:
            error = ImportError(f"{hide(url)}: {hide(str(raised))}: install it with pip, such as pip install s3fs")
        except Exception as raised:
            error = ValueError(f"{hide(url)}: {hide(str(raised))}")
        if error is not None:
            raise error
        self._system, self._root = system, root.rstrip("/")
        is_local = isinstance(system, fsspec.implementations.local.LocalFileSystem)
        self.local_root: str | None = os.path.realpath(root) if is_local else None
        """Its path on this machine, if it has one."""

    def sizes(self) -> dict[str, int]:
        """Return the size of each file by its name."""
        self._system.invalidate_cache()
        try:
            found = self._system.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        names = {path[len(self._root) + 1 :]: int(about["size"] or 0) for path, about in found.items()}
        # Not what stands for a folder, and nothing that would be outside of the folder of the training run.
        return {name: size for name, size in names.items() if not {"", "..", "."} & {*name.split("/")}}

    def put(self, path: str, name: str) -> None:
        """Copy the file ``path`` of this machine to ``name``, where it appears as a whole, at least in S3 and GCS."""
        self._system.put_file(path, f"{self._root}/{name}")

    def get(self, name: str, path: str) -> None:
        """Copy ``name`` to the file ``path`` of this machine."""
        self._system.get_file(f"{self._root}/{name}", path)

    def remove(self, name: str) -> None:
        """Remove ``name``, unless it is gone already."""
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def put_many(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Copy several files, as pairs of a path and a name, at once if the library can do that."""
        self._system.put([path for path, _ in pairs], [f"{self._root}/{name}" for _, name in pairs])

    def get_many(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Copy several files to this machine, as pairs of a name and a path, at once if the library can do that."""
        self._system.get([f"{self._root}/{name}" for name, _ in pairs], [path for _, path in pairs])
