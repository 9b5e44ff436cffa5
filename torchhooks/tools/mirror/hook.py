"""MirrorHook: keeps a copy of a training run elsewhere, from which another machine continues."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchhooks.checkpoints.folder import has_checkpoints
from torchhooks.checkpoints.saver import Saver
from torchhooks.common.checks import folder as checked_folder
from torchhooks.common.checks import seconds, whole_number
from torchhooks.common.errors import CheckpointError
from torchhooks.common.log import logger
from torchhooks.common.text import shortened, shown
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import StandardHook, loop_folder
from torchhooks.lifecycle.session import Session
from torchhooks.progress.signals import received_signal
from torchhooks.ranks.ranks import Ranks
from torchhooks.tools.mirror import copy as copying
from torchhooks.tools.mirror.copy import Copy, OtherJobError, OverError, is_within
from torchhooks.tools.mirror.store import Secrets, Store, StoreError, is_url

RECORD_SECS = 30.0
"""How often to upload what the loop says of itself, whatever ``every_n_secs`` is."""
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 1.0, 60.0
_LINE_SECS = 10.0  # after which a line says what the start waits for
_POLL_SECS = 0.1


class MirrorHook(StandardHook):
    """Keeps a copy of a training run's folder in a store such as S3, and continues from it on another machine.

    >>> hooks = [CheckpointSaverHook(save_steps=6), MirrorHook(url="memory://bucket/run-17")]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    memory://bucket/run-17 has nothing: a new copy begins there
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 6 into run
    saving a checkpoint of step 8 into run
    >>> hooks = [CheckpointSaverHook(save_steps=6), MirrorHook(url="memory://bucket/run-17")]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir="new") as loop:  # on an empty machine
    ...     loop.global_step
    model.ckpt-8 was copied from memory://bucket/run-17 into new
    restored step 8 from new/model.ckpt-8
    8

    When the loop begins, and the copy has a newer checkpoint than the folder, it is downloaded, verified, and put into
    the folder, with the other files. While the loop trains, a thread uploads new checkpoints and changed files.
    Training never waits for it. :doc:`A copy elsewhere </elsewhere>` has the details.

    Args:
        folder: the folder of the training run; by default, the loop's ``checkpoint_dir``.
        url: where the copy is, an address of fsspec: ``s3://bucket/run-17``, ``gs://...``, ``file:///mnt/...``. Install
            ``s3fs``, ``gcsfs`` or ``adlfs`` for S3, GCS or Azure. Give each training run an address of its own.
        every_n_secs: how often to look for files other than checkpoints that have changed.
        keep_remote: how many checkpoints to keep in the copy; by default, as many as the ``Saver`` keeps.
        grace_secs: how long the end of the loop waits for the copy.
        storage_options: options for fsspec, such as ``{"endpoint_url": ...}``. Their values are never shown.

    Raises:
        ImportError: fsspec, or the library for this kind of store, is not installed.
        ValueError: ``url`` is not an address, or a number is not valid; from the loop, there is no ``folder``.
        CheckpointError: from the start of the loop, ``url`` has no copy of this training run and is not empty, there
            is no such bucket, or the folder has no checkpoint and the copy cannot be read.
    """

    brings_checkpoints = True
    leaves_machine = True  # python -m torchhooks check leaves such a hook out

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        url: str | None = None,
        *,
        every_n_secs: float = 60.0,
        keep_remote: int | None = None,
        grace_secs: float = 25.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        secrets = Secrets(str(url), storage_options)
        self._url = secrets.url
        assert self.created_with is not None  # for the repr and for the other ranks
        self.created_with.arguments.pop("storage_options", None)
        if "url" in self.created_with.arguments:
            self.created_with.arguments["url"] = self._url
        if folder is not None and is_url(os.fspath(folder)):
            raise ValueError("the first argument of MirrorHook is a folder of this machine: give MirrorHook(url=...)")
        if not isinstance(url, str) or not is_url(url):
            raise ValueError(f"url={shown(url)}: must be an address, such as 's3://bucket/run-17' or 'file:///mnt/17'")
        self._has_folder = folder is not None
        if folder is not None:
            self._set_folder(os.fspath(checked_folder(folder, "folder")))
        self._every_n_secs = seconds(every_n_secs, "every_n_secs")
        self._grace_secs = seconds(grace_secs, "grace_secs")
        self._keep_remote = 1 if keep_remote is None else whole_number(keep_remote, "keep_remote", 1)
        self._option_names = sorted(storage_options or ())
        self._store = Store(url, storage_options)
        self._thread: threading.Thread | None = None

    def __init_subclass__(cls, **options: object) -> None:
        # Not StandardHook's, which keeps what the constructor of a subclass is given: it may be a password.
        super(StandardHook, cls).__init_subclass__(**options)

    # -- in the training thread ---------------------------------------------------------------------------------------

    def attach_to_loop(self, ranks: Ranks, collective: bool, checkpoint_dir: str | None) -> None:
        super().attach_to_loop(ranks, collective, checkpoint_dir)
        if not self._has_folder:
            self._set_folder(loop_folder(self, checkpoint_dir))

    def _set_folder(self, folder: str) -> None:
        # The folder as it was given is for messages. A script may change the current directory while it trains.
        self._given_folder, self._folder = folder, os.path.abspath(folder)

    def begin(self) -> None:
        self._copy = Copy(self._folder, self._store, self._count_to_keep)
        self._session: Session | None = None
        self._failure: BaseException | None = None
        self._failures = 0
        self._restored, self._training, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._done = threading.Event()
        # A daemon: a store that does not answer must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="torchhooks mirror", daemon=True)
        self._thread.start()
        began, has_waited = time.monotonic(), False
        # The handler of the loop only notes a signal, so this wait looks for one. A store may not answer for hours.
        while not self._restored.wait(_POLL_SECS):
            received = received_signal()
            if received is not None:
                raise CheckpointError(f"{received} has ended the wait for {self._url}")
            if not has_waited and time.monotonic() - began >= _LINE_SECS:
                has_waited = True
                logger.info("still waiting for %s, since %g s", self._url, _LINE_SECS)
        if self._failure is not None:
            raise self._failure

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        saved_to = session.checkpoint_dir
        if self.writes and not self._training.is_set() and saved_to and not is_within(saved_to, self._folder):
            message = "the checkpoints of this loop are in %s, of which %s is no copy: give MirrorHook that folder"
            logger.warning(message, saved_to, self._url)
        self._session = session
        self._training.set()

    def teardown(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._copy.deadline = time.monotonic() + self._grace_secs
        self._closing.set()
        if not self._training.is_set():  # the loop has not begun: there is nothing new to copy
            # Before _training is set, for which the thread waits: it would upload for grace_secs otherwise.
            self._copy.deadline = time.monotonic()
            self._training.set()
        else:
            # The thread may also end because the time is over, an instant before this wait is.
            is_over = not self._done.wait(self._grace_secs) or self._copy.is_over
            if is_over and (missing := self._copy.missing()):
                logger.error(
                    "%s is not complete after %g s, it lacks %s. This command copies it: %s",
                    *(self._url, self._grace_secs, shortened(missing), self._command()),
                )
        # Not otherwise: the thread may hang in a call of the store for longer than grace_secs.
        if self._done.is_set():
            thread.join()

    def _command(self) -> str:
        """Return the command that completes the copy."""
        command = shlex.join(["python", "-m", "torchhooks", "mirror", self._given_folder, self._url])
        if not self._option_names:
            return command
        return f"{command} (configure fsspec for it with the storage options {shortened(self._option_names)})"

    # -- in the thread that copies ------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._restore()
        except BaseException as error:
            self._failure = error
        # Also after an error, which begin() raises in the training thread.
        self._restored.set()
        # The session's savers say how many checkpoints to keep. If the loop fails before it has a session,
        # nothing is uploaded.
        self._training.wait()
        if self._failure is None and self.writes:
            try:
                with suppress(OverError):
                    self._upload()
            except OtherJobError:
                logger.error("another job writes to %s: this one copies nothing to it any more", self._url)
            except CheckpointError as error:
                logger.error("nothing is copied: %s", error)
        self._done.set()

    def _restore(self) -> None:
        """Open the copy, and copy what the folder lacks from it.

        Raises:
            CheckpointError: that is not possible, and the folder has no checkpoint to continue from.
        """
        try:
            self._copy.open(takes_over=self.writes)
            names = self._copy.restore()
        except StoreError as error:
            if not has_checkpoints(self._folder):
                raise CheckpointError(
                    f"{self._url} cannot be read ({error}), and {self._given_folder} has no checkpoint: make the copy "
                    "readable, or, to start over, give another address"
                ) from None
            message = "%s cannot be read (%s): the loop continues from %s, which may be older than the copy"
            logger.warning(message, self._url, error, self._given_folder)
            return
        for name in names:
            logger.info("%s was copied from %s into %s", name, self._url, self._given_folder)

    def _upload(self) -> None:
        """Upload what is new, until the loop has closed and nothing is missing, or there is no time left."""
        self._files_at = self._record_at = time.monotonic()
        while not self._copy.is_over:
            is_last = self._closing.is_set()  # before the uploads: what is written later needs another round
            copied: list[str] = []
            is_complete, failure = False, None
            try:
                if not self._copy.is_open:  # the store did not answer at the start
                    self._copy.open()
                copied = self._copy.push_checkpoints()
            except (StoreError, OSError) as error:
                failure = error
            try:  # also if one checkpoint fails; curves up to the step of one that is whole
                if self._copy.is_open:
                    is_complete = self._push_files(at_once=bool(copied), is_last=is_last)
            except (StoreError, OSError) as error:
                failure = failure or error
            self._report(failure, copied)
            if is_last and is_complete and failure is None:
                return
            self._pause(failure)

    def _count_to_keep(self) -> int:
        """Return how many checkpoints the savers of the loop keep, or more."""
        savers = [] if self._session is None else self._session.savers
        used = savers[1:] or savers  # the session's own, which comes first, is used if no hook has another
        kept = (saver.max_to_keep or sys.maxsize for saver in used if isinstance(saver, Saver))
        return max(self._keep_remote, *kept, 1)

    def _push_files(self, at_once: bool, is_last: bool) -> bool:
        """Upload the other files if they are due; return whether the copy has all of them."""
        failed: list[str] | None = None
        if at_once or is_last or time.monotonic() >= self._files_at:
            failed = self._copy.push_files(is_last)
            if failed is not None:  # or else a new checkpoint comes first
                self._files_at = time.monotonic() + self._every_n_secs
                # push_files() has uploaded the record with the other files.
                self._record_at = time.monotonic() + RECORD_SECS
        elif time.monotonic() >= self._record_at:
            self._copy.push_record()
            self._record_at = time.monotonic() + RECORD_SECS
        return failed == []

    def _report(self, failure: Exception | None, copied: list[str]) -> None:
        if failure is not None:
            self._failures += 1
            if self._failures == 1:
                message = "%s cannot be written (%s): training goes on, and it is tried again"
                logger.warning(message, self._url, failure)
        elif self._failures:
            self._failures = 0
            logger.info("%s can be written again%s", self._url, f", and has {copied[0]}" if copied else "")

    def _pause(self, failure: Exception | None) -> None:
        if self._closing.is_set():
            # A wait for _closing, which is set, would be no pause.
            time.sleep(FIRST_PAUSE_SECS)
        elif failure is None:
            self._closing.wait(copying.LOOK_SECS)
        else:
            self._closing.wait(min(LONGEST_PAUSE_SECS, FIRST_PAUSE_SECS * 2 ** min(self._failures - 1, 10)))
