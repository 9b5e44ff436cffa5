"""A folder in a store such as S3, GCS or Azure, through fsspec, and what may be shown of its address and its errors."""

from __future__ import annotations

import html
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus, unquote

from torchhooks.common.checks import import_optional
from torchhooks.common.files import replacing

T = TypeVar("T")
_LEAST_SECRET = 4  # characters; shorter texts are no credentials, and would be found everywhere
_LEAST_VARIABLE = 8
_SECRET_VARIABLES = re.compile(r"(^|_)(secret|token|password|credentials?|key|sas)(_|$)|connection_string", re.I)


class StoreError(Exception):
    """A call of the store failed. The text has no credentials, and no exception of the library is attached."""


class NotInStoreError(StoreError):
    """The store has no such object, or no such bucket."""


def is_url(path: str) -> bool:
    """Return whether ``path`` is the address of a store, and no path of this machine."""
    return "://" in path


class Secrets:
    """Removes credentials from texts: those of an address, of its options, of fsspec's settings and of the environment.

    Nothing but the keys of the options is ever shown, because their values can be credentials at any depth.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        scheme, _, rest = url.partition("://")
        user, place = _split_user(rest)
        texts = {user, *user.split(":"), *_texts_in(options)}
        if scheme in ("http", "https"):  # a signed address; in other stores, a question mark is part of a name
            place, mark, query = place.partition("?")
            texts |= {query, *re.split("[=&]", query)[1::2]}
            place += f"{mark}***" if mark else ""
        self.url = f"{scheme}://{re.sub('/+', '/', place).rstrip('/') or '/'}"
        """The address without credentials."""
        with suppress(ImportError):
            texts.update(_texts_in(import_optional("fsspec.config", "mirror").conf))
        # The value of GOOGLE_APPLICATION_CREDENTIALS, for example, is the path of a file, and not a secret.
        for name, value in os.environ.items():
            if _SECRET_VARIABLES.search(name) and len(value) >= _LEAST_VARIABLE and not os.path.exists(value):
                texts.update(_texts_in(value))
        forms = {form for text in texts for form in _forms(text) if len(form) >= _LEAST_SECRET}
        # The longest first: one may be part of another.
        self._pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or "(?!)", re.I)

    def hide(self, text: str) -> str:
        """Return ``text`` with ``***`` in place of each of them."""
        return self._pattern.sub("***", text)


def _split_user(rest: str) -> tuple[str, str]:
    """Return user and password, and what follows them, in an address without its scheme."""
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    if at:
        return user, host + slash + path
    # An AWS secret may have a slash, KEY:SEC/RET@bucket. Otherwise, an @ after the first slash is part of a name.
    if re.match(r"[^:/]+:(?!\d+/|[^:/]*:)", rest) and "@" in path:
        user, _, place = rest.rpartition("@")
        return user, place
    return "", rest


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "replace")
    if isinstance(value, str):
        yield value
        if is_url(value):
            user, _ = _split_user(value.partition("://")[2])
            yield from (user, *user.split(":"))
        for part in value.split(";"):  # of a connection string: AccountName=...;AccountKey=...
            yield part.partition("=")[2]
    elif isinstance(value, (int, float)):
        yield "" if isinstance(value, bool) else str(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _texts_in(each)


def _forms(text: str) -> set[str]:
    """Return ``text`` as it may stand in an error: percent-encoded, decoded, or escaped in HTML, JSON or Python."""
    escaped = {html.escape(text), json.dumps(text)[1:-1], repr(text)[1:-1]}
    return {text, quote(text), quote(text, safe=""), quote_plus(text), unquote(text), *escaped}


class Store:
    """The calls of the store that a copy needs, with names relative to one address.

    Raises:
        ImportError: fsspec, or the library for stores of this kind, is not installed.
        ValueError: no library knows stores of this kind.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        fsspec = import_optional("fsspec", "mirror")
        hidden = Secrets(url, options)
        self.url, self.hide = hidden.url, hidden.hide
        error: Exception | None = None
        try:
            # Another job may write to the same place: a list that fsspec remembers would not have its objects.
            given = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
            system, root = fsspec.core.url_to_fs(url, **given)
        except ImportError as raised:
            error = ImportError(f"{self.url}: {self.hide(str(raised))}: install it with pip, such as pip install s3fs")
        except Exception as raised:
            error = ValueError(f"{self.url}: {self.hide(str(raised))}")
        if error is not None:  # raised here, so that the library's error, which may have credentials, is not attached
            raise error
        self._system, self._root = system, re.sub("/+", "/", root).rstrip("/")
        is_local = isinstance(system, fsspec.implementations.local.LocalFileSystem)
        self.local_root: str | None = os.path.realpath(self._root) if is_local else None
        """Its path on this machine, if it has one."""

    def list(self, below: str = "") -> dict[str, int]:
        """Return the size of each object by its name; of those in the folder ``below`` only, if it is given."""
        self._system.invalidate_cache()
        place = f"{self._root}/{below}".rstrip("/")
        try:
            found = self._call(self._system.find, place, detail=True)
        except NotInStoreError:
            return {}
        sizes = {}
        for path, about in found.items():
            name = path.removeprefix(f"{self._root}/")
            parts = name.split("/")
            # Not what stands for a folder, what is being written, or what would be outside of the restored folder.
            if name != path and not {"", ".", ".."} & {*parts} and not name.endswith(".tmp") and "\0" not in name:
                sizes[name] = int(about["size"] or 0)
        return sizes

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """Return the contents of ``name``, or a part; ``None`` if there is no such object."""
        try:
            return bytes(self._call(self._system.cat_file, f"{self._root}/{name}", start=start, end=end))
        except NotInStoreError:
            return None

    def age(self, name: str) -> float | None:
        """Return how many seconds ago ``name`` was written, by the store's clock; ``None`` if it does not say."""
        try:
            written: float = self._call(self._system.modified, f"{self._root}/{name}").timestamp()
        except StoreError:  # a library without this call
            return None
        return max(0.0, time.time() - written)

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` to ``name``, which appears as a whole."""
        self._call(self._write, name, data)

    def put(self, path: str, name: str, syncs: bool = False) -> None:
        """Copy the file ``path`` of this machine to ``name``, which appears as a whole.

        If it ``syncs``, and the store is a disk, the file is on the disk before it gets its name.

        Raises:
            OSError: the file of this machine cannot be read.
        """
        # Before _call(), which would make an error of this machine's disk one of the store.
        with open(path, "rb"):
            pass
        self._call(self._put, path, name, syncs)

    def get(self, name: str, path: str) -> None:
        """Copy ``name`` to the file ``path`` of this machine."""
        self._call(self._system.get_file, f"{self._root}/{name}", path)

    def remove(self, name: str) -> None:
        """Remove ``name``, unless it is gone already."""
        with suppress(NotInStoreError):
            self._call(self._system.rm_file, f"{self._root}/{name}")
        if self.local_root is not None:  # other stores have no folders that could be left empty
            folder = os.path.dirname(os.path.join(self.local_root, name))
            with suppress(OSError):
                while folder != self.local_root:
                    os.rmdir(folder)
                    folder = os.path.dirname(folder)

    def make(self) -> None:
        """Make the folder of a store that is a disk, but not the one above it, which is missing without the disk."""
        if self.local_root is not None and not os.path.isdir(self.local_root):
            self._call(os.mkdir, self.local_root)

    def _write(self, name: str, data: bytes) -> None:
        if self.local_root is None:
            self._system.pipe_file(f"{self._root}/{name}", data)
        else:
            with _replacing(self.local_root, name) as temporary, open(temporary, "wb") as file:
                file.write(data)

    def _put(self, path: str, name: str, syncs: bool) -> None:
        if self.local_root is None:
            self._system.put_file(path, f"{self._root}/{name}")
        else:
            with _replacing(self.local_root, name) as temporary:
                shutil.copyfile(path, temporary)
                if syncs:
                    with open(temporary, "rb") as file:
                        os.fsync(file.fileno())

    def _call(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Return ``function(...)``; raise its error as a StoreError, to which it is not attached."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            kind = NotInStoreError if isinstance(error, FileNotFoundError) else StoreError
            reason = self.hide(f"{type(error).__name__}: {error}")
        # Not in the except block: Python would keep the library's error, which may have credentials, as __context__.
        raise kind(reason)


@contextmanager
def _replacing(root: str, name: str) -> Iterator[str]:
    """Yield a path to write a file to, which then gets ``name`` in the folder ``root``."""
    target = os.path.join(root, *name.split("/"))
    folder, base = os.path.split(target)
    # If the disk of the store is not mounted any more, makedirs() would make the folder on another disk.
    if not os.path.isdir(root):
        raise FileNotFoundError(f"{root} is gone")
    os.makedirs(folder, exist_ok=True)
    own = os.path.join(folder, f".{base}.{secrets.token_hex(4)}.tmp")  # another job may write the same name
    with replacing(target, own) as temporary:
        yield temporary
