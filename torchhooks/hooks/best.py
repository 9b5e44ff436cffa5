"""The hook that keeps the best states of a training."""

from __future__ import annotations

import math
import os
from typing import Any, Literal, NamedTuple

from torchhooks.checkpoint import Saver, scored_checkpoints
from torchhooks.coordinator import Coordinator
from torchhooks.errors import FetchError
from torchhooks.fetch import describe
from torchhooks.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, call_repr
from torchhooks.log import logger
from torchhooks.readback import to_host
from torchhooks.session import Session
from torchhooks.timer import Due, SecondOrStepTimer, count


class _Kept(NamedTuple):
    """What is in a place."""

    score: float
    step: int


class BestCheckpointHook(SessionRunHook):
    """Keeps the checkpoints of the states with the best values of a metric.

        BestCheckpointHook("run", lambda: evaluate(model, validation), save_steps=1000, mode="max", keep=3)

    ``save_steps=1000`` looks at the metric at 1000, 2000, 3000, and at a clean end. A state that is better than one of
    those kept takes its place, once it is whole; the first ``keep`` are kept in any case, NaN never, and of equal ones
    the first. ``best_checkpoint("run/best")`` is then the path of the best.

    A training that is resumed goes on from what is in the folder. What is kept there is a checkpoint like any other, so
    a training can be resumed from it too; but a loop restores from ``checkpoint_dir`` itself, whose own checkpoints are
    not touched and not counted. Let a CheckpointSaverHook stand in front, so that at the end it does not wait for the
    metric. As with that hook, nothing is saved from the run on in which a NanTensorHook sees NaN.

    The time that saving takes is not counted by a StepCounterHook; that of the metric is, unless it is spent inside
    ``with session.paused():``.

    Args:
        checkpoint_dir: the folder of the training's checkpoints; the best go into a folder of their own in it.
        metric: what to go by: any fetch of one number. It is evaluated only when it is looked at; on a GPU, that waits.
        save_secs: seconds from one look to the next, or
        save_steps: steps from one to the next.
        mode: whether the best is the greatest, ``"max"``, or the least, ``"min"``.
        keep: how many to keep.
        name: of the folder: ``checkpoint_dir/name/model.1.ckpt-3000``. Two hooks need two names. The number in front of
            ``ckpt`` is that of a place, from 1 to ``keep``, and not a rank.
        async_save: write behind the training, as ``Saver(async_save=True)`` does.

    Raises:
        ValueError: not exactly one period, or another ``mode``.
        TypeError: out of the run, if the metric is not one number.
    """

    saves_checkpoints = True
    """That hooks with a state belong in front of it."""

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
        self._request = SessionRunArgs(metric)

    def begin(self) -> None:
        self._timer.reset()
        self._due = False

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._saver.wait()
        self._kept: dict[str, _Kept] = {}
        for score, checkpoint in scored_checkpoints(self._folder):
            if checkpoint.prefix in self._places:
                self._put(checkpoint.prefix, _Kept(score, checkpoint.step))
        self._timer.update_last_triggered_step(session.global_step)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._due = self._timer.should_trigger_for_step(run_context.session.global_step + 1)
        return self._request if self._due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._due:
            self._timer.update_last_triggered_step(run_context.session.global_step)
            self._look_at(run_values.results, run_context.session)

    def end(self, session: Session) -> None:
        if session.global_step != self._timer.last_triggered_step():
            self._look_at_the_end(session)
        self._saver.wait()

    def teardown(self) -> None:
        self._saver.close()

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
        for place in self._places:
            if place not in self._kept:
                return place
        worst = min(reversed(self._kept), key=lambda place: self._kept[place].score)
        return worst if score > self._kept[worst].score else None

    def _put(self, place: str, kept: _Kept) -> None:
        self._kept.pop(place, None)  # so that they stay in the order in which they were written
        self._kept[place] = kept

    def __repr__(self) -> str:
        return call_repr(self, self._checkpoint_dir, self._metric, **self._arguments)
