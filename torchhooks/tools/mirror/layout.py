"""What the copy of a training run's folder consists of.

    mirror.json                     the marker: what makes this a copy, of which training run, and which job writes it
    files.json                      the index: size, time and checksum of each other file
    model.ckpt-700~8-1a2b3c4d/      the eighth checkpoint of its folder, with a checksum of its files
        state.pt
        manifest.json               written last and removed first: without it, this is no checkpoint
    curves.jsonl, best/...          everything else, by its name in the folder

So no checkpoint ever overwrites another one, also if both are of one step.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

from torchhooks.checkpoints.folder import MANIFEST, Files, decoded
from torchhooks.common.errors import CheckpointError
from torchhooks.tools.mirror.store import Store, StoreError

T = TypeVar("T")
MARKER, INDEX, FORMAT = "mirror.json", "files.json", 1
PAUSES_SECS = (1.0, 2.0, 4.0)
"""Between the tries of a call that a checkpoint depends on."""
_PLACE = re.compile(r"(?P<name>.+)~(?P<order>\d+)-[0-9a-f]{8}")
# Temporary files, locks, and the request for an autopsy are of use on one machine only.
_NOT_COPIED = re.compile(r"\.(?!run\.json$).*|.*\.(tmp|lock)|nan\.json")


class Marker(NamedTuple):
    """The contents of ``mirror.json``."""

    run: str | None
    """The id of the training run; ``None`` before its first checkpoint."""
    session: str
    """The id of the job that writes to the copy. The newest job wins."""

    def encoded(self) -> bytes:
        return json.dumps({"format": FORMAT, **self._asdict(), "time": time.time()}).encode()


def read_marker(store: Store) -> Marker | None:
    """Return the marker in ``store``, ``None`` if it has none.

    Raises:
        CheckpointError: it is none of this version of torchhooks.
        StoreError: the store does not answer.
    """
    data = store.read(MARKER)
    if data is None:
        return None
    try:
        about = json.loads(data)
        version, marker = about["format"], Marker(about["run"], about["session"])
    except (ValueError, LookupError, TypeError, RecursionError):
        begin = store.hide(repr(data[:40]))
        raise CheckpointError(f"{store.url} is no copy of a training run: its {MARKER} begins with {begin}") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{store.url} has format {version!r}, and this version of torchhooks knows {FORMAT}: use the version that "
            "made the copy, or another address"
        )
    return marker


class MirroredCheckpoint(NamedTuple):
    """A checkpoint, in the folder or in the copy."""

    name: str
    """Its path in the folder."""
    order: int
    time: float
    kept: bool
    files: Files
    manifest: bytes
    place: str
    """Its path in the copy. If only the manifest changes, the files stay where they are."""

    @property
    def series(self) -> str:
        """Its path without the step. A checkpoint makes older ones of its series superfluous."""
        return self.name.rpartition("-")[0]

    @property
    def step(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    @property
    def age(self) -> tuple[int, float]:
        """What a newer one has more of. The time decides only if two jobs have continued from one checkpoint."""
        return self.order, self.time

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """Return whether a copy whose objects have these ``sizes`` has all of it."""
        wanted = {file: size for file, (size, _) in self.files.items()} | {MANIFEST: len(self.manifest)}
        return all(sizes.get(f"{self.place}/{file}") == size for file, size in wanted.items())


def entry_of(name: str, manifest: bytes) -> MirroredCheckpoint:
    """Return the checkpoint with this path in the folder and this manifest; raise ValueError if that is damaged."""
    try:
        about = decoded(manifest)
        files = {file: (int(size), int(checksum)) for file, (size, checksum) in about["files"].items()}
        # A restore would write a file whose name has a folder in it outside of the checkpoint.
        if about["name"] != os.path.basename(name) or any(os.path.basename(file) != file for file in files):
            raise ValueError(f"it is of {about['name']!r}")
        order, time, kept = int(about["order"]), float(about["time"]), about["kept"] is True
        # Two jobs that continue from one checkpoint may save the same step with other contents. The checksum tells
        # them apart, so neither overwrites the other.
        place = f"{name}~{order}-{zlib.crc32(repr(sorted(files.items())).encode()):08x}"
        return MirroredCheckpoint(name, order, time, kept, files, manifest, place)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"its {MANIFEST} is damaged: {error}") from None


class CopyContents:
    """The checkpoints in a copy, of which ``sizes`` are the objects.

    Attributes:
        whole: by place, the checkpoints whose manifest was read and whose files are there.
        unreadable: by place, why a checkpoint with a manifest is not one of them.
        partial: the places without a manifest.
    """

    def __init__(self, store: Store, sizes: Mapping[str, int]) -> None:
        self.whole: dict[str, MirroredCheckpoint] = {}
        self.unreadable: dict[str, str] = {}
        folders = {name.rpartition("/")[0] for name in sizes}
        places = {place: match["name"] for place in folders if (match := _PLACE.fullmatch(place))}
        self.partial = {place for place in places if f"{place}/{MANIFEST}" not in sizes}

        def read(place: str) -> MirroredCheckpoint:
            try:
                return entry_of(places[place], insist(store.read, f"{place}/{MANIFEST}") or b"")
            except ValueError:  # once more: it may have been one bad answer
                return entry_of(places[place], insist(store.read, f"{place}/{MANIFEST}") or b"")

        for place in places.keys() - self.partial:
            try:
                entry = read(place)._replace(place=place)
                if not entry.is_whole(sizes):
                    raise ValueError("a file is missing, or has another size than was written")
                self.whole[place] = entry
            except (StoreError, ValueError) as error:
                self.unreadable[place] = str(error)

    def place_of(self, entry: MirroredCheckpoint) -> str:
        """Return the place in the copy where the files of ``entry`` are, or will be."""
        same = (each for each in self.whole.values() if (each.name, each.files) == (entry.name, entry.files))
        return next((each.place for each in same), entry.place)

    def age(self, place: str) -> tuple[int, float]:
        """Return :attr:`MirroredCheckpoint.age` of the checkpoint at ``place``, as far as it is known."""
        return self.whole[place].age if place in self.whole else (order_of(place), 0.0)


def order_of(place: str) -> int:
    match = _PLACE.fullmatch(place)
    return -1 if match is None else int(match["order"])


def series_of(place: str) -> str:
    return place.rpartition("~")[0].rpartition("-")[0]


def is_copied(name: str) -> bool:
    """Return whether ``name`` is, or would be, the copy of a file that belongs to no checkpoint."""
    folders = name.split("/")[:-1]
    is_private = any(map(_NOT_COPIED.fullmatch, name.split("/"))) or any(map(_PLACE.fullmatch, folders))
    return not is_private and name not in (MARKER, INDEX)


def insist(call: Callable[..., T], *args: object) -> T:
    """Return ``call(...)``. One failed request must not cost a checkpoint, so it is tried again."""
    for pause in PAUSES_SECS:
        with suppress(StoreError):
            return call(*args)
        time.sleep(pause)
    return call(*args)
