"""The errors that left the loop for the script, and which of them the script has caught.

Only what leaves the ``with`` block of a loop ends it, as in TensorFlow: after an error of a run that the script
catches, the loop goes on. The loop cannot see the ``except`` of the script. It sees that it is called again while the
error is not being handled any more.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from torchhooks.common.errors import add_note, brief, chain
from torchhooks.common.log import logger
from torchhooks.progress.loop_state import NO_OUTPUTS
from torchhooks.progress.training_state import TrainingState

# The beginnings of a note that names a hook, and of one that names a run.
_HOOK, _RUN = re.compile("torchhooks: in (?!run )"), re.compile("torchhooks: (in|after) run ")


class Place(NamedTuple):
    """Where an error was raised."""

    text: str
    """``"run 12, epoch 0, item 11"``."""
    counts: bool
    """Whether the run counts, because the error came after its step."""
    in_run: bool
    """Whether that was in a run, or else in a call between two runs."""


class _Failure(NamedTuple):
    """What is known of an error that left the loop. Not the error: it keeps the memory of each frame that it left."""

    text: str
    place: Place
    is_of_step: bool
    """Whether the step raised it, and no hook."""
    note: str | None
    """The note by which the error is recognized, this very string; ``None`` if its class refuses notes."""
    had_cause: bool
    """Whether a background thread had failed before."""


class CaughtErrors:
    """Tells errors that the script has caught from one that is still on its way out of the ``with`` block.

    Args:
        training: the state of the loop.
    """

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._last: _Failure | None = None  # the error that left last, until it is known to be caught
        self.count = 0
        """How many errors the script has caught."""

    def place(self, *, in_run: bool) -> Place:
        """Return where the loop is, before an error drops the run in progress, or else in a call between two runs."""
        state = self._training.loop_state
        context = state.context
        counts = not in_run or (state.outputs is not NO_OUTPUTS if context is None else context.counts)
        words = [f"run {state.runs + (not counts)}"]
        for word, number in (("epoch", self._training.epoch), ("item", self._training.batch)):
            words += [] if number is None else [f"{word} {number}"]
        return Place(", ".join(words), counts, in_run)

    def leaves(self, error: BaseException, place: Place, *, of_function: bool, had_cause: bool) -> bool:
        """Note that ``error`` leaves the loop, and add a note to it that says where it was raised.

        Return False if it has left a run, and now leaves the function of ``run_step_fn`` that made the run.

        Args:
            error: what the step, a hook or a function of ``run_step_fn`` raised.
            place: where.
            of_function: whether it comes out of a function of ``run_step_fn``.
            had_cause: whether a background thread had failed before.
        """
        state = self._training.loop_state
        if of_function and self._is_last(error):
            return False
        self._last_was_caught()
        of_hook = [note for note in _notes(error) if _HOOK.match(note)]
        note = of_hook[-1] if of_hook else f"torchhooks: {'after' if place.counts else 'in'} {place.text}"
        if not of_hook:
            _forget_earlier_run(error)
            add_note(error, note)
        kept = note if any(other is note for other in _notes(error)) else None
        is_of_step = not place.counts and not of_hook
        self._last = _Failure(brief(error), place, is_of_step, kept, had_cause)
        # A script that does not catch the error ends with it. A warning that end() was not called would add nothing
        # then.
        state.note_open(False)
        state.set_pending()  # the end of the next run, or of the item, calls look()
        return True

    def recovered(self, error: BaseException) -> None:
        """Note that the loop has recovered from ``error``, which a run has left to the function that made it."""
        if any(map(self._is_last, chain(error))):
            self._last = None
            self._training.loop_state.note_open(True)

    def look(self) -> None:
        """Note that the script has caught the last error, unless it is still on its way. The loop was called again."""
        if self._last is not None and self.on_its_way() is None:
            self._last_was_caught()

    def on_its_way(self) -> BaseException | None:
        """Return the error that is being handled, if it is the last one that left the loop, or came from it."""
        current = sys.exception()
        return current if any(map(self._is_last, chain(current))) else None

    def left_between_runs(self, error: BaseException) -> bool:
        """Return whether ``error`` is the last one that left the loop, and came from a call between two runs."""
        return self._last is not None and not self._last.place.in_run and self._is_last(error)

    def is_of_step(self, error: BaseException) -> bool:
        """Return whether ``error`` is the last one that left the loop, and the step raised it, not a hook."""
        return self._last is not None and self._last.is_of_step and self._is_last(error)

    def came_before_thread(self, error: BaseException) -> bool:
        """Return whether ``error`` had left the loop when no background thread had failed yet."""
        return self._last is not None and not self._last.had_cause and self._is_last(error)

    def close(self) -> None:
        """Log how many errors the script has caught, now that the loop closes."""
        if self.count:
            logger.warning(
                "the script caught %s, after which the loop went on",
                "one error" if self.count == 1 else f"{self.count} errors",
            )

    def _is_last(self, error: BaseException) -> bool:
        last = self._last
        if last is None:
            return False
        if last.note is None:
            return brief(error) == last.text
        return any(note is last.note for note in _notes(error))

    def _last_was_caught(self) -> None:
        state = self._training.loop_state
        failure, self._last = self._last, None
        if failure is None or state.failure is not None:
            return  # that of a loop that has failed is raised again by the next call
        self.count += 1
        state.note_open(True)
        if self.count == 1:
            counts = "counts" if failure.place.counts else "does not count"
            logger.warning(
                "in %s: %s. The run %s; the script caught the error and goes on. Further errors are only counted",
                *(failure.place.text, failure.text.splitlines()[0].rstrip("."), counts),
            )


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)  # which a script may have set to anything
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _forget_earlier_run(error: BaseException) -> None:
    """Remove the note of an earlier run from ``error``, which a script may raise many times."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note for note in notes if not (isinstance(note, str) and _RUN.match(note))]
