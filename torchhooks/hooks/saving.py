"""Hooks that save summaries and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from torchhooks.checkpoints.changes import StateMark
from torchhooks.checkpoints.files import is_checkpoint_name
from torchhooks.checkpoints.state import unreduced
from torchhooks.common.checks import folder
from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.common.stateful import Stateful
from torchhooks.common.text import shortened, shown
from torchhooks.common.timers import NEVER, Due, GivenTimer, differs_by_rank, due_now, given_timer, hook_timer
from torchhooks.fetches.fetch import describe
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.evaluating import IfDue
from torchhooks.lifecycle.hook import ReportingHook, SessionRunArgs, SessionRunContext, SessionRunValues, WritingHook
from torchhooks.lifecycle.session import Refusal, Scaffold, Session
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import WriterTarget


class SummarySaverHook(ReportingHook):
    """Writes curves, histograms, images, text and figures periodically (``tf.train.SummarySaverHook``).

    >>> curves = {"loss": "loss", "weights": summary.histogram("weights", "weight")}
    >>> tensorboard = SummarySaverHook(save_steps=4, output_dir="run", summary_op=curves)
    >>> json = SummarySaverHook(
    ...     save_steps=4, summary_writer=JsonLinesWriter("run/curves.jsonl"), summary_op={"loss": "loss", "lr": "lr"}
    ... )
    >>> with MonitoredLoop(step, model, optimizer, hooks=[tensorboard, json]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    >>> with open("run/curves.jsonl") as file:
    ...     print(file.read())
    {"step": 1, "time": ..., "loss": ..., "lr": 0.1}
    {"step": 5, "time": ..., "loss": ..., "lr": 0.1}
    <BLANKLINE>

    ``save_steps=8`` writes at steps 1, 9 and 17. The first run also writes ``SessionLog.START``, which tells
    TensorBoard to discard what an earlier process wrote beyond the restored step. If the writer has
    ``purge_from(step)``, as :class:`torchhooks.JsonLinesWriter` has, that is called instead, also after a recovery, and
    the points that it removes are written again.

    On a GPU, the host does not wait for the values, and a point is written a few runs later, with the step and the time
    of its run.

    With several ranks, every rank evaluates the fetches in the same runs, and the chief writes.
    ``{"loss": over_ranks("loss", "mean")}`` writes the mean of all ranks instead of the chief's value.

    Args:
        save_steps, save_secs, every_n_steps, every_n_secs, every_n_epochs, timer: when to write; give exactly one, see
            :doc:`Choose a period </built-in-hooks>`.
        output_dir, summary_writer: where to write; see :doc:`Write curves </built-in-hooks>`.
        scaffold: the scaffold whose ``summary_op`` is written.
        summary_op: what to write: a mapping of tags to fetches, :func:`torchhooks.summary.histogram` and its siblings,
            or a list of these; give exactly one of it and ``scaffold``.
        step: what is on the x axis: a fetch of a whole number, such as ``"epoch"`` or a number of environment steps.

    Raises:
        ValueError: not exactly one period, not exactly one of ``scaffold`` and ``summary_op``, or both ``output_dir``
            and ``summary_writer``; from the run, the value of a curve has several elements.
        TypeError: from ``begin``, the writer cannot write a summary of this kind, such as a histogram; from the run,
            the value of a curve is not a real number.
        FetchError: from the run, a fetch has no value.

    Unlike TensorFlow, which relies on the step it saw last, the hook decides on ``session.global_step + 1`` whether a
    run is due.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: Any = None,
        summary_writer: Any = None,
        scaffold: Scaffold | None = None,
        summary_op: Any = None,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
        step: Any = "global_step",
    ) -> None:
        self._x = step
        timer = given_timer(timer, every_n_steps, every_n_secs, every_n_epochs)
        self._timer = hook_timer(self, timer, save_steps=save_steps, save_secs=save_secs)
        self._target = WriterTarget(output_dir, summary_writer, starts_session=True)
        if (scaffold is None) == (summary_op is None):
            raise ValueError(
                f"scaffold={scaffold!r}, summary_op={summary_op!r}: give SummarySaverHook exactly one of them, such as "
                'summary_op={"loss": "loss"}'
            )
        self._has_place = output_dir is not None or summary_writer is not None
        self.collective = save_secs is not None or differs_by_rank(timer)
        self._decides_after_step = timer is not None
        self._scaffold = scaffold
        self._ops = summary.summary_ops(summary_op) if scaffold is None else ()

    def begin(self) -> None:
        self._timer.reset()
        self._due = False
        if self._scaffold is not None and self._scaffold.summary_op is not None:
            self._ops = summary.summary_ops(self._scaffold.summary_op)
        writer = self._target.open() if self.writes else None
        self._takes_counts = summary.takes_counts(writer)
        if writer is None and self.writes:
            logger.warning("%r has neither output_dir nor summary_writer: it writes nothing", self)
        elif writer is not None:
            summary.check_writer(writer, self._ops)
            self._target.claim((op.tag for op in self._ops), self)  # an EvaluationHook warns of the same tag

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if not self.alone and not any(self is hook for hook in session.ranks.hooks_of_some):
            # Every rank has to request the same, because of DTensors, and only the chief has opened the writer.
            self._has_place, self._takes_counts = session.ranks.gather(
                (self._has_place, self._takes_counts), "the writer of a hook"
            )[0]
        about = {"is_shared": not self.alone, "is_written": self.writes}
        ops = summary.counted(self._ops, **about) if self._takes_counts else self._ops
        fetches = ops if self._x == "global_step" else (ops, self._x)
        # With save_steps or save_secs, the hook has TensorFlow's rule, which decides before the step.
        self._due_ops = IfDue(fetches, self._timer) if self._decides_after_step else None
        self._request = SessionRunArgs(fetches if self._due_ops is None else self._due_ops)
        last_step = self._timer.last_triggered_step()
        if self._target.session_created(session.global_step, last_step, session.metadata):
            self._timer.reset()
        self._timer.start_at(session.global_step)
        if self._due_ops is not None:
            self._due_ops.session = session

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._step_before = run_context.session.global_step
        self._due = self._timer.should_trigger_for_step(self._step_before + 1)
        return self._request if self._due and self._has_place else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not self._has_place:
            return
        session = run_context.session
        step = session.global_step
        self._target.start_session(session.begun_at, step)
        if not self._due or (self._due_ops is not None and not self._due_ops.evaluated):
            return
        is_same = step == self._timer.last_triggered_step() or 0 < step == self._step_before == session.begun_at
        if is_same and not run_context.ends_epoch:
            run_context.not_reported()
            return  # no step was made since the last point, in this process or before a restore
        self._timer.update_last_triggered_step(step)
        if self.writes:
            run_context.when_ready(run_values.results, partial(self._write, step, time.time()))

    def _write(self, step: int, now: float, values: Any) -> None:
        if self._x != "global_step":
            values, given = values
            step = self._whole(given)
        summary.write_summaries(self._target.writer, values, step, now)

    def _whole(self, given: Any) -> int:
        """Return the place on the x axis, which has to be a whole number."""
        try:
            if float(given) == int(given) >= 0:
                return int(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
        raise TypeError(
            f"{describe(self._x)} is {shown(given)}: the step of a SummarySaverHook, which is what is on the x axis, "
            "must be a whole number, 0 or more"
        )

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        if not self._has_place:
            return NEVER
        # A START that is written later would void the points that other hooks write to the same place before it.
        return self._timer.next_due() if self._target.start_is_written or not self.writes else due_now(self._timer)


class CheckpointSaverListener:
    """Base class of what a CheckpointSaverHook calls around each checkpoint (``tf.train.CheckpointSaverListener``).

    >>> class Announce(CheckpointSaverListener):
    ...     def after_save(self, session, step):
    ...         print("the newest checkpoint is", latest_checkpoint("run"))
    >>> saver = CheckpointSaverHook("run", save_steps=8, listeners=[Announce()])
    >>> with MonitoredLoop(step, model, optimizer, hooks=[saver], checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    saving a checkpoint of step 0 into run
    the newest checkpoint is run/model.ckpt-0
    saving a checkpoint of step 8 into run
    the newest checkpoint is run/model.ckpt-8

    Every method is a no-op here. With several ranks, the methods are called on every rank. An exception from a method
    propagates as one of the hook.
    """

    def begin(self) -> None:
        """Called in the hook's ``begin``."""

    def before_save(self, session: Session, step: int) -> None:
        """Called before the checkpoint of ``step`` is written."""

    def after_save(self, session: Session, step: int) -> bool | None:
        """Called after the checkpoint of ``step`` was written, or, by a Saver with ``async_save``, handed over.

        Return true to stop the loop. This is ignored when the session is created and when the loop ends.
        """
        return None

    def end(self, session: Session, step: int) -> None:
        """Called in the hook's ``end``, after the last checkpoint was written."""


def _checked_listeners(listeners: Any) -> tuple[CheckpointSaverListener, ...]:
    given = tuple(listeners or ()) if isinstance(listeners, Iterable) or not listeners else (listeners,)
    if given == (listeners,) or any(isinstance(one, type) or not hasattr(one, "after_save") for one in given):
        raise TypeError(f"listeners={shown(listeners)}: give a list of instances of CheckpointSaverListener")
    return given


class CheckpointSaverHook(WritingHook):
    """Saves checkpoints periodically (``tf.train.CheckpointSaverHook``).

    >>> saver = CheckpointSaverHook("run", save_steps=4)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[saver], checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 4 into run
    saving a checkpoint of step 8 into run

    A later loop with the same ``checkpoint_dir`` continues from the newest one, in this process or in another:

    >>> with MonitoredLoop(step, model, optimizer, checkpoint_dir="run") as loop:
    ...     loop.global_step
    restored step 8 from run/model.ckpt-8
    8

    ``save_steps=4`` saves at steps 0, 4 and 8, and at a clean end, unless that step was just saved. A session that was
    restored is saved again when it is created. A StepCounterHook does not count the time that saving takes.

    In a loop driven by ``until_stop``, the hook saves when the body of the ``for`` is done with the item in which a
    checkpoint came due, and at the item in which a stop is noticed. After the last item of an inner loop, it saves
    when the item of the outer loop is done, if the loop can know that it was the last one. If a whole period passes
    within one item, it saves in the middle of it too. Otherwise, as in TensorFlow, it saves at its place in the list
    of hooks, after flushing the writers of curves. Place it after the hooks that use them: a point of the same step
    that is written after the save is lost if the process is then killed.

    Args:
        checkpoint_dir: the folder. Give the same one to the loop, which restores from it.
        save_secs, save_steps, every_n_steps, every_n_secs, every_n_epochs, timer: when to save; give exactly one, see
            :doc:`Choose a period </built-in-hooks>`.
        saver: what writes the checkpoints, such as ``Saver(max_to_keep=10)``; see :class:`torchhooks.Saver`.
        checkpoint_basename: the name of a checkpoint without its step, as in ``model.ckpt-700``.
        scaffold: the scaffold whose saver writes them. If it has none, or without ``saver`` and ``scaffold``,
            ``session.saver`` does.
        listeners: called for every checkpoint, all of them even if one asks to stop; instances of
            :class:`CheckpointSaverListener`.
        async_save: write in a background thread, as ``Saver(async_save=True)`` does, whatever the saver is set to. If
            the previous checkpoint is still being written when one comes due, which includes its way from a device,
            ``True`` waits for it, and ``"skip"`` saves nothing, with a warning. The save at a stop and at the end of
            the loop is never skipped.

    Raises:
        ValueError: not exactly one period, both ``saver`` and ``scaffold``, or a ``checkpoint_basename`` that is not
            the name of a file.
        CheckpointError: from the run, a checkpoint cannot be written.

    Unlike TensorFlow, nothing is saved from a run in which a NanTensorHook sees NaN, or from a later one, wherever the
    two are in the list. Listeners are not called then. With ``async_save``, a NaN that is still on a device is found by
    the thread that writes. It writes no file then, but the listeners have been called.
    """

    saves_checkpoints = True
    """Hooks with a state have to precede this one, so that checkpoints contain their state after the run."""

    collective = True
    """With several ranks, all of them save in the same run. The chief's clock decides which."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Scaffold | None = None,
        listeners: Iterable[CheckpointSaverListener] | None = None,
        *,
        async_save: bool | Literal["skip"] = False,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        timer = given_timer(timer, every_n_steps, every_n_secs, every_n_epochs)
        self._checkpoint_dir = os.fspath(folder(checkpoint_dir, "checkpoint_dir"))
        if saver is not None and scaffold is not None:
            raise ValueError(f"saver={saver!r}, scaffold={scaffold!r}: give CheckpointSaverHook one of them, not both")
        self._timer = hook_timer(self, timer, save_secs=save_secs, save_steps=save_steps)
        self._is_by_clock = save_secs is not None or differs_by_rank(timer)
        self._triggered = False
        # The step that was last saved or refused. Not the timer's: a StopIteration may prevent a save that came due.
        self._handled_step: int | None = None
        self._given_saver, self._scaffold = saver, scaffold
        if async_save not in (False, True, "skip"):
            raise ValueError(
                f"async_save={shown(async_save)}: give CheckpointSaverHook True, which waits for the previous "
                'checkpoint, "skip", which does not save while that is being written, or False'
            )
        self._async_save = async_save
        self._saver: Any = None
        if not is_checkpoint_name(checkpoint_basename):
            raise ValueError(
                f"checkpoint_basename={checkpoint_basename!r}: no checkpoint of this name would be found in "
                f"{self._checkpoint_dir} again: give a name without '/' and 'tfevents', that does not begin with a dot"
            )
        # The folder as it was given is for messages. A script may change the current directory while it trains.
        self.checkpoint_dir = os.path.abspath(self._checkpoint_dir)
        self._path = os.path.join(self.checkpoint_dir, checkpoint_basename)
        self._listeners = _checked_listeners(listeners)
        self._target = WriterTarget(self.checkpoint_dir, None)

    def begin(self) -> None:
        self._timer.reset()
        if self.writes:
            self._target.open()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if session.checkpoint_dir is None and session.ranks.is_chief:
            logger.warning(
                "%r saves checkpoints, but nothing will be restored: give MonitoredLoop(..., checkpoint_dir=%r) too",
                self,
                self._checkpoint_dir,
            )
        given = self._given_saver if self._scaffold is None else self._scaffold.saver
        self._saver = session.saver if given is None else given
        session.savers.append(self._saver)
        self._checks = self._waits = False
        self._coord = coord
        session.at_stop(self, lambda: self._save_for_stop(session))
        if not self._is_saved_by_another(session):
            self._save(session)
        self._timer.start_at(session.global_step)
        self._timer.update_last_triggered_step(session.global_step)

    def trigger(self) -> None:  # all ranks save in the next run, or at the end of this epoch
        self._triggered = True
        self._timer.trigger()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        is_due = self._is_due(session)
        if is_due:
            self._timer.update_last_triggered_step(session.global_step)
            if run_context.waits_for_item:  # for a whole period: the item is a long one, so save in its middle too
                self._save_due(run_context)
        if is_due or self._waits:
            # Last: a process that is killed and resumes from here would not keep the best checkpoint of this item.
            run_context.after_item(lambda: self._save_due(run_context), last=True)
            saved_in_run = not (run_context.waits_for_item or self._waits)
            if saved_in_run and "body" not in session.warned:
                self._checks = True
                run_context.before_next_run(partial(self._check_unchanged, session, StateMark(_trained(session))))

    def end(self, session: Session) -> None:
        step = session.global_step
        if step != self._handled_step and not self._is_saved_by_another(session):
            try:
                self._save(session)
            except StopIteration as stop:  # the loop ends already
                if type(stop) is not StopIteration:
                    raise
                if step != self._handled_step:
                    logger.warning("no checkpoint of step %d: %s", step, brief(stop))
        if hasattr(self._saver, "wait_for_all"):
            self._saver.wait_for_all(session)
        elif hasattr(self._saver, "wait"):
            self._saver.wait()
        for listener in self._listeners:
            listener.end(session, step)

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        return due_now(self._timer) if self._checks or self._waits else self._timer.next_due()

    def _is_due(self, session: Session) -> bool:
        triggered, self._triggered = self._triggered, False
        if session.ranks.size > 1 and self._is_by_clock:
            # The clock of one rank alone decides nothing: the others would not take part in the save.
            return triggered and session.global_step != self._timer.last_triggered_step()
        return self._timer.should_trigger_for_step(session.global_step)

    def _save_due(self, run_context: SessionRunContext) -> None:
        session = run_context.session
        self._timer.update_last_triggered_step(session.global_step)
        if self._async_save == "skip" and self._is_writing(run_context):
            self._waits = False
            logger.warning("no checkpoint of step %d: the one before it is still being written", session.global_step)
            return
        if self._save(session, may_wait=True):
            run_context.request_stop(f"a checkpoint listener asked to at step {session.global_step}")

    def _is_writing(self, run_context: SessionRunContext) -> bool:
        """Return whether the previous checkpoint is being written on any rank, unless training stops with this item."""
        stops = run_context.stop_requested or self._coord.should_stop()
        state = getattr(self._saver, "is_writing", False), stops
        states = run_context.session.ranks.gather(state, "whether a checkpoint is being written")
        return any(is_writing for is_writing, _ in states) and not any(stops for _, stops in states)

    def _save_for_stop(self, session: Session) -> None:
        self._timer.update_last_triggered_step(session.global_step)
        if not self._is_saved_by_another(session):
            self._save(session)

    def _is_saved_by_another(self, session: Session) -> bool:
        """Return whether another saver of the same folder has saved this step, so that this one need not.

        One with listeners saves all the same, because they are called for every checkpoint.
        """
        step, hook = session.saved_by.get(self._path, (None, self))
        return step == session.global_step and hook is not self and not self._listeners

    def _must_wait(self, session: Session) -> bool:
        """Return whether gradients have not been reduced yet, and the optimizer has made no step while a save waits."""
        if session.gradients is None or not unreduced(session):
            return False
        if not self._waits:
            self._steps_made = session.gradients.steps
        return self._steps_made == session.gradients.steps

    def _save(self, session: Session, may_wait: bool = False) -> bool:
        """Save a checkpoint, unless a hook refuses it, and return whether a listener asked to stop.

        If it ``may_wait``, it does so between two backward passes of an accumulation of FSDP2, for the next step of the
        optimizer.
        """
        step = session.global_step
        # With several ranks, all of them have to know whether one refuses before the chief writes.
        is_async = self._async_save or getattr(self._saver, "async_save", False)
        is_later = is_async and session.ranks.size == 1
        later: list[Refusal] | None = [] if is_later else None
        answer = session.why_no_checkpoint(later), may_wait and self._must_wait(session)
        answers = session.ranks.gather(answer, "a checkpoint")
        reason = next((each for each, _ in answers if each is not None), None)
        self._waits = reason is None and any(waits for _, waits in answers)
        if reason is not None:
            self._handled_step = step
            logger.warning("no checkpoint of step %d: %s", step, reason)
            return False
        if self._waits:
            if "waiting" not in session.warned:
                session.warned.add("waiting")
                logger.info(
                    "the checkpoint of step %d waits for the next step of the optimizer, because FSDP2 has not reduced "
                    "the gradients over the ranks yet",
                    step,
                )
            return False
        with session.paused():
            WriterTarget.flush_all()
            for listener in self._listeners:
                listener.before_save(session, step)
            logger.info("saving a checkpoint of step %d into %s", step, self._checkpoint_dir)
            # Other savers than those that write later need not have the arguments.
            options: dict[str, Any] = {"refusals": later} if later else {}
            if self._async_save:
                options["async_save"] = True
            path = self._saver.save(session, self._path, step, **options)
            self._handled_step = session.saved_step = step
            session.saved_by[self._path] = step, self
            if session.ranks.is_chief:
                summary.add_session_log(self._target.writer, "CHECKPOINT", step, path)
            # A list, not a generator for any(): every listener is called, even after one asked to stop.
            requests = [listener.after_save(session, step) for listener in self._listeners]
        return any(requests)

    def _check_unchanged(self, session: Session, saved: StateMark) -> None:
        """Log a warning, once, if the body of the loop changed something since it was saved in a run."""
        self._checks = False
        if changed := saved.changed():
            session.warned.add("body")
            logger.warning(
                "%s changed after the checkpoint of step %d was saved in a run, and before the next run. A process "
                "that resumes from it misses what the body does after the run: do it before the run or in the step "
                "function, or iterate with until_stop, which has checkpoints saved when the body of the loop is done",
                shortened(changed),
                session.global_step,
            )


def _trained(session: Session) -> dict[str, Stateful]:
    """Return what the body of the loop may change, by name: all that is saved, except the states of hooks."""
    trained = {"model": session.model, "optimizer": session.optimizer}
    return {**session.state, **{name: part for name, part in trained.items() if part is not None}}
