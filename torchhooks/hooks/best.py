"""The hook that keeps the best states of a training run."""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from typing import ClassVar, Literal, NamedTuple

from torchhooks.checkpoints.saver import Saver, scored_checkpoints
from torchhooks.checkpoints.savers import AnySaver
from torchhooks.common.checks import folder, whole_number
from torchhooks.common.errors import FetchError
from torchhooks.common.log import logger
from torchhooks.common.text import kind_of
from torchhooks.common.timers import Due, GivenTimer, called_within, given_timer
from torchhooks.device.readback import to_host
from torchhooks.fetches.names import Fetch, Value, describe
from torchhooks.fetches.over_ranks import EvaluationResult
from torchhooks.hooks.saving import MemoryPreparation
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.evaluating import Undisturbed, undisturbed
from torchhooks.lifecycle.hook import (
    PeriodicHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunValues,
    loop_folder,
)
from torchhooks.lifecycle.session import Session
from torchhooks.ranks.ranks import Ranks

_PLACE = re.compile(r"model\.[1-9]\d*\.ckpt")


class _StoredBest(NamedTuple):
    score: float
    step: int


class BestCheckpointHook(PeriodicHook):
    """Keeps the checkpoints of the states with the best values of a metric.

    >>> accuracies = iter([0.7, 0.9, 0.8, 0.6])
    >>> evaluation = EvaluationHook(lambda: {"accuracy": next(accuracies)}, every_n_steps=2)
    >>> best = BestCheckpointHook("run", evaluation["accuracy"], save_steps=2, mode="max")
    >>> with MonitoredLoop(step, model, optimizer, hooks=[evaluation, best]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    evaluation at step 2: accuracy = 0.7
    evaluation['accuracy'] = 0.7: saving a checkpoint of step 2 into run/best
    evaluation at step 4: accuracy = 0.9
    evaluation['accuracy'] = 0.9: saving a checkpoint of step 4 into run/best
    evaluation at step 6: accuracy = 0.8
    evaluation at step 8: accuracy = 0.6
    >>> best_checkpoint("run/best")
    'run/best/model.1.ckpt-4'
    >>> Saver().restore(Session(model, optimizer), best_checkpoint("run/best"))  # the state of step 4

    ``save_steps=1000`` evaluates the metric at steps 1000, 2000 and 3000, also in a training run that was resumed, and
    at a clean end, unless a signal stopped the loop. Without a period, the hook compares the states that its
    EvaluationHook evaluates, and no others: the last one if that has ``at_end=True``. A better state replaces the worst
    that is kept, once it is on disk. :doc:`Load the best model </evaluation>` has the other rules.

    Args:
        checkpoint_dir: the folder of the training run's checkpoints; by default, the ``checkpoint_dir`` of the loop.
            The best ones go into a folder of their own in it.
        metric: any fetch of one number. It is evaluated only when it is due; on a GPU, the host waits for it.
        save_secs, save_steps, every_n_steps, every_n_secs, every_n_epochs, timer: when to evaluate; give exactly one,
            see :doc:`Choose a period </built-in-hooks>`. A result of an EvaluationHook needs none: the hook is due with
            the evaluation.
        mode: whether the greatest value is the best, ``"max"``, or the least, ``"min"``.
        keep: how many to keep.
        name: the name of their folder: ``checkpoint_dir/name/model.1.ckpt-3000``. Two hooks need two names.
        async_save: write in a background thread, as ``Saver(async_save=True)`` does. It is the state with this metric
            that is saved, so the first save waits for its memory if that is not pinned yet.

    Raises:
        ValueError: not exactly one period, another ``mode``, or a ``name`` outside of ``checkpoint_dir``; from
            ``begin``, another hook uses the same folder.
        TypeError: from the run, the metric is not one number.
        FetchError: from the run, the metric has no value.
        CheckpointError: from the run, a checkpoint cannot be written.
    """

    collective = True
    """All ranks decide together, and save together."""

    saves_checkpoints = True
    """Hooks with a state have to precede this one, so that checkpoints contain their state after the run."""

    _lock = threading.Lock()
    _in_use: ClassVar[weakref.WeakValueDictionary[str, BestCheckpointHook]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        metric: Fetch = ...,
        save_secs: float | None = None,
        save_steps: int | None = None,
        *,
        mode: Literal["max", "min"],
        keep: int = 1,
        name: str = "best",
        async_save: bool = False,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        if mode not in ("max", "min"):
            raise ValueError(
                f'mode={mode!r}: must be "max" or "min", for a metric whose greatest or least value is best'
            )
        timer = given_timer(
            timer, every_n_steps, every_n_secs, every_n_epochs, save_steps=save_steps, save_secs=save_secs
        )
        if metric is ...:
            raise TypeError("BestCheckpointHook has no metric: give it one, such as metric=evaluation['val_loss']")
        if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] in (".", ".."):
            raise ValueError(f"name={name!r}: must name a folder in checkpoint_dir, such as 'best'")
        self._has_folder, self._name = checkpoint_dir is not None, name
        if checkpoint_dir is not None:
            self._set_folder(os.fspath(folder(checkpoint_dir, "checkpoint_dir")))
        self._metric = metric
        self._evaluated = metric if isinstance(metric, EvaluationResult) else None
        if self._evaluated is not None and timer is None and save_secs is None and save_steps is None:
            timer = self._evaluated.timer
        elif self._evaluated is None and timer is None and save_secs is None and save_steps is None:
            raise ValueError(
                f"metric={describe(metric)}: give BestCheckpointHook a period too, such as every_n_steps=100. Only a "
                "value of an EvaluationHook has one of its own, as evaluation['val_loss'] does"
            )
        # Another state at the end of each process would make the best one depend on where the run was interrupted.
        follows = self._evaluated is not None and timer is self._evaluated.timer
        self.works_at_end = self._evaluated is None or not follows or self._evaluated.evaluates_at_end
        self._sign = 1 if mode == "max" else -1
        self.set_timer(timer, at_multiples=True, save_secs=save_secs, save_steps=save_steps)
        # A Saver keeps the newest checkpoint of each name. So each place is a name, and a better state is written under
        # the name of the worst, which the Saver then removes: there is never one too few.
        self._places = [f"model.{number}.ckpt" for number in range(1, whole_number(keep, "keep", 1) + 1)]
        self._is_async = async_save
        self._saver = Saver(max_to_keep=1, async_save=async_save)
        # Looking up a name disturbs nothing, and an EvaluationHook puts back what it disturbs.
        self.fetches = metric if isinstance(metric, str | EvaluationResult) else Undisturbed(metric)

    def _set_folder(self, checkpoint_dir: str) -> None:
        self._folder = os.path.join(checkpoint_dir, self._name)  # for messages
        # A script may change the current directory while it trains.
        self._resolved = os.path.abspath(self._folder)

    def attach_to_loop(self, ranks: Ranks, collective: bool, checkpoint_dir: str | None) -> None:
        super().attach_to_loop(ranks, collective, checkpoint_dir)
        if not self._has_folder:
            self._set_folder(loop_folder(self, checkpoint_dir))

    def begin(self) -> None:
        super().begin()
        self._has_warned = False
        # realpath(), because a link is another name of the same folder. The lock is for loops in several threads.
        folder = os.path.realpath(self._resolved)
        with self._lock:
            other = self._in_use.setdefault(folder, self)
        if other is not self:
            raise ValueError(
                f"{self!r}: {other!r} already keeps checkpoints in {self._folder}, and each would remove those of the "
                "other: give one of them another name=, or close the other's loop first"
            )

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        super().after_create_session(session, coord)
        self.trigger.fire(session.global_step)  # also after a recovery, a period begins here
        self._compared_at = session.global_step
        self._to_save: float | None = None
        # Before the folder is read: after a recovery, the thread may still be writing a checkpoint of the session
        # before. This saver is not in session.savers, for which the loop waits.
        self._saver.wait()
        self._preparation = MemoryPreparation(session, AnySaver(self._saver) if self._is_async else None)
        self._kept: dict[str, _StoredBest] = {}
        for score, checkpoint in scored_checkpoints(self._resolved):
            if _PLACE.fullmatch(checkpoint.prefix):
                self._put(checkpoint.prefix, _StoredBest(score, checkpoint.step))

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._save(run_context.session)  # the item has another run, whose step changes the state with this metric
        return super().before_run(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._preparation.after_run()

    def run_due(self, run_context: SessionRunContext, values: Value) -> None:
        session = run_context.session
        self._compared_at = session.global_step
        if self._check_evaluated(session.global_step):
            self._to_save = self._number(values)
            run_context.after_item(lambda: self._save(session))

    def end(self, session: Session) -> None:
        is_compared = session.global_step == self._compared_at or session.was_finished
        if self.works_at_end and not is_compared and not session.stopped_by_signal:
            self._evaluate_at_end(session)
        self._saver.wait_for_all(session)

    def teardown(self) -> None:
        try:
            self._saver.close()
        finally:
            with self._lock:
                for folder in [folder for folder, hook in self._in_use.items() if hook is self]:
                    del self._in_use[folder]

    def next_due(self) -> Due:
        due = self._preparation.called_too(super().next_due())
        return due if self._to_save is None else called_within(1, due)

    def _check_evaluated(self, step: int) -> bool:
        """Return whether the value of the metric belongs to ``step``; warn, once, if it is of an earlier evaluation."""
        latest = (step, None) if self._evaluated is None else self._evaluated.latest()
        if latest is not None and latest[0] == step:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%r is due at step %d, which the evaluation has not evaluated: that state is not compared. Leave out "
                "the period, and the hook is due with the evaluation",
                self,
                step,
            )
        return False

    def _evaluate_at_end(self, session: Session) -> None:
        before = undisturbed(session)
        try:
            value = session.run(self._metric if self._evaluated is None else self._evaluated.now, who=self)
        except FetchError as error:
            logger.warning("the last state, of step %d, is not compared with the best: %s", session.global_step, error)
        else:
            self._to_save = self._number(value)
        finally:
            before.put_back()
        self._save(session)

    def _save(self, session: Session) -> None:
        """Save the state of ``session`` if its metric waits for that, and is among the best."""
        metric, self._to_save = self._to_save, None
        if metric is None:
            return
        step = session.global_step
        # One decision for all ranks: their metrics and what they read of the folder may differ.
        metric, place = session.ranks.gather((metric, self._place(self._sign * metric, step)), "the best checkpoint")[0]
        if place is None:
            return
        score = self._sign * metric
        reason = next(filter(None, session.ranks.gather(session.why_no_checkpoint())), None)
        if reason is not None:
            logger.warning("no checkpoint of step %d: %s", step, reason)
            return
        logger.info(
            "%s = %g: saving a checkpoint of step %d into %s", describe(self._metric), metric, step, self._folder
        )
        with session.paused():
            self._saver.save(session, os.path.join(self._resolved, place), step, score=score)
        self._put(place, _StoredBest(score, step))

    def _number(self, value: Value) -> float:
        try:
            return float(to_host(value))  # waits for the device: the decision to save this state depends on it
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(
                f"{describe(self._metric)} is {kind_of(value)}: the metric of a BestCheckpointHook must be one number"
            ) from None

    def _place(self, score: float, step: int) -> str | None:
        """Return the place for a state of this score, ``None`` if it is not among the best."""
        # After a recovery steps are made again, and a state that is not better than before is kept already.
        if math.isnan(score) or any(step == kept.step and score <= kept.score for kept in self._kept.values()):
            return None
        if len(self._kept) < len(self._places):
            return next(place for place in self._places if place not in self._kept)
        # More checkpoints may be there than this hook keeps, if an earlier process kept more. A state counts if it is
        # among the best of as many as this hook keeps.
        best = sorted((kept.score for kept in self._kept.values()), reverse=True)
        if score <= best[len(self._places) - 1]:
            return None
        # min() returns the first of equal scores, so of these the one that was written last is replaced.
        return min(reversed(self._kept), key=lambda place: self._kept[place].score)

    def _put(self, place: str, kept: _StoredBest) -> None:
        self._kept.pop(place, None)  # keeps the dict in the order of writing
        self._kept[place] = kept
