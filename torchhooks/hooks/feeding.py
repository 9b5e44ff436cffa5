"""Hooks that pass values to the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchhooks.common.text import shown
from torchhooks.lifecycle.hook import SessionRunArgs, SessionRunContext, StandardHook


class FeedFnHook(StandardHook):
    """Passes keyword arguments to the step in every run (``tf.train.FeedFnHook``).

    >>> data = iter(batches)
    >>> feed = FeedFnHook(lambda: {"inputs": next(data)})
    >>> with MonitoredLoop(step, model, optimizer, hooks=[feed]) as loop:
    ...     while not loop.should_stop():
    ...         loss = loop.run()
    >>> loop.global_step, loop.stop_reason
    (8, 'StopIteration')

    The hook cannot feed the body of ``with loop.step()``, which has no parameters.

    Args:
        feed_fn: called before each step; returns the keyword arguments, a mapping from parameter name to value. If it
            raises ``StopIteration``, for instance because the data is exhausted, the loop ends cleanly.

    Raises:
        TypeError: ``feed_fn`` is not callable; from the run, it returned something other than a mapping.
        FeedError: from the run, another hook or the caller of ``run`` passes one of the arguments too.
    """

    def __init__(self, feed_fn: Callable[[], Mapping[str, Any]]) -> None:
        if not callable(feed_fn):
            raise TypeError(
                f"feed_fn={shown(feed_fn)}: must be a function that returns a mapping, from parameter to value"
            )
        self._feed_fn = feed_fn

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(feed_dict=self._feed_fn())
