"""The copy of a training run's folder in a store: what is there, what is missing, and how it gets there and back.

A checkpoint ``model.ckpt-700``, the eighth that was written into its folder, is ``model.ckpt-700~8`` in the copy, so
that another one of the same step never overwrites it. Its manifest is written last and removed first: a folder without
one is no checkpoint. All other files have the names that they have in the folder. They are copied before the manifest,
so that a copy with a checkpoint has all points up to its step.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeVar

from torchhooks.checkpoints.files import Checkpoint, inspect
from torchhooks.checkpoints.manifest import NAME as MANIFEST
from torchhooks.checkpoints.manifest import damaged_file, has_manifest, read_manifest
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.common.log import logger
from torchhooks.elsewhere.store import Store
from torchhooks.lifecycle.run_record import NAME as RECORD

T = TypeVar("T")
_AT_ONCE = 64  # files in one call of the store, so that an error does not begin all of them again
_UNIT = re.compile(r".+~\d+")
# What the next process in this folder is asked for. Of a copy, it would come back after it was done.
_REQUEST = "nan.json"  # a request to the next process on this machine


class Unit(NamedTuple):
    """A checkpoint, here or in the copy: its path in the folder, its number there, and whether it is kept for good."""

    name: str
    order: int
    kept: bool

    @property
    def group(self) -> str:
        """The path without the step. Only the newest checkpoint of a group is needed to resume."""
        return self.name.rpartition("-")[0]

    @property
    def place(self) -> str:
        """The path in the copy."""
        return f"{self.name}~{self.order}"


class Copy:
    """Copies a folder to a store, and back. Only one thread at a time calls it.

    Args:
        folder: the folder of the training run.
        store: where its copy is.
        keep_remote: how many checkpoints of one name stay in the copy, at least as many as in the folder.
        is_closing: returns whether only the newest state counts, because the process is about to end.

    Raises:
        ValueError: the copy would be copied itself.
    """

    def __init__(
        self, folder: str, store: Store, keep_remote: int | None = None, is_closing: Callable[[], bool] = bool
    ) -> None:
        there = store.local_root
        if there is not None and (is_within(there, folder) or is_within(folder, there)):
            raise ValueError(
                f"{there}: the copy of {folder} cannot be in that folder, or around it: give another address"
            )
        self._folder = folder
        self.store = store
        self._keep = keep_remote or 0
        self._is_closing = is_closing
        self._began_ns = time.time_ns()
        self._units: dict[str, Unit] | None = None  # by place; those of the copy, once it was looked at
        self._sizes: dict[str, int] = {}  # of the other files there, when it was looked at
        self._partial: dict[str, list[str]] = {}  # by place, the files of checkpoints without a manifest
        self._has_pushed = False
        self._files: dict[str, list[str]] = {}  # by place, the files of the others
        self._copied: dict[str, tuple[int, int]] = {}  # by name, the stamp of each file when it was copied
        self._at_first: dict[str, int] = {}  # by group, how many there were

    # -- to the store -------------------------------------------------------------------------------------------------

    def push(self, with_logs: bool = True) -> list[str]:
        """Copy the newest checkpoint of each group, if it is not there, and what else changed.

        Return the names of the checkpoints that were copied. Those between the last and the newest are skipped.
        """
        if self._units is None:
            self.look()
        missing = self._missing_units()
        # An earlier process may have left parts of another checkpoint with the same name.
        self._remove_partial({unit.place for unit in missing} if self._has_pushed else ())
        self._has_pushed = True
        copied = []
        for unit in missing:
            if self._push_unit(unit):
                copied.append(unit.name)
                self._retire(unit.group)
        if with_logs:
            self._push_logs()
        return copied

    def missing(self) -> list[str]:
        """Return the names of what the copy lacks, checkpoints first."""
        return [unit.name for unit in self._missing_units()] + [name for name, _ in self._changed_logs()]

    def has_checkpoint_here(self) -> bool:
        """Return whether the folder itself has a checkpoint to continue from."""
        return any("/" not in unit.name for unit in self._here())

    def _missing_units(self) -> list[Unit]:
        """Return the checkpoints to copy: the newest of each group, and those that are kept for good."""
        there = {(unit.name, unit.order) for unit in list((self._units or {}).values())}
        here = sorted(self._here(), key=lambda unit: (os.path.dirname(unit.name), -unit.order))
        newest = {unit.group: unit for unit in reversed(here)}
        wanted = [unit for unit in here if unit is newest[unit.group] or (unit.kept and not self._is_closing())]
        return [unit for unit in wanted if (unit.name, unit.order) not in there]

    def _here(self) -> list[Unit]:
        return [_unit(name, inspected) for name, inspected in _checkpoints_in(self._folder)]

    def _push_unit(self, unit: Unit) -> bool:
        """Copy a checkpoint, and return whether it is whole: the saver may remove it, or write a newer one."""
        path = os.path.join(self._folder, unit.name)
        assert self._units is not None
        try:
            files = list(read_manifest(path)["files"])
            done = self._partial.setdefault(unit.place, [])
            for file in [file for file in files if file not in done]:
                self.store.put(os.path.join(path, file), f"{unit.place}/{file}")
                done.append(file)
                if self._is_closing() and unit not in self._missing_units():
                    return False  # there is a newer one, and little time
            self._push_logs()
            if inspect(path).order != unit.order:
                return False
            self.store.put(os.path.join(path, MANIFEST), f"{unit.place}/{MANIFEST}")
        except (FileNotFoundError, DamagedCheckpointError, ValueError):
            if has_manifest(path):
                raise
            return False
        self._units[unit.place], self._files[unit.place] = unit, self._partial.pop(unit.place)
        return True

    def _retire(self, group: str) -> None:
        """Remove the oldest checkpoints of ``group`` from the copy, now that a newer one is whole there."""
        assert self._units is not None
        here = {(unit.name, unit.order) for unit in self._here()}
        there = sorted((unit for unit in self._units.values() if unit.group == group), key=lambda unit: unit.order)
        present = sum(unit.group == group for unit in self._here())
        keep = max(self._keep, present, self._at_first.get(group, 0), 1)
        old = [unit for unit in there if not unit.kept][:-keep]
        for unit in old:
            if unit != there[-1] and (unit.name, unit.order) not in here:
                self.store.remove(f"{unit.place}/{MANIFEST}")
                del self._units[unit.place]
                self._partial[unit.place] = self._files.pop(unit.place)
        self._remove_partial([place for place in self._partial if place not in {unit.place for unit in old}])

    def _remove_partial(self, places: Collection[str]) -> None:
        """Remove the files of checkpoints that were not copied as a whole, other than those at ``places``."""
        for place in self._partial.keys() - places:
            while self._partial[place]:
                self.store.remove(f"{place}/{self._partial[place][-1]}")
                self._partial[place].pop()
            del self._partial[place]

    def _push_logs(self) -> None:
        for batch in _batches(self._changed_logs()):
            self.store.put_many([(os.path.join(self._folder, name), name) for name, _ in batch])
            self._copied.update(batch)

    def _changed_logs(self) -> list[tuple[str, tuple[int, int]]]:
        """Return the other files that have changed since they were copied, and the stamp of each."""
        changed = []
        for name in _logs_in(self._folder):
            with suppress(FileNotFoundError):
                status = os.stat(os.path.join(self._folder, name))
                stamp = status.st_size, status.st_mtime_ns
                is_same = self._sizes.get(name) == status.st_size and status.st_mtime_ns < self._began_ns
                if self._copied.get(name) != stamp and not (is_same and name not in self._copied):
                    changed.append((name, stamp))
        return changed

    # -- from the store -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Find out what is in the copy."""
        units: dict[str, Unit] = {}
        files: dict[str, list[str]] = {}
        sizes = {}
        for path, size in self.store.sizes().items():
            folder, _, file = path.rpartition("/")
            if _UNIT.fullmatch(folder):
                files.setdefault(folder, []).append(file)
            elif file != _REQUEST:
                sizes[path] = size
        places = [place for place in files if MANIFEST in files[place]]
        with tempfile.TemporaryDirectory() as temporary:
            folders = {place: os.path.join(temporary, str(number)) for number, place in enumerate(places)}
            for folder in folders.values():
                os.mkdir(folder)
            if folders:
                self.store.get_many([(f"{place}/{MANIFEST}", f"{folders[place]}/{MANIFEST}") for place in folders])
            for place, folder in folders.items():
                with suppress(ValueError, LookupError):  # cut short, in a store that writes files bit by bit
                    name, _, order = place.rpartition("~")
                    units[place] = Unit(name, int(order), read_manifest(folder)["kept"] is True)
                    files[place].remove(MANIFEST)
        self._units, self._sizes = units, sizes
        self._files = {place: files[place] for place in units}
        self._partial = {place: names for place, names in files.items() if place not in units}
        for unit in units.values():
            self._at_first[unit.group] = self._at_first.get(unit.group, 0) + (not unit.kept)

    def pull(self) -> list[str]:
        """Copy what the folder needs to resume from the store, if that is newer; return the checkpoints' names.

        The checkpoints come last. If the process is killed before, the next one does not take the folder for complete.

        Raises:
            CheckpointError: the copy has checkpoints, all of them are damaged, and the folder has none.
        """
        self.look()
        assert self._units is not None
        os.makedirs(self._folder, exist_ok=True)
        newest_here: dict[str, int] = {}
        for unit in self._here():
            newest_here[unit.group] = max(unit.order, newest_here.get(unit.group, 0))
        newer: dict[str, list[Unit]] = {}
        for unit in sorted(self._units.values(), key=lambda unit: -unit.order):
            if unit.order > newest_here.get(unit.group, 0):
                newer.setdefault(unit.group, []).append(unit)
        here = set(_logs_in(self._folder))
        # Those here end before the newer checkpoint, or have points that were made again elsewhere.
        self._pull_logs([name for name in self._sizes if newer or name not in here])
        pulled = []
        for group, units in newer.items():
            found = next((unit for unit in units if self._pull_unit(unit)), None)
            if found is not None:
                pulled.append(found.name)
            elif group not in newest_here and "/" not in group:
                raise CheckpointError(f"all checkpoints {group} in the copy are damaged; the log says how")
        return pulled

    def outline(self) -> None:
        """Make of the copy what its status is read from: no data of checkpoints, but empty files of the same sizes."""
        self.look()
        assert self._units is not None
        sizes = self.store.sizes()
        for unit in self._units.values():
            path = os.path.join(self._folder, unit.name)
            os.makedirs(path, exist_ok=True)
            for file in self._files[unit.place]:
                with open(os.path.join(path, file), "wb") as empty:
                    empty.truncate(sizes.get(f"{unit.place}/{file}", 0))
            self.store.get(f"{unit.place}/{MANIFEST}", os.path.join(path, MANIFEST))
        self._pull_logs(list(self._sizes))

    def _pull_unit(self, unit: Unit) -> bool:
        """Copy a checkpoint from the store, and return whether all of it is what was written."""
        target = os.path.join(self._folder, unit.name)
        # A Saver removes folders of such a name that a killed process has left.
        temporary = _aside(target)
        os.makedirs(temporary)
        try:
            for file in (*self._files[unit.place], MANIFEST):
                self.store.get(f"{unit.place}/{file}", os.path.join(temporary, os.path.basename(file)))
            manifest = read_manifest(temporary)
            damaged = damaged_file(temporary, manifest["files"])
            if damaged is not None or manifest["name"] != os.path.basename(unit.name):
                logger.warning("%s in the copy is damaged (%s): an older one is used", unit.name, damaged or MANIFEST)
                return False
            if os.path.lexists(target):  # of the same step, older, or damaged
                old = _aside(target)
                os.rename(target, old)
                shutil.rmtree(old, ignore_errors=True)
            os.rename(temporary, target)
        except (ValueError, LookupError, FileNotFoundError):
            logger.warning("%s in the copy lacks a file, or has a damaged manifest: an older one is used", unit.name)
            return False
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    def _pull_logs(self, names: list[str]) -> None:
        for batch in _batches(names):
            paths = {name: os.path.join(self._folder, *name.split("/")) for name in batch}
            pairs = [(name, f"{path}.{secrets.token_hex(8)}.tmp") for name, path in paths.items()]
            for path in paths.values():
                os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                self.store.get_many(pairs)
                for name, temporary in pairs:
                    os.replace(temporary, paths[name])
                    status = os.stat(paths[name])
                    self._copied[name] = status.st_size, status.st_mtime_ns
            finally:
                for _, temporary in pairs:
                    with suppress(OSError):
                        os.remove(temporary)


def is_within(path: str, folder: str) -> bool:
    """Return whether ``path`` is ``folder``, or in it."""
    folder = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(path), folder]) == folder


def _aside(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")


def _unit(name: str, checkpoint: Checkpoint) -> Unit:
    return Unit(name, checkpoint.order, checkpoint.kept)


def _checkpoints_in(folder: str) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the whole checkpoints in ``folder`` and the folders in it, with their relative paths."""
    for path, folders, _ in os.walk(folder):
        for name in [name for name in folders if has_manifest(os.path.join(path, name))]:
            folders.remove(name)
            with suppress(DamagedCheckpointError):
                checkpoint = inspect(os.path.join(path, name))
                yield _relative(checkpoint.path, folder), checkpoint
        folders[:] = [name for name in folders if name[0] != "."]


def _logs_in(folder: str) -> Iterator[str]:
    """Yield the relative paths of all other files, except for those that are being written."""
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and not has_manifest(os.path.join(path, name))]
        for name in files:
            is_private = name[0] == "." and name != RECORD
            if not is_private and not name.endswith(".tmp") and name != _REQUEST:
                yield _relative(os.path.join(path, name), folder)


def _relative(path: str, folder: str) -> str:
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _batches(items: list[T]) -> Iterator[list[T]]:
    return (items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE))
