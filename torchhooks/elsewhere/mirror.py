"""MirrorHook: keeps a copy of a training run elsewhere, from which another machine continues."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from torchhooks.common.checks import folder as checked_folder
from torchhooks.common.checks import seconds, whole_number
from torchhooks.common.errors import CheckpointError
from torchhooks.common.files import alone_at
from torchhooks.common.log import logger
from torchhooks.common.text import shortened, shown
from torchhooks.elsewhere.copy import Copy, is_within
from torchhooks.elsewhere.store import Secrets, Store, is_url
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import WritingHook
from torchhooks.lifecycle.session import Session

LOOK_SECS = 5.0
"""How often the thread looks for a new checkpoint."""
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 1.0, 60.0
_TRIES_AT_START = 4


class MirrorHook(WritingHook):
    """Keeps a copy of a training run's folder in a store such as S3, and continues from it on another machine.

    >>> hooks = [CheckpointSaverHook("run", save_steps=4), MirrorHook("run", "memory://bucket/run-17")]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 4 into run
    saving a checkpoint of step 8 into run
    >>> hooks = [CheckpointSaverHook("new", save_steps=4), MirrorHook("new", "memory://bucket/run-17")]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir="new") as loop:  # on an empty machine
    ...     loop.global_step
    model.ckpt-8 was copied from memory://bucket/run-17 into new
    restored step 8 from new/model.ckpt-8
    saving a checkpoint of step 8 into new
    8

    When the loop begins, and the copy has a newer checkpoint than the folder, the newest is downloaded, verified, and
    put into the folder, with the other files. While the loop trains, a thread uploads each new checkpoint, and what
    else has changed every ``every_n_secs``: event files, JSON lines, profiles, the best checkpoints. Training never
    waits for it. If uploads take longer than the time between two checkpoints, checkpoints are skipped. A checkpoint
    that was not uploaded completely is never used.

    A failed upload is tried again, with growing pauses, and a warning. When the loop ends, also by a signal or an
    error, it waits up to ``grace_secs`` until the newest state is in the copy. If it is not, an error line has the
    command that copies it.

    With several ranks, the chief uploads. Each rank whose folder lacks the newest checkpoint downloads it, so the
    folder can be on a shared file system or on the disk of each node.

    Args:
        folder: the folder of the training run. Give the same one to the loop and to the hook that saves.
        url: where the copy is, an address of fsspec: ``s3://bucket/run-17``, ``gs://...``, ``file:///mnt/...``. Install
            ``s3fs``, ``gcsfs`` or ``adlfs`` for S3, GCS or Azure. Give each training run an address of its own.
        every_n_secs: how often to upload files other than checkpoints, at most. They are uploaded as a whole.
        keep_remote: how many checkpoints of one name to keep in the copy; by default, as many as in the folder.
        grace_secs: how long the end of the loop waits for the copy.
        storage_options: options for fsspec, such as ``{"endpoint_url": ...}``. No line and no error has credentials.

    Raises:
        ImportError: fsspec, or the library for this kind of store, is not installed.
        ValueError: ``url`` is not an address, or a number is not valid; from the start of the loop, the copy would be
            in ``folder``, or around it.
        CheckpointError: from the start of the loop, the folder has no checkpoint and the copy cannot be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        url: str,
        *,
        every_n_secs: float = 60.0,
        keep_remote: int | None = None,
        grace_secs: float = 25.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        secrets = Secrets(str(url), storage_options)
        self._url, self._hide = secrets.url, secrets.hide
        assert self.created_with is not None  # of this call, for the repr and for the other ranks
        self.created_with.arguments.pop("storage_options", None)
        self.created_with.arguments["url"] = self._url
        self._given_folder = os.fspath(checked_folder(folder, "folder"))
        self._folder = os.path.abspath(self._given_folder)  # a script may change the current directory while it trains
        if not isinstance(url, str) or not is_url(url):
            raise ValueError(
                f"url={shown(self._url)}: must be an address, such as 's3://bucket/run-17' or 'file:///mnt/17'"
            )
        self._every_n_secs = seconds(every_n_secs, "every_n_secs")
        self._grace_secs = seconds(grace_secs, "grace_secs")
        keep = None if keep_remote is None else whole_number(keep_remote, "keep_remote", 1)
        self._is_closing = self._has_given_up = False
        self._wake = threading.Event()
        self._done = threading.Event()
        self.store = Store(url, storage_options)
        """The calls of the store. Tests replace it."""
        self._keep = keep
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._is_closing = self._has_given_up = False
        self._wake.clear()
        self._done.clear()
        self._thread = None
        self._failures = 0
        self._copy = Copy(self._folder, self.store, self._keep, lambda: self._is_closing)
        os.makedirs(self._folder, exist_ok=True)
        # One process of a node at a time. Without locks, each downloads on its own, under names that differ.
        with alone_at(os.path.join(self._folder, ".mirror.lock")):
            self._pull()

    def _pull(self) -> None:
        """Copy what the folder lacks from the store.

        Raises:
            CheckpointError: that is not possible, and the folder has no checkpoint to continue from.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                pulled = self._copy.pull()
                break
            except CheckpointError as error:
                reason = str(error)
                attempt = _TRIES_AT_START
            except Exception as error:
                reason = self._hide(f"{type(error).__name__}: {error}")
            if self._copy.has_checkpoint_here():
                message = "%s cannot be read (%s): the loop continues from %s, which may be older than the copy"
                logger.warning(message, self._url, reason, self._given_folder)
                return
            if attempt == _TRIES_AT_START:
                # Not from the error, whose text may have credentials.
                raise CheckpointError(
                    f"{self._url} cannot be read ({reason}), and {self._given_folder} has no checkpoint: make the copy "
                    "readable, or, to start over, give another address"
                ) from None
            time.sleep(FIRST_PAUSE_SECS * 2 ** (attempt - 1))
        for name in pulled:
            logger.info("%s was copied from %s into %s", name, self._url, self._given_folder)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if self.writes and self._thread is None:
            saved_to = session.checkpoint_dir
            if saved_to is not None and not is_within(saved_to, self._folder):
                message = "the checkpoints of this loop are in %s, of which %s is no copy: give MirrorHook that folder"
                logger.warning(message, saved_to, self._url)
            # A daemon: a store that does not answer must not keep the process from ending.
            self._thread = threading.Thread(target=self._push_on, name="torchhooks mirror", daemon=True)
            self._thread.start()

    def teardown(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_closing = True
        self._wake.set()
        if self._done.wait(self._grace_secs):
            thread.join()
            return
        self._has_given_up = True
        missing = self._copy.missing()
        if missing:
            logger.error(
                "%s is not complete after %g s, it lacks %s. This command copies it: python -m torchhooks mirror %s %s",
                *(self._url, self._grace_secs, shortened(missing), self._given_folder, self._url),
            )

    # -- the thread that uploads --------------------------------------------------------------------------------------

    def _push_on(self) -> None:
        logs_at = time.monotonic() + self._every_n_secs
        while not self._has_given_up:
            is_last = self._is_closing  # before the upload: what is written later needs another one
            with_logs = is_last or time.monotonic() >= logs_at
            if self._push(with_logs):
                if with_logs:
                    logs_at = time.monotonic() + self._every_n_secs
                if is_last:
                    self._done.set()
                    return
                self._wake.wait(LOOK_SECS)
            else:
                longest = FIRST_PAUSE_SECS if self._is_closing else LONGEST_PAUSE_SECS
                pause = min(longest, FIRST_PAUSE_SECS * 2 ** min(self._failures - 1, 10))
                if self._is_closing:
                    time.sleep(pause)
                else:
                    self._wake.wait(pause)

    def _push(self, with_logs: bool) -> bool:
        """Upload what is new; return whether nothing failed."""
        try:
            copied = self._copy.push(with_logs)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                reason = self._hide(f"{type(error).__name__}: {error}")
                logger.warning("%s cannot be written (%s): training goes on, and it is tried again", self._url, reason)
            return False
        if self._failures:
            self._failures = 0
            logger.info("%s can be written again%s", self._url, f", and has {copied[0]}" if copied else "")
        return True
