"""The copy of a training run's folder: opened, restored from, and brought up to date, in this order.

In the folder, ``.mirror/`` has what belongs to this machine: the id of the training run, a lock, and the files of
checkpoints that are being copied.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from torchhooks.checkpoints.folder import MANIFEST, file_sums, has_checkpoints, has_manifest, inspect
from torchhooks.common.errors import CheckpointError, DamagedCheckpointError
from torchhooks.common.files import alone_at, replacing
from torchhooks.common.log import logger
from torchhooks.common.text import shortened
from torchhooks.tools.mirror.layout import (
    FORMAT,
    INDEX,
    MARKER,
    CopyContents,
    Marker,
    MirroredCheckpoint,
    entry_of,
    insist,
    is_copied,
    order_of,
    read_marker,
    series_of,
)
from torchhooks.tools.mirror.store import NotInStoreError, Store, StoreError
from torchhooks.tools.run_record import NAME as RECORD

LOOK_SECS = 5.0
"""How often to look for a new checkpoint."""
_RECENT_NS = 2_000_000_000  # a file that changes twice within this may have one time


class OtherJobError(Exception):
    """Another job has taken the copy over."""


class OverError(Exception):
    """The loop has ended while the store did not answer."""


class Copy:
    """Copies a folder to a store, and back. Only one thread at a time calls it, except for :meth:`missing`.

    Args:
        folder: the folder of the training run.
        store: where its copy is.
        count_to_keep: returns how many checkpoints to resume from stay in the copy, at least as many as in the folder.
    """

    def __init__(self, folder: str, store: Store, count_to_keep: Callable[[], int]) -> None:
        self._folder, self._store, self._count_to_keep = folder, store, count_to_keep
        self._own = os.path.join(folder, ".mirror")
        self._session = secrets.token_hex(8)
        self._run_id: str | None = None
        self.is_open = False
        self.deadline: float | None = None
        """When the process ends, once that is known. From then on, only the newest state counts."""
        self._contents = CopyContents(store, {})
        self._sizes: dict[str, int] = {}  # of all objects, when the copy was opened, and of other files put since
        self._folders: set[str] = set()  # that these objects are in
        self._index: dict[str, list[int]] = {}  # by name, size, time and checksum of a file
        self._saved_index = b""
        self._held: MirroredCheckpoint | None = None  # the checkpoint whose upload has begun
        self._sent: set[str] = set()  # its files that are in the copy
        self._compared: dict[str, tuple[int, ...]] = {}  # by name, the stamp of a file that is the same in the copy
        self._not_restored: set[str] = set()
        self._warned: set[str] = set()

    # -- open ---------------------------------------------------------------------------------------------------------

    def open(self, takes_over: bool = True) -> None:
        """Find out what is there. If this job ``takes_over``, the one that has written to the copy before must stop.

        Raises:
            CheckpointError: it is no copy of this training run, or there is no place for one.
            StoreError: the store does not answer.
        """
        url, there = self._store.url, self._store.local_root
        if there is not None and (is_within(there, self._folder) or is_within(self._folder, there)):
            raise CheckpointError(
                f"{there}: the copy of {self._folder} cannot be in that folder, or around it: give another address"
            )
        sizes = insist(self._store.list)  # before the marker, which another rank may be writing
        marker = insist(read_marker, self._store)
        if marker is None and sizes:
            raise CheckpointError(
                f"{url} has objects, such as {min(sizes)}, but no {MARKER}, so it is no copy of a training run: give "
                "an address where nothing else is"
            )
        there_id, here_id = None if marker is None else marker.run, self._read_own_id()
        if there_id is not None and there_id != here_id and has_checkpoints(self._folder):
            raise CheckpointError(
                f"{url} is the copy of another training run than {self._folder}: give each an address of its own, or "
                "an empty folder, to continue from the copy"
            )
        self._run_id = there_id or here_id
        if takes_over:
            if marker is None:
                logger.info("%s has nothing: a new copy begins there", url)
            try:
                self._store.make()
                self._write_marker()
            except NotInStoreError as error:
                raise CheckpointError(
                    f"{url} cannot be written ({error}): the bucket, or the folder above, does not exist"
                ) from None
        self._sizes = insist(self._store.list)  # after the marker: an older job commits nothing any more
        if takes_over and MARKER not in self._sizes:
            raise StoreError(f"the list of its objects lacks {MARKER}, which was just written")
        self._folders = {folder for name in self._sizes for folder in _folders_of(name)}
        self._contents = CopyContents(self._store, self._sizes)
        self._read_index()
        self.is_open = True

    def _write_marker(self) -> None:
        if self.is_over:
            raise OverError
        self._store.write(MARKER, Marker(self._run_id, self._session).encoded())

    def _check_session(self) -> None:
        """Raise an OtherJobError if another job has taken over, and a StoreError if that cannot be known."""
        try:
            marker = read_marker(self._store)
        except CheckpointError as error:  # one bad answer
            raise StoreError(str(error)) from None
        if marker is None:
            raise StoreError(f"its {MARKER} is gone")
        if marker.session != self._session:
            raise OtherJobError

    def _read_own_id(self) -> str | None:
        with suppress(OSError), open(os.path.join(self._own, "run-id"), encoding="utf-8") as file:
            return file.read()
        return None

    def _settle_run_id(self) -> None:
        """Have the folder and the marker name one training run, from its first checkpoint on."""
        run_id = self._run_id or secrets.token_hex(8)
        if self._read_own_id() != run_id:
            path = os.path.join(self._own, "run-id")
            with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
                file.write(run_id)
        if self._run_id is None:  # after the folder: a kill in between leaves an id that the marker then gets
            self._check_session()
            self._run_id = run_id
            self._write_marker()

    def _read_index(self) -> None:
        data = insist(self._store.read, INDEX)
        try:
            about = {"files": {}} if data is None else json.loads(data)
            self._index = {name: [int(a), int(b), int(c)] for name, (a, b, c) in about["files"].items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            logger.warning("%s has a damaged %s: all files but checkpoints are copied again", self._store.url, INDEX)
            self._index = {}

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(self) -> list[str]:
        """Copy what the folder needs to resume from the copy, if that is newer; return the checkpoints' names.

        The checkpoint to resume from gets its name last. If the process is killed before, the next one begins again.

        Raises:
            CheckpointError: there are checkpoints, none of them can be read, and the folder has none.
        """
        temporary = os.path.join(self._own, "restored")
        os.makedirs(self._own, exist_ok=True)
        # One process of a node at a time. Without locks, two of them download the same.
        with alone_at(os.path.join(self._own, "lock")):
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
            os.mkdir(temporary)
            try:
                return self._restore(temporary)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _restore(self, temporary: str) -> list[str]:
        here = {entry.series: entry for entry in sorted(self._here(), key=lambda entry: entry.age)}
        has_own = any(map(_is_own, here))
        places = sorted((*self._contents.whole, *self._contents.unreadable), key=self._contents.age, reverse=True)
        fetched: list[MirroredCheckpoint] = []
        # The loop's own first: without a newer one of them, the folder is ahead of the copy.
        for series in sorted({series_of(place) for place in places}, key=_is_own, reverse=True):
            if _is_own(series) or fetched or not has_own:
                alike = [place for place in places if series_of(place) == series]
                fetched += self._fetch_newest(alike, here.get(series), temporary)
        has_fetched = any(_is_own(entry.name) for entry in fetched)
        if has_own and not has_fetched:
            return []
        if any(map(_is_own, places)) and not has_fetched:
            raise CheckpointError(
                f"none of the checkpoints in {self._store.url} can be read; the log says why. Make one readable, or, "
                "to start over, give another address"
            )
        # Before the checkpoint: after a kill in between, the copy is still newer than the folder, so the next process
        # downloads the files again.
        self._restore_files(temporary, replaces=has_fetched)
        if fetched:
            # Before the checkpoints: open() takes a folder that has some, but not this id, for another training run.
            self._settle_run_id()
        for entry in sorted(fetched, key=lambda entry: (_is_own(entry.name), entry.age)):
            self._put_in_place(os.path.join(temporary, entry.place), entry.name)
        return [entry.name for entry in fetched]

    def _fetch_newest(
        self, places: list[str], here: MirroredCheckpoint | None, temporary: str
    ) -> list[MirroredCheckpoint]:
        """Download the newest checkpoint of ``places`` that can be read, if it is newer than the one ``here``."""
        for place in places:
            if here is not None and self._contents.age(place) <= here.age:
                break
            if place not in self._contents.unreadable:
                try:
                    self._fetch(self._contents.whole[place], os.path.join(temporary, place))
                    return [self._contents.whole[place]]
                except StoreError as error:
                    del self._contents.whole[place]  # so it replaces no older one, and is not removed
                    self._contents.unreadable[place] = str(error)
            why = self._contents.unreadable[place]
            logger.warning("%s in the copy cannot be read (%s): an older one is used", place, why)
        return []

    def _fetch(self, entry: MirroredCheckpoint, into: str) -> None:
        def fetch_file(file: str) -> None:
            self._store.get(f"{entry.place}/{file}", os.path.join(into, file))
            if file_sums(into, [file])[file] != entry.files[file]:
                raise StoreError(f"{file} is not what was written")

        os.makedirs(into)
        for file in entry.files:
            insist(fetch_file, file)
        # The manifest that open() has read, whose checksums were just compared, and not another answer of the store.
        with open(os.path.join(into, MANIFEST), "wb") as manifest:
            manifest.write(entry.manifest)

    def _restore_files(self, temporary: str, replaces: bool) -> None:
        """Download all other files; with a checkpoint, also in place of those here, which end before it."""
        path = os.path.join(temporary, "file")

        def fetch(name: str) -> None:
            self._store.get(name, path)
            if os.path.getsize(path) != self._sizes[name]:
                raise StoreError(f"{os.path.getsize(path)} bytes of {self._sizes[name]}")

        for name in self._sizes:
            if is_copied(name) and (replaces or not os.path.lexists(os.path.join(self._folder, name))):
                try:
                    insist(fetch, name)
                except StoreError as error:
                    self._not_restored.add(name)  # and so not overwritten by a new file without its contents
                    logger.warning("%s cannot be read from %s (%s): it stays there", name, self._store.url, error)
                    continue
                # The index is uploaded after the files. If a kill came in between, it has the time of older contents.
                size, modified, checksum = self._index.get(name, (0, 0, 0))
                if file_sums(temporary, ["file"])["file"] == (size, checksum):
                    with suppress(OSError, OverflowError):
                        os.utime(path, ns=(modified, modified))
                self._put_in_place(path, name)

    def _put_in_place(self, path: str, name: str) -> None:
        """Rename ``path`` to ``name`` in the folder. What is in its way there is older."""
        # The loop has ended while this thread waited for the store, and the script may use the folder otherwise now.
        if self.is_over:
            raise OverError
        target = self._folder
        *parents, base = name.split("/")
        for parent in parents:
            target = os.path.join(target, parent)
            if os.path.lexists(target) and not os.path.isdir(target):
                os.remove(target)
        os.makedirs(target, exist_ok=True)
        target = os.path.join(target, base)
        if os.path.lexists(target) and (os.path.isdir(target) or os.path.isdir(path)):
            # os.replace() replaces no folder that has files in it, and no file by a folder.
            os.rename(target, os.path.join(self._own, "restored", secrets.token_hex(4)))  # removed with that folder
        os.replace(path, target)

    # -- upload: checkpoints ------------------------------------------------------------------------------------------

    def push_checkpoints(self) -> list[str]:
        """Upload the checkpoints that the copy has to have; return the names of those that are whole there now.

        An upload that has begun is finished, and then the newest is next. So a store that is slower than the saves has
        a late copy, but has one.

        Raises:
            OtherJobError: another job has taken the copy over.
            StoreError: the store does not answer. The next call goes on.
        """
        copied, tried = [], set[str]()
        while not self.is_over and (entry := self._next_entry(tried)) is not None:
            tried.add(entry.place)
            try:
                if self._push(entry):
                    copied.append(entry.name)
            except OSError as error:
                self._held = None
                self._warn_once(entry.place, "%s cannot be read (%s): it is not copied", entry.name, error)
        return copied

    def _next_entry(self, tried: set[str]) -> MirroredCheckpoint | None:
        wanted = self._wanted()
        if self._held is not None and not self._is_superseded(self._held, wanted):
            return self._held
        return next((entry for entry in wanted if entry.place not in tried), None)

    def _wanted(self) -> list[MirroredCheckpoint]:
        """Return the checkpoints to upload: the newest of each series, the loop's own first; then the kept ones."""
        here = sorted(self._here(), key=lambda entry: entry.age)
        newest = {entry.series: entry for entry in here}.values()
        first = sorted(newest, key=lambda entry: (not _is_own(entry.name), -entry.order))
        wanted = {entry.place: entry for entry in (*first, *(entry for entry in reversed(here) if entry.kept))}
        return [entry for place, entry in wanted.items() if self._contents.whole.get(place) != entry]

    def _is_superseded(self, held: MirroredCheckpoint, wanted: list[MirroredCheckpoint]) -> bool:
        """Return whether there is no time to finish this upload, because the process ends and has a newer one."""
        is_newer = any(
            entry.series == held.series and entry.age > held.age and entry.files != held.files for entry in wanted
        )
        return self.deadline is not None and is_newer

    def _here(self) -> Iterator[MirroredCheckpoint]:
        """Yield the whole checkpoints in the folder, and in the folders in it."""
        for path, folders, _ in os.walk(self._folder):
            for name in [name for name in folders if has_manifest(os.path.join(path, name))]:
                folders.remove(name)
                place = os.path.join(path, name)
                with suppress(DamagedCheckpointError, OSError, ValueError):  # or the saver has just removed it
                    inspect(place)
                    with open(os.path.join(place, MANIFEST), "rb") as manifest:
                        entry = entry_of(os.path.relpath(place, self._folder).replace(os.sep, "/"), manifest.read())
                    yield entry._replace(place=self._contents.place_of(entry))
            # Not into .mirror, where the folder of files to upload has a manifest too.
            folders[:] = [name for name in folders if name[0] != "."]

    def _push(self, entry: MirroredCheckpoint) -> bool:
        """Upload a checkpoint, its manifest last, and return whether it is whole in the copy."""
        held = os.path.join(self._own, "held")
        if self._held != entry:
            self._held, self._sent = None, set()
            if not self._hold(entry, held):
                return False
            self._held = entry
        self._settle_run_id()
        if entry.place in self._contents.whole:
            self._sent.update(entry.files)  # only the manifest has changed: the training run is finished
        # _sent outlives a StoreError, so the next call goes on with the file that failed.
        for file in [file for file in entry.files if file not in self._sent]:
            self._store.put(os.path.join(held, file), f"{entry.place}/{file}", syncs=True)
            self._sent.add(file)
            if self.is_over or (self.deadline is not None and self._is_superseded(entry, self._wanted())):
                return False
        # A server may confirm an upload and not have it. So sizes are listed, and the manifest is read back.
        sizes, manifest = self._store.list(entry.place), f"{entry.place}/{MANIFEST}"
        if not entry.is_whole(sizes | {manifest: len(entry.manifest)}):
            self._sent.clear()
            raise StoreError(f"it does not have what was written to {entry.place}")
        # As late as possible: with the manifest the checkpoint counts, and a job that was replaced must not commit one.
        self._check_session()
        self._store.put(os.path.join(held, MANIFEST), manifest, syncs=True)
        if self._store.read(manifest) != entry.manifest:
            raise StoreError(f"it does not have what was written to {manifest}")
        self._contents.whole[entry.place] = entry
        self._contents.partial.discard(entry.place)
        self._contents.unreadable.pop(entry.place, None)
        self._held = None
        shutil.rmtree(held, ignore_errors=True)
        self._retire(entry)
        return True

    def _hold(self, entry: MirroredCheckpoint, held: str) -> bool:
        """Link the files of ``entry`` into the folder ``held``, which no saver removes; return whether that worked."""
        shutil.rmtree(held, ignore_errors=True)  # of a process that was killed
        os.makedirs(held)
        path = os.path.join(self._folder, entry.name)
        try:
            for file in (*entry.files, MANIFEST):
                _link(os.path.join(path, file), os.path.join(held, file))
        except FileNotFoundError:  # the saver has just removed it
            return False
        with open(os.path.join(held, MANIFEST), "rb") as manifest:
            return manifest.read() == entry.manifest  # or another one has got its name meanwhile

    def _retire(self, new: MirroredCheckpoint) -> None:
        """Remove older checkpoints than ``new``, which is whole, and what killed processes have left of some.

        That is for this training run's checkpoints whose manifests could be read, once as many newer ones as the folder
        keeps are whole in the copy. What cannot be read may be all there is.
        """
        here = [entry for entry in self._here() if entry.series == new.series and not entry.kept]
        newest_here = max((entry.order for entry in here), default=0)
        if newest_here > new.order + 1:
            self._warn_once(
                "late",
                "%s is late: %s is whole there %.0f s after it was saved, and %s has newer ones. The store is slower "
                "than the saves, so checkpoints in between are left out",
                *(self._store.url, new.name, time.time() - new.time, self._folder),
            )
        keep = max(len(here), self._count_to_keep() if _is_own(new.name) else 1)
        alike = [entry for entry in self._contents.whole.values() if entry.series == new.series and not entry.kept]
        # Only places of older checkpoints than the new one: another upload of a newer one may go on right now.
        left = [
            place for place in self._contents.partial if series_of(place) == new.series and order_of(place) < new.order
        ]
        if len(alike) <= keep and not left:
            return
        # What the store has now is counted, and not what it has confirmed, before anything is removed.
        sizes = self._store.list()
        whole = sorted((each for each in alike if each.is_whole(sizes)), key=lambda each: each.age, reverse=True)
        kept_here = {entry.place for entry in here}
        for old in whole[keep:]:
            if old.place not in kept_here:
                # The manifest first: after a kill, the files are of no checkpoint, and the next process removes them.
                self._store.remove(f"{old.place}/{MANIFEST}")
                del self._contents.whole[old.place]
                left.append(old.place)
                self._contents.partial.add(old.place)
        for place in left:
            # Another job may have completed this upload since its objects were listed.
            if self._store.read(f"{place}/{MANIFEST}") is None:
                for name in [name for name in sizes if name.startswith(f"{place}/")]:
                    self._store.remove(name)
            self._contents.partial.discard(place)

    # -- upload: other files ------------------------------------------------------------------------------------------

    def push_record(self) -> None:
        """Upload what the loop says of itself, for ``status``."""
        self._check_session()
        self._push_file(RECORD)

    def push_files(self, is_last: bool = False) -> list[str] | None:
        """Upload the other files that are not the same in the copy, one by one, and return those that failed.

        If it ``is_last``, look at what the store has, and not at what it has confirmed.

        Returns:
            ``None`` if a new checkpoint has to be copied first, or there is no time left.

        Raises:
            OtherJobError: another job has taken the copy over.
            StoreError: the store does not answer.
        """
        self._check_session()
        if is_last:
            self._sizes = self._store.list()
        looked, failed = time.monotonic(), []
        for name in self._files_here():
            if not self._push_file(name):
                failed.append(name)
            # A folder may have thousands of files, and neither a new checkpoint nor the end waits for all of them.
            if time.monotonic() - looked >= LOOK_SECS:
                if self.is_over or self._wanted():
                    self._write_index()
                    return None
                self._check_session()
                looked = time.monotonic()
        # After the files: a kill before this line costs another upload. An index that came first could name contents
        # which were never uploaded.
        self._write_index()
        return failed

    def _push_file(self, name: str) -> bool:
        path = os.path.join(self._folder, name)
        try:
            # Before the contents are read: a file that grows meanwhile has another stamp at the next look.
            stamp = _stamp(path)
            if self._compared.get(name) == stamp and self._sizes.get(name) == stamp[0]:
                return True
            size, checksum = file_sums(self._folder, [name])[name]
            if self._sizes.get(name) != size or self._index.get(name, [])[::2] != [size, checksum]:
                self._clear_way(name)
                self._store.put(path, name)
        except FileNotFoundError:  # removed meanwhile
            return True
        except (OSError, StoreError) as error:
            if isinstance(error, StoreError):
                self._check_session()  # fails too if it is not the file's fault
            self._warn_once(name, "%s is not copied (%s); it is tried again", name, error)
            return False
        self._sizes[name] = size
        if name != RECORD:  # which always changes
            self._index[name] = [size, stamp[1], checksum]
        if time.time_ns() - stamp[1] > _RECENT_NS:
            self._compared[name] = stamp
        return True

    def _clear_way(self, name: str) -> None:
        """Remove a file from the copy that is a folder now, and the files of a folder that is a file now."""
        # A store of objects takes both a and a/b. No folder on a disk has both, so they could not be restored.
        in_the_way = [folder for folder in _folders_of(name) if folder in self._sizes]
        if name in self._folders:
            in_the_way += [other for other in self._sizes if other.startswith(f"{name}/") and is_copied(other)]
        for other in in_the_way:
            self._store.remove(other)
            del self._sizes[other]
            self._index.pop(other, None)
        self._folders.update(_folders_of(name))

    def _write_index(self) -> None:
        about = {"format": FORMAT, "files": self._index}
        data = json.dumps(about).encode()
        if data != self._saved_index:
            self._store.write(INDEX, data)
            self._saved_index = data

    def _files_here(self) -> Iterator[str]:
        """Yield the paths of all regular files but those of checkpoints. Others are named once and left out."""
        folders, left_out = [""], []
        while folders:
            folder = folders.pop()
            for entry in self._entries_in(folder):
                name = f"{folder}/{entry.name}".lstrip("/")
                if not is_copied(name) or name in self._not_restored:
                    left_out += [name] if name in (MARKER, INDEX) else []
                elif entry.is_file(follow_symlinks=False):
                    yield name
                elif not entry.is_dir(follow_symlinks=False):
                    left_out.append(name)
                elif not has_manifest(entry.path):
                    folders.append(name)
        if left_out := [name for name in left_out if name not in self._warned]:
            self._warned.update(left_out)
            what = "not copied, because they are links or other special files, or have a name that the copy uses: %s"
            logger.warning(what, shortened(left_out))

    def _entries_in(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self._folder, folder)) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:  # removed meanwhile
            return []
        except OSError as error:
            self._warn_once(f"{folder}/", "%s/ is not copied (%s)", folder, error.strerror)
            return []

    # -- end ----------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the process ends without further copying."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def missing(self) -> list[str]:
        """Return the names of what the copy lacks, checkpoints first."""
        # The training thread calls this at the end, when the thread that copies may still hang in a call of the store.
        names = [entry.name for entry in self._wanted()]
        for name in self._files_here():
            with suppress(FileNotFoundError):
                size, modified, *_ = _stamp(os.path.join(self._folder, name))
                is_same = self._index.get(name, [])[:2] == [size, modified] and self._sizes.get(name) == size
                if not is_same and name != RECORD:
                    names.append(name)
        return names

    def _warn_once(self, about: str, message: str, *args: object) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(message, *args)


def is_within(path: str, folder: str) -> bool:
    """Return whether ``path`` is ``folder``, or in it."""
    folder = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(path), folder]) == folder


def _is_own(name: str) -> bool:
    """Return whether a checkpoint is one to resume from, in the folder itself, and not one of the best."""
    return "/" not in name


def _folders_of(name: str) -> list[str]:
    """Return the folders that a file is in: ``["a", "a/b"]`` of ``a/b/c``."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def _link(path: str, new_path: str) -> None:
    try:
        os.link(path, new_path)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(path, new_path)


def _stamp(path: str) -> tuple[int, ...]:
    """Return size and time of a file, and what else changes when it is written or replaced."""
    status = os.lstat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
