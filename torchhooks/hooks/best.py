"""The hook that keeps the best states of a training."""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from typing import Any, ClassVar, Literal, NamedTuple

from torchhooks.checkpoint import Saver, scored_checkpoints
from torchhooks.coordinator import Coordinator
from torchhooks.errors import FetchError
from torchhooks.fetch import ComposedFetch, describe, watched_names
from torchhooks.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.log import logger
from torchhooks.readback import to_host
from torchhooks.session import Session
from torchhooks.text import call_repr
from torchhooks.timer import Due, SecondOrStepTimer, count

_PLACE = re.compile(r"model\.[1-9]\d*\.ckpt")


class _Kept(NamedTuple):
    """What is in a place."""

    score: float
    step: int


class _IfDue(ComposedFetch):
    """The metric, evaluated only once the step has been counted and it is due: a run may count none."""

    session: Session

    def __init__(self, metric: Any, timer: SecondOrStepTimer) -> None:
        self.watched_names = watched_names(metric)
        self.evaluated = False
        self._metric = metric
        self._timer = timer

    @property
    def fetch(self) -> Any:
        self.evaluated = self._timer.should_trigger_for_step(self.session.global_step)
        return self._metric if self.evaluated else ()

    def compose(self, value: Any) -> Any:
        return value


class BestCheckpointHook(SessionRunHook):
    """Keeps the checkpoints of the states with the best values of a metric.

        BestCheckpointHook("run", lambda: evaluate(model, validation), save_steps=1000, mode="max", keep=3)

    ``save_steps=1000`` looks at the metric at 1000, 2000, 3000, and at a clean end. A state that is better than one of
    those kept takes its place, once it is whole; the first ``keep`` are kept in any case, NaN never, and of equal ones
    the first. ``best_checkpoint("run/best")`` is then the path of the best.

    A training that is resumed goes on from what is in the folder. With a smaller ``keep``, all that is there counts and
    stays: what is among the best ``keep`` of that takes the place of the worst. What is kept is a checkpoint like any
    other, so a training can be resumed from it too; but a loop restores from ``checkpoint_dir`` itself, whose own
    checkpoints are not touched and not counted. Let a CheckpointSaverHook stand in front, so that at the end it does
    not wait for the metric. As with that hook, nothing is saved from the run on in which a NanTensorHook sees NaN.

    The time that saving takes is not counted by a StepCounterHook; that of the metric is, unless it is spent inside
    ``with session.paused():``.

    Args:
        checkpoint_dir: the folder of the training's checkpoints; the best go into a folder of their own in it.
        metric: what to go by: any fetch of one number. It is evaluated only when it is looked at; on a GPU, that waits.
        save_secs: seconds from one look to the next, or
        save_steps: steps from one to the next.
        mode: whether the best is the greatest, ``"max"``, or the least, ``"min"``.
        keep: how many to keep.
        name: of the folder: ``checkpoint_dir/name/model.1.ckpt-3000``. Two hooks need two names, also in two loops of a
            process that are open at the same time. The number in front of ``ckpt`` is that of a place, from 1 to
            ``keep``, and not a rank.
        async_save: write behind the training, as ``Saver(async_save=True)`` does.

    Raises:
        ValueError: not exactly one period, or another ``mode``; out of ``begin``, if another hook keeps its best in the
            same folder.
        TypeError: out of the run, if the metric is not one number.
    """

    saves_checkpoints = True
    """That hooks with a state belong in front of it."""

    _lock = threading.Lock()
    _in_use: ClassVar[weakref.WeakValueDictionary[str, BestCheckpointHook]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        metric: Any,
        save_secs: float | None = None,
        save_steps: int | None = None,
        *,
        mode: Literal["max", "min"],
        keep: int = 1,
        name: str = "best",
        async_save: bool = False,
    ) -> None:
        if mode not in ("max", "min"):
            raise ValueError(
                f'mode={mode!r}: must be "max" or "min", for a metric of which the greatest or least is best'
            )
        self._arguments = {
            "save_secs": save_secs,
            "save_steps": save_steps,
            "mode": mode,
            "keep": count(keep, "keep"),
            "name": name,
            "async_save": async_save,
        }
        self._checkpoint_dir = os.fspath(checkpoint_dir)
        self._folder = os.path.join(self._checkpoint_dir, name)
        self._metric = metric
        self._sign = 1 if mode == "max" else -1
        self._timer = SecondOrStepTimer.named(save_secs=save_secs, save_steps=save_steps)
        # Of each name a saver keeps the newest: what is to replace another is written under the name of that.
        self._places = [f"model.{number}.ckpt" for number in range(1, keep + 1)]
        self._saver = Saver(max_to_keep=1, async_save=async_save)
        self._fetch = _IfDue(metric, self._timer)
        self._request = SessionRunArgs(self._fetch)

    def begin(self) -> None:
        self._timer.reset()
        folder = os.path.realpath(self._folder)
        with self._lock:
            other = self._in_use.setdefault(folder, self)
        if other is not self:
            raise ValueError(
                f"{self!r}: {other!r} keeps its best in {self._folder} already, and each would remove those of the "
                "other: give one of them another name=, or close the loop of that one first"
            )

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._fetch.session = session
        self._saver.wait()
        self._kept: dict[str, _Kept] = {}
        for score, checkpoint in scored_checkpoints(self._folder):
            if _PLACE.fullmatch(checkpoint.prefix):
                self._put(checkpoint.prefix, _Kept(score, checkpoint.step))
        self._timer.update_last_triggered_step(session.global_step)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._fetch.evaluated = False
        return self._request if self._timer.should_trigger_for_step(run_context.session.global_step + 1) else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._fetch.evaluated:
            self._timer.update_last_triggered_step(run_context.session.global_step)
            self._look_at(run_values.results, run_context.session)

    def end(self, session: Session) -> None:
        if session.global_step != self._timer.last_triggered_step():
            self._look_at_the_end(session)
        self._saver.wait()

    def teardown(self) -> None:
        try:
            self._saver.close()
        finally:
            with self._lock:
                for folder in [folder for folder, hook in self._in_use.items() if hook is self]:
                    del self._in_use[folder]

    def next_due(self) -> Due:
        return self._timer.next_due()

    def _look_at_the_end(self, session: Session) -> None:
        try:
            value = session.run(self._metric)
        except FetchError as error:
            logger.warning("the last state, of step %d, is not compared with the best: %s", session.global_step, error)
        else:
            self._look_at(value, session)

    def _look_at(self, value: Any, session: Session) -> None:
        """Save the state of ``session``, whose metric is ``value``, if it is among the best."""
        step = session.global_step
        metric = self._number(value)
        place = self._place(self._sign * metric, step)
        if place is None:
            return
        reason = session.why_no_checkpoint()
        if reason is not None:
            logger.warning("no checkpoint of step %d: %s", step, reason)
            return
        logger.info(
            "%s = %g: saving a checkpoint of step %d into %s", describe(self._metric), metric, step, self._folder
        )
        with session.paused():
            self._saver.save(session, os.path.join(self._folder, place), step, score=self._sign * metric)
        self._put(place, _Kept(self._sign * metric, step))

    def _number(self, value: Any) -> float:
        try:
            return float(to_host(value))  # waits for the device: whether to save this very state hangs on it
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{describe(self._metric)} is {value!r}: what BestCheckpointHook goes by must be one number"
            ) from error

    def _place(self, score: float, step: int) -> str | None:
        """Where to keep a state of this score; ``None`` if it is not among the best."""
        # A step is made again after a recovery. What is as good as before is then kept already.
        if math.isnan(score) or any(step == kept.step and score <= kept.score for kept in self._kept.values()):
            return None
        keep = len(self._places)
        if len(self._kept) < keep:
            return next(place for place in self._places if place not in self._kept)
        best = sorted((kept.score for kept in self._kept.values()), reverse=True)[:keep]
        if score <= best[-1]:
            return None
        return min(reversed(self._kept), key=lambda place: self._kept[place].score)

    def _put(self, place: str, kept: _Kept) -> None:
        self._kept.pop(place, None)  # so that they stay in the order in which they were written
        self._kept[place] = kept

    def __repr__(self) -> str:
        return call_repr(self, self._checkpoint_dir, self._metric, **self._arguments)
