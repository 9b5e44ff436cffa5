"""Any saver: what a loop and its hooks need of one, which may be an object of the script."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from torchhooks.common.errors import Attempts
from torchhooks.progress.training_state import TrainingState

_Path = str | os.PathLike[str]

Refusal = Callable[[], str | None]
"""Returns why the state must not be saved, or ``None``."""

SessionT = TypeVar("SessionT", contravariant=True)
"""A session. The protocols below leave its class open, which is defined in a higher package."""


class SavesCheckpoints(Protocol[SessionT]):
    """What a CheckpointSaverHook needs of its saver. :class:`AnySaver` says what it may have besides."""

    def save(self, session: SessionT, path: str, global_step: int, /) -> str: ...


class RestoresCheckpoints(SavesCheckpoints[SessionT], Protocol[SessionT]):
    """What a loop with a ``checkpoint_dir`` needs of the saver of its scaffold."""

    def save(self, session: SessionT, path: _Path, global_step: int, /) -> str: ...
    def restore(self, session: SessionT, path: _Path, /) -> object: ...
    def restore_latest(self, session: SessionT, directory: _Path, /) -> str | None: ...


class AnySaver(Generic[SessionT]):
    """A saver that the script has given, with a default for each attribute that one of its own need not have.

    Args:
        given: a Saver, or an object with ``save``. Of the other attributes of a Saver it may have any.
    """

    def __init__(self, given: SavesCheckpoints[SessionT]) -> None:
        self._given: Any = given

    @property
    def async_save(self) -> bool:
        """Whether the saver writes in the background."""
        return bool(getattr(self._given, "async_save", False))

    @property
    def is_writing(self) -> bool:
        """Whether the saver still writes the checkpoint before."""
        return bool(getattr(self._given, "is_writing", False))

    def prepare(self, session: SessionT) -> bool:
        """Return whether a save in the background finds memory. If not, the saver begins to allocate it."""
        return not hasattr(self._given, "prepare") or bool(self._given.prepare(session))

    def save(
        self, session: SessionT, path: str, global_step: int, *, refusals: Iterable[Refusal], async_save: bool
    ) -> str:
        """Save, with those of the arguments that are needed: a saver of the script's own need not have them."""
        options: dict[str, object] = {"refusals": refusals} if refusals else {}
        if async_save:
            options["async_save"] = True
        saved: str = self._given.save(session, path, global_step, **options)
        return saved

    def mark_finished(self, session: SessionT, path: str, global_step: int) -> bool:
        """Have the checkpoint that was just saved say that the training run is finished; return whether it does."""
        if not hasattr(self._given, "mark_finished"):
            return False
        self._given.mark_finished(session, path, global_step)
        return True

    def wait(self) -> None:
        """Wait for a checkpoint that is being written."""
        if hasattr(self._given, "wait"):
            self._given.wait()

    def wait_for_all(self, session: SessionT) -> None:
        """Wait on every rank, and raise on all of them if one raised."""
        if hasattr(self._given, "wait_for_all"):
            self._given.wait_for_all(session)
        else:
            self.wait()

    def close(self) -> None:
        """Release what the saver has."""
        if hasattr(self._given, "close"):
            self._given.close()


def savers_of(training: TrainingState) -> list[AnySaver[Any]]:
    """Return each saver of a session once, even if several hooks use it."""
    return [*{id(saver): AnySaver(saver) for saver in training.savers}.values()]


def wait_for_savers(training: TrainingState) -> None:
    """Wait for what all savers of a session are writing on this rank.

    Raises:
        CheckpointError: a save in the background failed; several errors are raised as an ExceptionGroup.
    """
    attempt = Attempts(Exception)
    for saver in savers_of(training):
        attempt(saver.wait)
    attempt.raise_errors("several checkpoints were not written")
