"""Hooks that keep something: summaries."""

from __future__ import annotations

import time
from typing import Any

from torchhooks import summary
from torchhooks.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, call_repr
from torchhooks.log import logger
from torchhooks.session import Scaffold
from torchhooks.timer import NEVER, Due, SecondOrStepTimer
from torchhooks.writers import WriterTarget


class SummarySaverHook(SessionRunHook):
    """Writes summaries every so often (``tf.train.SummarySaverHook``).

    ``save_steps=8`` writes at 1, 9, 17. The first run also writes ``SessionLog.START``, from which TensorBoard knows
    that what an earlier process wrote beyond this step is void.

    Unlike TensorFlow, which goes by its last look, whether a run is due is decided on ``session.global_step + 1``.

    Args:
        save_steps: steps from one summary to the next, or
        save_secs: seconds from one summary to the next.
        output_dir: the folder of the event file, or
        summary_writer: the writer.
        scaffold: whose ``summary_op`` to write, or
        summary_op: what to write: a mapping, tag to fetch; :func:`torchhooks.summary.histogram` and its like; a list.

    Raises:
        ValueError: not exactly one period, or not exactly one of ``scaffold`` and ``summary_op``.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: Any = None,
        summary_writer: Any = None,
        scaffold: Scaffold | None = None,
        summary_op: Any = None,
    ) -> None:
        self._arguments = {
            "save_steps": save_steps,
            "save_secs": save_secs,
            "output_dir": output_dir,
            "summary_writer": summary_writer,
            "scaffold": scaffold,
            "summary_op": summary_op,
        }
        if (scaffold is None) == (summary_op is None):
            raise ValueError(
                f"scaffold={scaffold!r}, summary_op={summary_op!r}: give SummarySaverHook exactly one of them"
            )
        self._timer = SecondOrStepTimer.named(save_steps=save_steps, save_secs=save_secs)
        self._target = WriterTarget(output_dir, summary_writer, starts_session=True)
        self._scaffold = scaffold
        self._summary_op = summary_op
        self._ops = summary.summary_ops(summary_op) if scaffold is None else ()

    def begin(self) -> None:
        self._timer.reset()
        self._due = False
        if self._scaffold is not None and self._scaffold.summary_op is not None:
            self._ops = summary.summary_ops(self._scaffold.summary_op)
        self._request = SessionRunArgs(self._ops)
        writer = self._target.open()
        if writer is None:
            logger.warning("%r has neither output_dir nor summary_writer: it writes nothing", self)
        else:
            summary.check_writer(writer, self._ops)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._due = self._timer.should_trigger_for_step(run_context.session.global_step + 1)
        return self._request if self._due and self._target.writer is not None else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        writer = self._target.writer
        if not self._due or writer is None:
            return
        step = run_context.session.global_step
        self._target.start_session(step)
        self._timer.update_last_triggered_step(step)
        now = time.time()
        run_context.when_ready(run_values.results, lambda values: summary.write_summaries(writer, values, step, now))

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        return NEVER if self._target.writer is None else self._timer.next_due()

    def __repr__(self) -> str:
        return call_repr(self, **self._arguments)
