"""Calls that wait until the body of the ``for`` loop is done with the current item of ``until_stop``.

TensorFlow's training state changes only inside ``session.run``. A PyTorch script changes it anywhere in the body: it
steps a scheduler, evaluates, draws random numbers. So a checkpoint that comes due in an
item is taken when the body is done.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from torchhooks.common.errors import add_note


class _Waiting(NamedTuple):
    """A call that waits for the end of an item."""

    depth: int
    """The depth of the item."""
    call: Callable[[], object]
    last: bool
    """Whether to make it after the others."""
    waits_on: bool = False
    """Whether it may already have been made, and waits for the item of the outer loop."""


class Items:
    """The calls to make between two items of the ``until_stop`` loops of one monitored loop."""

    def __init__(self, depth: Callable[[], int] = int) -> None:
        self.depth = depth
        """Returns how many ``until_stop`` loops are open."""
        self.waiting: dict[object, _Waiting] = {}
        """The calls, by who asked. A hook's latest one counts."""
        self.before_run: list[Callable[[], object]] = []
        """The calls to make when the next run begins, if it has hooks."""
        self._at_stop: dict[object, Callable[[], object]] = {}
        self._epoch_end: Callable[[], object] | None = None

    def owe_epoch_end(self, call: Callable[[], object]) -> None:
        """Make ``call()`` in :meth:`end_epoch`: the body left an epoch by ``break``, which no code can notice then.

        A generator that a ``break`` closes must not raise: Python would drop the exception.
        """
        self._epoch_end = call
        self.before_run.append(self.end_epoch)  # if nothing makes the call before the next run

    def end_epoch(self) -> None:
        """Make the calls for the end of an epoch that the body left by ``break``, if they were not made yet."""
        call, self._epoch_end = self._epoch_end, None  # a hook may come here again, as by evaluation.values
        if call is None:
            return
        try:
            call()
        except Exception as error:
            if type(error) is not StopIteration:
                self._epoch_end = call  # for the session that recovers from the error
            raise

    def after_item(self, who: object, call: Callable[[], object], last: bool = False) -> None:
        """Make ``call()`` once the body is done with the current item; now, if there is none."""
        if depth := self.depth():
            self.waiting[who] = _Waiting(depth, call, last)
        else:
            call()

    def waits(self, who: object) -> bool:
        """Return whether a call of ``who`` waits since an earlier run of the current item."""
        return who in self.waiting and not self.waiting[who].waits_on

    def at_stop(self, who: object, call: Callable[[], object]) -> None:
        """Make ``call()`` at the item in which a stop is noticed."""
        self._at_stop[who] = call

    def begin_run(self) -> None:
        """Make the calls for the beginning of a run."""
        calls, self.before_run = self.before_run, []
        for call in calls:
            call()

    def due(self) -> list[object]:
        """Return whose waiting calls are due: not the calls that wait for an item in which another loop now begins."""
        return [who for who, waiting in self.waiting.items() if waiting.depth >= self.depth()]

    def wait_for_outer(self) -> None:
        """Let the calls that are due wait for the item of the outer loop."""
        depth = self.depth() - 1
        self.waiting |= {who: self.waiting[who]._replace(depth=depth, waits_on=True) for who in self.due()}

    def make_due(self) -> None:
        """Make the waiting calls that are due."""
        self._make(self.due())

    def finish(self) -> None:
        """Make all waiting calls."""
        self._make(list(self.waiting))

    def stop(self, made: Container[object] = ()) -> None:
        """Make the calls for a stop, except of those in ``made``, who have just been called."""
        for who, call in self._at_stop.items():
            if who not in made:
                self.waiting.pop(who, None)  # for the outer item: the loop stops in this one
                make_call(who, call)

    def _make(self, asked: list[object]) -> None:
        for who in sorted(asked, key=lambda who: self.waiting[who].last):  # a call may ask again, for the next item
            if who in self.waiting:
                make_call(who, self.waiting.pop(who).call)

    def clear(self) -> None:
        """Forget every call: their session is closed. An epoch ends with the data, which continue."""
        self.waiting.clear()
        self.before_run.clear()
        self._at_stop.clear()


def make_call(who: object, call: Callable[[], object]) -> None:
    """Make ``call()`` for ``who``, which a note on an error names."""
    try:
        call()
    except BaseException as error:
        add_note(error, f"torchhooks: in a call of {who} between two items")
        raise
