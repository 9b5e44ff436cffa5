"""Hooks that save summaries and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from torchhooks.checkpoints.contents import gradients_to_reduce
from torchhooks.checkpoints.folder import is_checkpoint_name
from torchhooks.checkpoints.plan import Decision, LastSave, Moment, RankView, Situation, Why, plan_save
from torchhooks.checkpoints.savers import AnySaver, Refusal, SavesCheckpoints
from torchhooks.checkpoints.saving import digest_of_state
from torchhooks.common.checks import folder
from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.common.text import kind_of, shown
from torchhooks.common.timers import NEVER, Due, GivenTimer, called_within, given_timer
from torchhooks.fetches.names import Fetch, Value, describe
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunContext, SessionRunHook, SessionRunValues, loop_folder
from torchhooks.lifecycle.session import Scaffold, Session
from torchhooks.ranks.ranks import Ranks
from torchhooks.summary import operations as summary
from torchhooks.summary.writers import WriterTarget


class SummarySaverHook(PeriodicHook):
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

    ``save_steps=8`` writes at steps 1, 9 and 17. The first run also has the writer discard what an earlier process
    wrote beyond the restored step: see :doc:`Write curves </built-in-hooks>`. On a GPU, the host does not wait for the
    values, and a point is written a few runs later, with the step and the time of its run.

    With several ranks, every rank evaluates the fetches in the same runs, and the chief writes its own values, or those
    of all ranks: ``{"loss": over_ranks("loss", "mean")}``.

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
    run is due. It writes nothing for a run that counts no step; the next run is due then.

    Unlike TensorFlow, hooks with the same folder write one ``SessionLog.START``, at the first step of the session.
    """

    triggers_at_once = True

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: object = None,
        summary_writer: object = None,
        scaffold: Scaffold | None = None,
        summary_op: Fetch = None,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
        step: Fetch = "global_step",
    ) -> None:
        self._x = step
        timer = given_timer(
            timer, every_n_steps, every_n_secs, every_n_epochs, save_steps=save_steps, save_secs=save_secs
        )
        self.set_timer(timer, save_steps=save_steps, save_secs=save_secs)
        self._target = WriterTarget(output_dir, summary_writer, starts_session=True)
        if (scaffold is None) == (summary_op is None):
            raise ValueError(
                f"scaffold={scaffold!r}, summary_op={summary_op!r}: give SummarySaverHook exactly one of them, such as "
                'summary_op={"loss": "loss"}'
            )
        self._has_place = output_dir is not None or summary_writer is not None
        self._scaffold = scaffold
        self._ops = summary.summary_ops(summary_op) if scaffold is None else ()

    def begin(self) -> None:
        super().begin()
        # Not in the constructor, because a script may set the summary_op of the scaffold until the loop is created.
        if self._scaffold is not None and self._scaffold.summary_op is not None:
            self._ops = summary.summary_ops(self._scaffold.summary_op)
        writers = self._target.open() if self.writes else ()
        self._takes_counts = summary.takes_counts(writers)
        if writers:
            summary.check_writers(writers, self._ops)
        elif self.writes:
            logger.warning("%r has neither output_dir nor summary_writer: it writes nothing", self)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if session.ranks.size > 1 and not session.ranks.has_locally(self):
            # Every rank has to request the same, because of DTensors, and only the chief has opened the writer.
            self._has_place = session.ranks.gather(self._has_place, "the writer of a hook")[0]
        is_counted = self._takes_counts or not self.writes
        ops = summary.counted(self._ops, is_written=self.writes) if is_counted else self._ops
        self.fetches = (ops if self._x == "global_step" else (ops, self._x)) if self._has_place else None
        self._target.session_created(session)
        super().after_create_session(session, coord)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not self._target.is_started:
            self._target.start_session()

    def run_due(self, run_context: SessionRunContext, values: Value) -> None:
        if self._target.writers:
            run_context.when_ready(values, partial(self._write, run_context.session.global_step, time.time()))

    def _write(self, step: int, now: float, values: Value) -> None:
        if self._x != "global_step":
            values, given = values
            step = self._whole(given)
        summary.write_summaries(self._target.writers, values, step, now)

    def _whole(self, given: Value) -> int:
        """Return the place on the x axis, which has to be a whole number."""
        try:
            if float(given) == int(given) >= 0:
                return int(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
        raise TypeError(
            f"{describe(self._x)} is {kind_of(given)}: the step of a SummarySaverHook, which is what is on the x axis, "
            "must be a whole number, 0 or more"
        )

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        if not self._has_place:
            return NEVER
        # A START that is written later would void the points that other hooks write to the same place before it.
        return super().next_due() if self._target.is_started else called_within(1, super().next_due())


class MemoryPreparation:
    """Has a saver allocate the memory for its first saves in the background before they come due.

    It does so when the session is created, and again once the optimizer has made its state, in its first step. The
    optimizer does not tell of that step, because the step may be compiled, and what it calls with it. So the hook is
    called in the runs 1, 3, 7, 15 and so on, until the optimizer has made one. Several ranks do not prepare.

    Args:
        session: the session that was just created.
        saver: a saver that writes in the background; ``None`` for one that does not.
    """

    def __init__(self, session: Session, saver: AnySaver[Session] | None) -> None:
        self._session = session
        self._saver = saver if session.ranks.size == 1 else None
        self._runs = 1
        if self._saver is not None:
            self._saver.prepare(session)

    def after_run(self) -> None:
        """Called in each run in which the hook is called."""
        if self._saver is None:
            return
        gradients = self._session.gradients
        if gradients is None or gradients.steps:
            self._saver.prepare(self._session)
            self._saver = None
        else:
            self._runs *= 2

    def called_too(self, due: Due) -> Due:
        """Return ``due``, with the next run to look at the optimizer."""
        return due if self._saver is None else called_within(self._runs, due)


class CheckpointSaverListener:
    """Base class of what a CheckpointSaverHook calls around each checkpoint (``tf.train.CheckpointSaverListener``).

    >>> class Announce(CheckpointSaverListener):
    ...     def after_save(self, session, step):
    ...         print("the newest checkpoint is", latest_checkpoint("run"))
    >>> saver = CheckpointSaverHook("run", save_steps=100, listeners=[Announce()])
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


class CheckpointSaverHook(PeriodicHook):
    """Saves checkpoints periodically (``tf.train.CheckpointSaverHook``).

    >>> saver = CheckpointSaverHook("run", save_steps=6)
    >>> with MonitoredLoop(step, model, optimizer, hooks=[saver], checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 6 into run
    saving a checkpoint of step 8 into run

    A later loop with the same ``checkpoint_dir`` continues from the newest one, in this process or in another:

    >>> with MonitoredLoop(step, model, optimizer, checkpoint_dir="run") as loop:
    ...     loop.global_step
    restored step 8 from run/model.ckpt-8
    8

    ``save_steps=6`` saves at steps 0, 6 and 12, and at a clean end. A last step that was saved before is saved again if
    the training run is :doc:`finished </checkpoints>`, because code of the script may have run since. A session that
    was restored is saved again when it is created, unless it was finished. In a loop driven by ``until_stop``, the hook
    saves when the body of the ``for`` is done with the item. Place it after the hooks that write curves. :doc:`Save
    </checkpoints>` has the details.

    Args:
        checkpoint_dir: the folder; by default, the ``checkpoint_dir`` of the loop, which restores from it.
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
            the loop is never skipped. In one process, a save is put off while memory for its copy is being pinned.

    Raises:
        ValueError: not exactly one period, both ``saver`` and ``scaffold``, or a ``checkpoint_basename`` that is not
            the name of a file.
        CheckpointError: from the run, a checkpoint cannot be written.

    Unlike TensorFlow, nothing is saved from a run in which a NanTensorHook sees NaN, or from a later one, wherever the
    two are in the list. Listeners are not called then. With ``async_save``, a NaN that is still on a device is found by
    the thread that writes. It writes no file then, but the listeners have been called.
    """

    works_at_end = True
    saves_checkpoints = True
    """Hooks with a state have to precede this one, so that checkpoints contain their state after the run."""

    collective = True
    """With several ranks, all of them save in the same run. The chief's clock decides which."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: SavesCheckpoints[Session] | None = None,
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
        timer = given_timer(
            timer, every_n_steps, every_n_secs, every_n_epochs, save_steps=save_steps, save_secs=save_secs
        )
        self._has_folder, self._basename = checkpoint_dir is not None, checkpoint_basename
        if saver is not None and scaffold is not None:
            raise ValueError(f"saver={saver!r}, scaffold={scaffold!r}: give CheckpointSaverHook one of them, not both")
        self.set_timer(timer, save_secs=save_secs, save_steps=save_steps)
        self.last_save = LastSave()
        """What the hook did last. Not the timer's last trigger: a StopIteration may prevent a save that came due."""
        self._saved_state: str | None = None  # a digest of what was saved last, if that may be marked as finished
        self._given_saver, self._scaffold = saver, scaffold
        if async_save not in (False, True, "skip"):
            raise ValueError(
                f"async_save={shown(async_save)}: give CheckpointSaverHook True, which waits for the previous "
                'checkpoint, "skip", which does not save while that is being written, or False'
            )
        self._async_save = async_save
        if not is_checkpoint_name(checkpoint_basename):
            raise ValueError(
                f"checkpoint_basename={checkpoint_basename!r}: no checkpoint of this name would be found again: give a "
                "name without '/' and 'tfevents', that does not begin with a dot"
            )
        self._listeners = _checked_listeners(listeners)
        if checkpoint_dir is not None:
            self._set_folder(os.fspath(folder(checkpoint_dir, "checkpoint_dir")))

    def _set_folder(self, checkpoint_dir: str) -> None:
        # The folder as it was given is for messages. A script may change the current directory while it trains.
        self._checkpoint_dir, self.checkpoint_dir = checkpoint_dir, os.path.abspath(checkpoint_dir)
        self.path: str = os.path.join(self.checkpoint_dir, self._basename)
        """The path of a checkpoint without its step."""
        self._target = WriterTarget(self.checkpoint_dir, None)

    def attach_to_loop(self, ranks: Ranks, collective: bool, checkpoint_dir: str | None) -> None:
        super().attach_to_loop(ranks, collective, checkpoint_dir)
        if not self._has_folder:
            self._set_folder(loop_folder(self, checkpoint_dir))

    # As in TensorFlow, the step that a run has reached decides. A hook that does not override before_run is chosen
    # after the step, so PeriodicHook's is taken away.
    before_run = SessionRunHook.before_run

    def begin(self) -> None:
        super().begin()
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
        saver = session.saver if given is None else given
        if id(saver) not in map(id, session.savers):  # the list is that of the loop, and a recovery comes here again
            session.savers.append(saver)
        self._saver = AnySaver(saver)
        self._waits = self._is_put_off = False
        # The step of the session before says nothing: after a recovery, it is made again with another state.
        self.last_save = self.last_save._replace(step=None)
        self._coord = coord
        session.at_stop(self, lambda: self._save_for_stop(session))
        self._save_if_planned(session, Moment.CREATED)
        # After the first save, which tells the saver what else it has to copy than the tensors that it can see.
        self._preparation = MemoryPreparation(session, self._saver if self._is_async else None)
        super().after_create_session(session, coord)
        self.trigger.fire(session.global_step)  # also after a recovery, a period begins here

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._preparation.after_run()
        # In a run that is due, the loop calls run_due() after this, which would save a second time.
        if not self.trigger.due and (self._waits or self._is_put_off):
            self._save_due(run_context, is_in_item=_is_in_item(run_context.session))

    def run_due(self, run_context: SessionRunContext, values: Value) -> None:
        if run_context.waits_for_item and not self._is_put_off:
            self._save_due(run_context)  # for a whole period: the item is a long one, so save in its middle too
        self._save_due(run_context, is_in_item=_is_in_item(run_context.session))

    def end(self, session: Session) -> None:
        step = session.global_step
        try:
            self._save_if_planned(session, Moment.END)
        except StopIteration as stop:  # the loop ends already
            if type(stop) is not StopIteration:
                raise
            if self.last_save.decided_step != step:
                logger.warning("no checkpoint of step %d: %s", step, brief(stop))
        # Before the listeners, so that they find the last checkpoint on the disk. An error of the thread is raised
        # here.
        self._saver.wait_for_all(session)
        for listener in self._listeners:
            listener.end(session, step)

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        due = self._preparation.called_too(super().next_due())
        return called_within(1, due) if self._waits or self._is_put_off else due

    @property
    def saved_step(self) -> int | None:  # type: ignore[override]
        return self.last_save.step

    # -- what to do: plan_save decides ----------------------------------------------------------------------------

    def _save_due(self, run_context: SessionRunContext, *, is_in_item: bool = False) -> bool:
        """Save a checkpoint that came due; return ``False`` if that was put off, so that a stop in this item saves."""
        session, refusals = run_context.session, self._refusals(run_context.session)
        decision, why = self._plan(session, Moment.DUE, refusals, run_context, is_in_item=is_in_item)
        if why is Why.IN_ITEM:
            # Last: a process that is killed and resumes from here would not keep the best checkpoint of this item.
            run_context.after_item(lambda: self._save_due(run_context), last=True)
            return False
        self.trigger.fire(session.global_step)
        self._is_put_off = why is Why.MEMORY
        if why is Why.MEMORY and _is_in_item(session):
            run_context.after_item(lambda: self._save_due(run_context), last=True)
        if decision is Decision.SAVE and self._save(session, refusals):
            run_context.request_stop(f"a checkpoint listener asked to at step {session.global_step}")
        return decision is not Decision.WAIT and why is not Why.WRITING

    def _save_for_stop(self, session: Session) -> None:
        self.trigger.fire(session.global_step)
        self._save_if_planned(session, Moment.STOP)

    def _save_if_planned(self, session: Session, moment: Moment) -> None:
        refusals = self._refusals(session)
        decision, _ = self._plan(session, moment, refusals)
        if decision is Decision.MARK and self._saver.mark_finished(session, self.path, session.global_step):
            self.last_save = self.last_save._replace(finish=session.why_finished, decided_finish=session.why_finished)
        elif decision in (Decision.MARK, Decision.SAVE):
            # Where the data had ended when a stop was noticed, the end only has to say that the run is finished.
            may_be_marked = moment is Moment.STOP and session.position.stopped_at_end
            self._save(session, refusals, may_be_marked=may_be_marked)

    def _refusals(self, session: Session) -> list[Refusal] | None:
        """Return a list for what the thread that writes has to ask; several ranks ask before the chief writes."""
        return [] if self._is_async and session.ranks.size == 1 else None

    def _plan(
        self,
        session: Session,
        moment: Moment,
        refusals: list[Refusal] | None,
        run_context: SessionRunContext | None = None,
        *,
        is_in_item: bool = False,
    ) -> tuple[Decision, Why]:
        """Decide with the other ranks, note what was decided, and log why nothing is saved."""
        step, finish, path = session.global_step, session.why_finished, self.path
        others = [hook for hook in session.loop_hooks if isinstance(hook, CheckpointSaverHook) and hook is not self]
        situation = Situation(
            moment,
            step,
            finish,
            was_finished=session.was_finished,
            is_repeating=session.position.is_repeating,
            is_in_item=is_in_item,
            was_saved_by_another=any(
                hook.path == path
                and (hook.last_save.step, hook.last_save.finish) == (step, finish)
                # At the same step, a later run has another place in the data.
                and (moment is not Moment.DUE or hook.last_save.runs == session.total_runs)
                for hook in others
            ),
        )
        decision, why = plan_save(situation, self.last_save)
        if decision is Decision.ASK:
            view = self._view(session, moment, refusals, run_context)
            situation = situation._replace(ranks=session.ranks.gather(view, "a checkpoint"))
            decision, why = plan_save(situation, self.last_save)
        if why not in (Why.IN_ITEM, Why.MEMORY):
            self._waits = why is Why.GRADIENTS
        if why in (Why.FINISHED, Why.REPEATING, Why.REFUSED):
            self.last_save = self.last_save._replace(decided_step=step, decided_finish=finish)
        self._tell(session, why, situation)
        return decision, why

    def _view(
        self,
        session: Session,
        moment: Moment,
        refusals: list[Refusal] | None,
        run_context: SessionRunContext | None,
    ) -> RankView:
        """Return what this rank knows."""
        is_stopping = is_writing = lacks_memory = is_accumulating = False
        if run_context is not None:  # a save that came due, which may be put off
            is_stopping = self._is_stopping(run_context)
            is_writing = self._async_save == "skip" and self._saver.is_writing
            lacks_memory = (is_stopping or not is_writing) and self._lacks_memory(run_context)
            is_accumulating = self._waits_for_optimizer(session)
        # To ask may wait for the device. In vain, if this rank is the only one, and puts the save off.
        is_put_off = session.ranks.size == 1 and (lacks_memory or (is_writing and not is_stopping))
        return RankView(
            refusal=None if is_put_off else session.why_no_checkpoint(refusals),
            loops=tuple(session.position.loops),
            has_listeners=bool(self._listeners),
            is_writing=is_writing,
            is_stopping=is_stopping,
            lacks_memory=lacks_memory,
            has_unreduced_gradients=is_accumulating,
            is_unchanged=(
                moment is Moment.END and self._saved_state is not None and self._saved_state == digest_of_state(session)
            ),
        )

    def _tell(self, session: Session, why: Why, situation: Situation) -> None:
        """Log why nothing is saved now."""
        step = situation.step
        if why is Why.REPEATING:
            logger.info("no checkpoint of step %d: %s", step, why.value)
        elif why is Why.WRITING:
            logger.warning("no checkpoint of step %d: %s", step, why.value)
        elif why is Why.REFUSED:
            reason = next(each.refusal for each in situation.ranks if each.refusal is not None)
            logger.warning("no checkpoint of step %d: %s", step, reason)
        elif why is Why.APART:
            logger.warning(
                "no checkpoint of step %d: the ranks are in different loops over their data, so none of them could "
                "resume from it. Begin the same loops on all ranks, and leave them after the same run",
                step,
            )
        elif why is Why.MEMORY and "pinning" not in session.warned:
            session.warned.add("pinning")
            logger.info("the checkpoint of step %d is put off until memory for its copy is pinned", step)
        elif why is Why.GRADIENTS and "waiting" not in session.warned:
            session.warned.add("waiting")
            logger.info(
                "the checkpoint of step %d waits for the next step of the optimizer, because FSDP2 has not reduced "
                "the gradients over the ranks yet",
                step,
            )

    def _is_stopping(self, run_context: SessionRunContext) -> bool:
        return run_context.stop_requested or self._coord.should_stop()

    def _lacks_memory(self, run_context: SessionRunContext) -> bool:
        """Return whether memory for the copy of a save in the background is still being pinned.

        Of several ranks, none asks: all of them would have to put the save off to the same item.
        """
        session = run_context.session
        if not self._is_async or session.ranks.size > 1:
            return False
        if run_context.finished and not _is_in_item(session):
            return False  # of an item that the body left by break: it has no next one
        return not self._saver.prepare(session)

    @property
    def _is_async(self) -> bool:
        return bool(self._async_save) or self._saver.async_save

    def _waits_for_optimizer(self, session: Session) -> bool:
        """Return whether gradients have not been reduced yet, and the optimizer has made no step while a save waits.

        The wait begins with the first call of which that is true: the steps of the optimizer are counted from there.
        """
        if session.gradients is None or not gradients_to_reduce(session):
            return False
        if not self._waits:
            self._steps_made = session.gradients.steps
        return self._steps_made == session.gradients.steps

    # -- doing it -------------------------------------------------------------------------------------------------

    def _save(self, session: Session, refusals: list[Refusal] | None, *, may_be_marked: bool = False) -> bool:
        """Save a checkpoint, and return whether a listener asked to stop.

        If it ``may_be_marked`` as finished, remember what its state was, to tell at the end whether code of the script
        has changed it since.
        """
        step, finish = session.global_step, session.why_finished
        with session.paused():
            # Before the checkpoint is written: the process that resumes from it does not write the earlier points
            # again, so after a kill -9 those have to be in their files.
            WriterTarget.flush_all()
            for listener in self._listeners:
                listener.before_save(session, step)
            logger.info("saving a checkpoint of step %d into %s", step, self._checkpoint_dir)
            asked_later, in_background = refusals or (), bool(self._async_save)
            path = self._saver.save(session, self.path, step, refusals=asked_later, async_save=in_background)
            # Before the listeners are called: if one of them raises StopIteration, end() must not save the same state
            # again.
            self.last_save = LastSave(step, finish, session.total_runs, step, finish)
            self._saved_state = digest_of_state(session) if may_be_marked else None
            session.checkpoint_saved(os.path.dirname(self.path))
            for writer in self._target.writers:  # only the chief has one
                writer.add_session_log("CHECKPOINT", step, path)
            # A list, not a generator for any(): every listener is called, even after one asked to stop.
            requests = [listener.after_save(session, step) for listener in self._listeners]
        return any(requests)


def _is_in_item(session: Session) -> bool:
    return session.position.depth > 0
