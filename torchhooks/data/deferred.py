"""Calls that wait until the body of the ``for`` loop is done with the current item of ``until_stop``.

TensorFlow's training state changes only inside ``session.run``. A PyTorch script changes it anywhere in the body: it
steps a scheduler, evaluates, draws random numbers. So a checkpoint that comes due in an item is saved when the body is
done.
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
    """Returns ``False`` if it has left something to do for a call at a stop."""
    last: bool
    """Whether to make it after the others."""
    waits_on: bool = False
    """Whether it may already have been made, and waits for the item of the outer loop."""


class DeferredCalls:
    """The calls to make between two items of the ``until_stop`` loops of one monitored loop."""

    def __init__(self, depth: Callable[[], int] = lambda: 0) -> None:
        self.depth = depth
        """Returns how many ``until_stop`` loops are open."""
        self.waiting: dict[object, _Waiting] = {}
        """The calls, by who asked. A hook's latest one counts. Never another dict: ``until_stop`` holds this one."""
        self._at_stop: dict[object, Callable[[], object]] = {}
        self.epoch_end: Callable[[], object] | None = None
        """The call for an epoch that has ended, if it was not made yet."""

    def owe_epoch_end(self, call: Callable[[], object]) -> None:
        """Make ``call()`` in :meth:`make_owed_epoch_end`, because an epoch has ended.

        The way of an epoch's end: ``until_stop`` closes its cursor, :meth:`DataPosition.count_epoch` says whether that
        ends an epoch, the call is owed here, and ``until_stop`` has ``Runner.run_epoch_hooks`` call the hooks.

        If the body left it by ``break``, that is when the script next asks the loop for something, and at the latest
        when the next run begins: a generator that a ``break`` closes must not raise, Python would drop the exception.
        """
        self.epoch_end = call

    def make_owed_epoch_end(self) -> None:
        """Make the call for an epoch that has ended, if it was not made yet."""
        call, self.epoch_end = self.epoch_end, None  # a hook may come here again, as by evaluation.values
        if call is None:
            return
        try:
            call()
        except Exception as error:
            if type(error) is not StopIteration:
                self.epoch_end = call  # for the session that recovers from the error
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

    def due(self) -> list[object]:
        """Return whose waiting calls are due: not the calls that wait for an item in which another loop now begins."""
        return [who for who, waiting in self.waiting.items() if waiting.depth >= self.depth()]

    def wait_for_outer(self) -> None:
        """Let the calls that are due wait for the item of the outer loop."""
        depth = self.depth() - 1
        self.waiting.update({who: self.waiting[who]._replace(depth=depth, waits_on=True) for who in self.due()})

    def make_due(self) -> list[object]:
        """Make the waiting calls that are due.

        Returns:
            Who has nothing left to do at a stop in this item. A call that returns ``False`` has, such as a save that
            was skipped.
        """
        return self._make(self.due())

    def make_all(self) -> None:
        """Make all waiting calls."""
        self._make(list(self.waiting))

    def stop(self, done: Container[object] = ()) -> None:
        """Make the calls for a stop, except of those in ``done``, which :meth:`make_due` has just returned."""
        for who, call in self._at_stop.items():
            if who not in done:
                self.waiting.pop(who, None)  # for the outer item: the loop stops in this one
                make_call(who, call)

    def _make(self, asked: list[object]) -> list[object]:
        done: list[object] = []
        for who in sorted(asked, key=lambda who: self.waiting[who].last):  # a call may ask again, for the next item
            if who in self.waiting and make_call(who, self.waiting.pop(who).call) is not False:
                done.append(who)
        return done

    def clear(self) -> None:
        """Forget every call: their session is closed. An epoch ends with the data, which continue."""
        self.waiting.clear()
        self._at_stop.clear()


def make_call(who: object, call: Callable[[], object]) -> object:
    """Make ``call()`` for ``who``, which a note on an error names, and return what it returns."""
    try:
        return call()
    except BaseException as error:
        add_note(error, f"torchhooks: in a call of {who} between two items")
        raise
