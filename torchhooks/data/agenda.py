"""What waits to be done between two runs of one loop: calls of hooks, and an epoch that has ended.

TensorFlow's training state changes only inside ``session.run``. A PyTorch script changes it anywhere in the body of its
``for`` loop: it steps a scheduler, evaluates, draws random numbers. So a checkpoint that comes due in an item is saved
when the body is done with that item.

The agenda says what waits. :mod:`torchhooks.loop.boundaries` says when it is done, and in which order. Three things
that also wait are set by other threads and stand where these find them: ``LoopState.pending``, the triggers of
``Schedule``, and the values of ``Readback``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchhooks.common.errors import add_note


class ItemCall(NamedTuple):
    """A call that waits for the end of an item."""

    depth: int
    """How many ``until_stop`` loops were open: the call waits for the item of the innermost one."""
    call: Callable[[], object]
    """Returns ``False`` if it has left something to do for a call at a stop."""
    last: bool
    """Whether to make it after the others."""
    is_postponed: bool = False
    """Whether it waits for the item of the outer loop, because the inner loop ends with its own item."""


class Agenda:
    """What waits to be done between two runs of one loop.

    Args:
        depth: returns how many ``until_stop`` loops are open.
    """

    def __init__(self, depth: Callable[[], int] = lambda: 0) -> None:
        self.depth = depth
        self.run_calls: list[Callable[[], bool]] = []
        """The checks at the end of a run, until one returns True."""
        self.item_calls: dict[object, ItemCall] = {}
        """By who asked. A hook's latest call counts. Never another dict: ``until_stop`` holds this one."""
        self.stop_calls: dict[object, Callable[[], object]] = {}
        """By who asked, what to call where a stop is noticed."""
        self.epochs_ended: int | None = None
        """How many epochs have ended, if the hooks were not called yet for the end of the last one."""

    def after_run(self, check: Callable[[], bool]) -> None:
        """Call ``check()`` at the end of each run that has something to do there, until it returns True."""
        self.run_calls.append(check)

    def after_item(self, who: object, call: Callable[[], object], last: bool = False) -> None:
        """Make ``call()`` once the body is done with the current item; now, if there is none."""
        if depth := self.depth():
            self.item_calls[who] = ItemCall(depth, call, last)
        else:
            call()

    def waits(self, who: object) -> bool:
        """Return whether a call of ``who`` waits since an earlier run of the current item."""
        return who in self.item_calls and not self.item_calls[who].is_postponed

    def due_at(self, depth: int) -> list[object]:
        """Return who waits for an item at ``depth``, or of a loop inside of that one, in the order of the calls."""
        due = [who for who, call in self.item_calls.items() if call.depth >= depth]
        # sorted() keeps the order of equal ones, so the hooks are called in the order in which they have asked. Only a
        # saver that a process resumes from asks to be last, when the others have done what belongs to this item.
        return due if len(due) < 2 else sorted(due, key=lambda who: self.item_calls[who].last)

    def postpone(self, depth: int) -> None:
        """Have the calls that are due at ``depth`` wait for the item of the loop around it."""
        for who in self.due_at(depth):
            self.item_calls[who] = self.item_calls[who]._replace(depth=depth - 1, is_postponed=True)

    def make_item_calls(self, due: Iterable[object], done: list[object]) -> None:
        """Make the calls of those in ``due`` that still wait, and add to ``done`` who has nothing left for a stop."""
        for who in due:
            waiting = self.item_calls.pop(who, None)  # before the call, which may ask again, for the next item
            if waiting is not None and _call(who, waiting.call) is not False:
                done.append(who)  # at once: a later call may raise StopIteration, which is a stop

    def at_stop(self, who: object, call: Callable[[], object]) -> None:
        """Make ``call()`` where a stop is noticed."""
        self.stop_calls[who] = call

    def make_stop_calls(self, due: Iterable[object]) -> None:
        """Make the calls of those in ``due`` for a stop, in place of what waits for the item of an outer loop."""
        for who in due:
            self.item_calls.pop(who, None)  # the loop stops in this item
            _call(who, self.stop_calls[who])

    def end_epoch(self, ended: int) -> None:
        """Note that an epoch has ended, after which there are ``ended``: ``loop.epoch`` of that one is one less."""
        self.epochs_ended = ended

    def take_epoch(self) -> int | None:
        """Return how many epochs have ended, once; ``None`` if the hooks were called for the last of them."""
        ended, self.epochs_ended = self.epochs_ended, None
        return ended

    def clear(self) -> None:
        """Forget the calls of a session, which is closed. An epoch ends with the data, which continue."""
        # The calls refer to the closed session. In after_create_session, the hooks ask again with the next one.
        self.item_calls.clear()
        self.stop_calls.clear()


def _call(who: object, call: Callable[[], object]) -> object:
    try:
        return call()
    except BaseException as error:
        add_note(error, f"torchhooks: in a call of {who} between two items")
        raise
